#!/bin/bash
# transformer_1.3b_100b.sh: a Transformer (RoPE, SwiGLU, full attention) with 1.3B parameters on 100B tokens,
# the baseline of both papers.
#
# COST SHEET
#   parameters    1,453,411,584: 1,305,953,280 in the blocks, 147,458,304 in the final norm and the embedding,
#                 with a head of its own
#   tokens        100B of FineWeb-Edu, Llama-2's tokenizer: 190,734 steps of 524,288 (128 rows of 4,096)
#   learning rate 4e-4, warm-up over 1B tokens (1,907 steps), cosine to 4e-5
#   open          the text of the papers says 0.5M tokens a step, the file names of their code 2M and 4M (TOTAL_BATCH)
#   memory        63.2 GiB of an H200 at micro-batches of 8 rows (--dry-run)
#   disk          200 GB of shards, 16.2 GiB for a checkpoint: the newest 2 and one every 20,000 steps are kept
#   speed         61,909 tokens/s on one H200, 121,376 on two
#                 measured 2026-11-29 and 2026-11-30, 8 x 4,096 tokens a micro-batch
#                 steps of 1 micro-batch on one, of 2 each on two, where the update weighs less
#    GPUs     tokens/s        hours    GPU hours      dollars   at $3.00 a GPU hour
#       1        61909        448.7          449         1346   measured
#       2       121376        228.9          458         1373   measured
#       8       481392         57.7          462         1385   extrapolated
#      16       737427         37.7          603         1808   extrapolated
#      32      1158958         24.0          767         2301   extrapolated
# scripts/train_loop.sh says how more GPUs were reckoned, how to start it on them and on Slurm, and how to stop it.
NAME=transformer_1.3b_100b PRESET=transformer-1.3b PARAMETERS=1453411584 RATE=61909 RATE2=121376
TOKENS=${TOKENS:-100B} # whole run; the environment may shorten it
WARMUP=1B KEEP_EVERY=20000

cd "$(dirname "$0")/.." && [ -e scripts/train_loop.sh ] || cd "${SLURM_SUBMIT_DIR:-.}" || exit 3
. scripts/train_loop.sh
