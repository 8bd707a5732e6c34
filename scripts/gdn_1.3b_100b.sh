#!/bin/bash
# gdn_1.3b_100b.sh: Gated DeltaNet with 1.3B parameters on 100B tokens, as in arXiv 2412.06464
# (tables 3 to 5).
#
# COST SHEET
#   parameters    1,446,891,696: 1,299,433,392 in the blocks, 147,458,304 in the final norm and the embedding,
#                 with a head of its own
#   tokens        100B of FineWeb-Edu, Llama-2's tokenizer: 190,734 steps of 524,288 (128 rows of 4,096)
#   learning rate 4e-4, warm-up over 1B tokens (1,907 steps), cosine to 4e-5
#   open          the text of the papers says 0.5M tokens a step, the file names of their code 2M and 4M (TOTAL_BATCH)
#   memory        87.2 GiB of an H200 at micro-batches of 8 rows (--dry-run; BATCH=4 for a GPU of 80 GB)
#   disk          200 GB of shards, 16.2 GiB for a checkpoint: the newest 2 and one every 20,000 steps are kept
#   speed         65,362 tokens/s on one H200, 132,748 on two
#                 measured 2026-11-29, 8 x 4,096 tokens a micro-batch
#                 steps of 1 micro-batch on one, of 2 each on two, where the update weighs less
#    GPUs     tokens/s        hours    GPU hours      dollars   at $3.00 a GPU hour
#       1        65362        425.0          425         1275   measured
#       2       132748        209.3          419         1256   measured
#       8       507516         54.7          438         1314   extrapolated
#      16       768534         36.1          578         1735   extrapolated
#      32      1198220         23.2          742         2226   extrapolated
# scripts/train_loop.sh says how more GPUs were reckoned, how to start it on them and on Slurm, and how to stop it.
NAME=gdn_1.3b_100b PRESET=gdn-1.3b PARAMETERS=1446891696 RATE=65362 RATE2=132748
TOKENS=${TOKENS:-100B} # whole run; the environment may shorten it
WARMUP=1B KEEP_EVERY=20000

cd "$(dirname "$0")/.." && [ -e scripts/train_loop.sh ] || cd "${SLURM_SUBMIT_DIR:-.}" || exit 3
. scripts/train_loop.sh
