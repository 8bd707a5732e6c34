#!/bin/bash
# gdn2_1.3b_100b.sh: Gated DeltaNet-2 with 1.3B parameters on 100B tokens, as in arXiv 2605.22791.
#
# COST SHEET
#   parameters    1,450,096,416: 1,302,638,112 in the blocks, 147,458,304 in the final norm and the embedding,
#                 with a head of its own
#   tokens        100B of FineWeb-Edu, Llama-2's tokenizer: 190,734 steps of 524,288 (128 rows of 4,096)
#   learning rate 4e-4, warm-up over 1B tokens (1,907 steps), cosine to 4e-5
#   open          the text of the papers says 0.5M tokens a step, the file names of their code 2M and 4M (TOTAL_BATCH)
#   memory        95.6 GiB of an H200 at micro-batches of 8 rows (--dry-run; BATCH=4 for a GPU of 80 GB)
#   disk          200 GB of shards, 16.2 GiB for a checkpoint: the newest 2 and one every 20,000 steps are kept
#   speed         61,999 tokens/s on one H200, 119,379 on two
#                 measured 2026-11-30, two GPUs on 2026-11-29 before channel decay got faster, 8 x 4,096 tokens a micro-batch
#                 steps of 1 micro-batch on one, of 2 each on two, where the update weighs less
#    GPUs     tokens/s        hours    GPU hours      dollars   at $3.00 a GPU hour
#       1        61999        448.0          448         1344   measured
#       2       119379        232.7          465         1396   measured
#       8       482103         57.6          461         1383   extrapolated
#      16       738656         37.6          602         1805   extrapolated
#      32      1161043         23.9          766         2297   extrapolated
# scripts/train_loop.sh says how more GPUs were reckoned, how to start it on them and on Slurm, and how to stop it.
NAME=gdn2_1.3b_100b PRESET=gdn2-1.3b PARAMETERS=1450096416 RATE=61999 RATE2=119379
TOKENS=${TOKENS:-100B} # whole run; the environment may shorten it
WARMUP=1B KEEP_EVERY=20000

cd "$(dirname "$0")/.." && [ -e scripts/train_loop.sh ] || cd "${SLURM_SUBMIT_DIR:-.}" || exit 3
. scripts/train_loop.sh
