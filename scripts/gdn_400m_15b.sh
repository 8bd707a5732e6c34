#!/bin/bash
# gdn_400m_15b.sh: Gated DeltaNet with 400M parameters on 15B tokens: the size of the
# ablations of arXiv 2412.06464 (tables S.1 and S.2).
#
# COST SHEET
#   parameters    400,102,104: 350,948,568 in the blocks, 49,153,536 in the final norm and the embedding,
#                 which is the head too
#   tokens        15B of FineWeb-Edu, Llama-2's tokenizer: 28,610 steps of 524,288 (128 rows of 4,096)
#   learning rate 4e-4, warm-up over 150M tokens (286 steps), cosine to 4e-5
#   open          the text of the paper says 1B tokens of warm-up, its code 1% of the run
#   memory        36.3 GiB of an H200 at micro-batches of 8 rows (--dry-run)
#   disk          30 GB of shards, 4.5 GiB for a checkpoint: the newest 2 and one every 5,000 steps are kept
#   speed         199,727 tokens/s on one H200, 394,401 on two
#                 measured 2026-11-29 and 2026-11-30, 8 x 4,096 tokens a micro-batch
#                 steps of 1 micro-batch on one, of 2 each on two, where the update weighs less
#    GPUs     tokens/s        hours    GPU hours      dollars   at $3.00 a GPU hour
#       1       199727         20.9           21           63   measured
#       2       394401         10.6           21           63   measured
#       8      1557923          2.7           21           64   extrapolated
#      16      2449066          1.7           27           82   extrapolated
#      32      3921029          1.1           34          102   extrapolated
# scripts/train_loop.sh says how more GPUs were reckoned, how to start it on them and on Slurm, and how to stop it.
NAME=gdn_400m_15b PRESET=gdn-400m PARAMETERS=400102104 RATE=199727 RATE2=394401
TOKENS=${TOKENS:-15B} # whole run; the environment may shorten it
WARMUP=150M KEEP_EVERY=5000

cd "$(dirname "$0")/.." && [ -e scripts/train_loop.sh ] || cd "${SLURM_SUBMIT_DIR:-.}" || exit 3
. scripts/train_loop.sh
