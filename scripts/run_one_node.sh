#!/bin/bash
# run_one_node.sh: trains with all GPUs of one machine, or with all of its cores, as several ranks.
#   PROGRAM=./train_gdncu scripts/run_one_node.sh --model gdn-1.3b --train 'out/data/fwe_train_*.bin' ...
#
# Edit: PROGRAM (train_gdncu: one rank for each GPU that nvidia-smi lists), RANKS (on CPUs one for 4 to 8 cores), THREADS
#   (cores of each), the options of train_gdn below.
#   --total-batch must be a multiple of batch x seq-len x RANKS. The same --out and the same command go on where an
#   earlier run stopped, also with another number of ranks.
# Stop it with:  kill -USR1 PID-OF-MPIRUN   (saves, exit code 75; Ctrl-C leaves no time for a save of a large model)
set -u
cd "$(dirname "$0")/.." || exit 3

PROGRAM=${PROGRAM:-./train_gdn}
if [ -z "${RANKS:-}" ] && [ "$(basename "$PROGRAM")" = train_gdncu ]; then RANKS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU'); fi
if [ "${RANKS:-}" = 0 ]; then
  echo "run_one_node.sh: nvidia-smi lists no GPU: set RANKS, or PROGRAM=./train_gdn for the CPU" >&2
  exit 3
fi
RANKS=${RANKS:-2}
THREADS=${THREADS:-$(($(nproc) / RANKS > 0 ? $(nproc) / RANKS : 1))}
OUT=${OUT:-out/one-node}

# in a container one is root, which mpirun refuses at first
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
OMP_NUM_THREADS=$THREADS exec mpirun -np "$RANKS" --bind-to none "$PROGRAM" \
  --model tiny-gdn --out "$OUT" --resume auto --save-every 100 "$@"
