#!/bin/bash
# gdn2_h_1.3b_100b.sh: Gated DeltaNet-2 and sliding-window attention in turn, with 1.3B parameters on
# 100B tokens, as in arXiv 2605.22791.
#
# COST SHEET
#   parameters    1,447,772,688: 1,300,314,384 in the blocks, 147,458,304 in the final norm and the embedding,
#                 with a head of its own
#   tokens        100B of FineWeb-Edu, Llama-2's tokenizer: 190,734 steps of 524,288 (128 rows of 4,096)
#   learning rate 4e-4, warm-up over 1B tokens (1,907 steps), cosine to 4e-5
#   open          the text of the papers says 0.5M tokens a step, the file names of their code 2M and 4M (TOTAL_BATCH)
#   memory        80.4 GiB of an H200 at micro-batches of 8 rows (--dry-run; BATCH=4 for a GPU of 80 GB)
#   disk          200 GB of shards, 16.2 GiB for a checkpoint: the newest 2 and one every 20,000 steps are kept
#   speed         61,749 tokens/s on one H200, 121,677 on two
#                 measured 2026-11-30, two GPUs before channel decay got faster, 8 x 4,096 tokens a micro-batch
#                 steps of 1 micro-batch on one, of 2 each on two, where the update weighs less
#    GPUs     tokens/s        hours    GPU hours      dollars   at $3.00 a GPU hour
#       1        61749        449.8          450         1350   measured
#       2       121677        228.3          457         1370   measured
#       8       480235         57.8          463         1388   extrapolated
#      16       736736         37.7          603         1810   extrapolated
#      32      1159067         24.0          767         2301   extrapolated
# scripts/train_loop.sh says how more GPUs were reckoned, how to start it on them and on Slurm, and how to stop it.
NAME=gdn2_h_1.3b_100b PRESET=gdn2-h-1.3b PARAMETERS=1447772688 RATE=61749 RATE2=121677
TOKENS=${TOKENS:-100B} # whole run; the environment may shorten it
WARMUP=1B KEEP_EVERY=20000

cd "$(dirname "$0")/.." && [ -e scripts/train_loop.sh ] || cd "${SLURM_SUBMIT_DIR:-.}" || exit 3
. scripts/train_loop.sh
