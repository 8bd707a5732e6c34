#!/bin/bash
# h1_1.3b_100b.sh: Gated DeltaNet-H1, Gated DeltaNet and sliding-window attention in turn, with 1.3B
# parameters on 100B tokens, as in arXiv 2412.06464.
#
# COST SHEET
#   parameters    1,446,170,328: 1,298,712,024 in the blocks, 147,458,304 in the final norm and the embedding,
#                 with a head of its own
#   tokens        100B of FineWeb-Edu, Llama-2's tokenizer: 190,734 steps of 524,288 (128 rows of 4,096)
#   learning rate 4e-4, warm-up over 1B tokens (1,907 steps), cosine to 4e-5
#   open          the text of the papers says 0.5M tokens a step, the file names of their code 2M and 4M (TOTAL_BATCH)
#   memory        75.6 GiB of an H200 at micro-batches of 8 rows (--dry-run)
#   disk          200 GB of shards, 16.2 GiB for a checkpoint: the newest 2 and one every 20,000 steps are kept
#   speed         64,327 tokens/s on one H200, 128,938 on two
#                 measured 2026-11-29, 8 x 4,096 tokens a micro-batch
#                 steps of 1 micro-batch on one, of 2 each on two, where the update weighs less
#    GPUs     tokens/s        hours    GPU hours      dollars   at $3.00 a GPU hour
#       1        64327        431.8          432         1295   measured
#       2       128938        215.4          431         1293   measured
#       8       499720         55.6          445         1334   extrapolated
#      16       759652         36.6          585         1755   extrapolated
#      32      1187527         23.4          749         2246   extrapolated
# scripts/train_loop.sh says how more GPUs were reckoned, how to start it on them and on Slurm, and how to stop it.
NAME=h1_1.3b_100b PRESET=h1-1.3b PARAMETERS=1446170328 RATE=64327 RATE2=128938
TOKENS=${TOKENS:-100B} # whole run; the environment may shorten it
WARMUP=1B KEEP_EVERY=20000

cd "$(dirname "$0")/.." && [ -e scripts/train_loop.sh ] || cd "${SLURM_SUBMIT_DIR:-.}" || exit 3
. scripts/train_loop.sh
