#!/bin/bash
# run_multi_node.sh: trains on several machines that can reach each other by ssh without a password.
#
# Edit: PROGRAM (./train_gdncu for GPUs, one a rank: as many slots as GPUs on each line), HOSTFILE, a file with one line a
#   machine, `name slots=RANKS-ON-IT`; RANKS, the sum of the slots; THREADS, the cores of each rank; the options of
#   train_gdn below. This folder and --out must be the same on all machines (a shared file system): all ranks write the
#   checkpoints together. A machine with several networks may need --mca btl_tcp_if_include eth0 (the name of the network
#   between the machines).
# Stop it with:  kill -USR1 PID-OF-MPIRUN   (saves, exit code 75)
set -u
cd "$(dirname "$0")/.." || exit 3

PROGRAM=${PROGRAM:-./train_gdn}
HOSTFILE=${HOSTFILE:-hosts.txt}
RANKS=${RANKS:-16}
THREADS=${THREADS:-8}
OUT=${OUT:-out/multi-node}

if [ ! -r "$HOSTFILE" ]; then
  echo "run_multi_node.sh: $HOSTFILE: no such file; needed one line a machine: NAME slots=COUNT (HOSTFILE names it)" >&2
  exit 3
fi
# in a container one is root, which mpirun refuses at first
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
exec mpirun -np "$RANKS" --hostfile "$HOSTFILE" --map-by slot:PE="$THREADS" --bind-to core -x OMP_NUM_THREADS="$THREADS" \
  "$PROGRAM" --model tiny-gdn --out "$OUT" --resume auto --save-every 100 "$@"
