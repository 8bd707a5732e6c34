#!/bin/bash
# run_one_node.sh: trains with all cores of one machine as several ranks.
#
# Edit: RANKS (processes; on CPUs one for 4 to 8 cores), THREADS (cores of each), the options of train_gdn below.
#   --total-batch must be a multiple of batch x seq-len x RANKS. The same --out and the same command go on where an
#   earlier run stopped, also with another number of ranks.
# Stop it with:  kill -USR1 PID-OF-MPIRUN   (saves, exit code 75; Ctrl-C leaves no time for a save of a large model)
set -u
cd "$(dirname "$0")/.." || exit 3

RANKS=${RANKS:-2}
THREADS=${THREADS:-$(($(nproc) / RANKS > 0 ? $(nproc) / RANKS : 1))}
OUT=${OUT:-out/one-node}

OMP_NUM_THREADS=$THREADS exec mpirun -np "$RANKS" --bind-to none ./train_gdn \
  --model tiny-gdn --out "$OUT" --resume auto --save-every 100 "$@"
