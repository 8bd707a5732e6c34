#!/bin/bash
# run_slurm.sh: a Slurm job that saves before its time is over and puts itself into the queue again.
#   sbatch scripts/run_slurm.sh
#
# Edit: PROGRAM (./train_gdncu for GPUs: then also --gpus-per-node below, one rank a GPU), the #SBATCH lines (machines,
#   ranks on each, cores of each rank, time, partition and account of your site), the options of train_gdn below.
#   --signal=B:USR1@300 tells this script 300 s before the end: take more when a save of your model takes longer.
#   Submit it from this folder; it and OUT must lie on a shared file system. A file STOP in OUT ends it for good.
# mpirun finds the machines of the job by itself. A site that wants srun: srun --mpi=pmix --kill-on-bad-exit=1.
#SBATCH --job-name=train_gdn
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
##SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train_gdn-%j.txt
set -u
cd "${SLURM_SUBMIT_DIR:-.}" || exit 3

PROGRAM=${PROGRAM:-./train_gdn}
OUT=${OUT:-out/slurm-${SLURM_JOB_ID:-test}}
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# in a container one is root, which mpirun refuses at first
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
# mpirun passes USR1 on to all ranks; they agree on a step, save, and end with code 75
mpirun -np "${SLURM_NTASKS:?start this with sbatch}" --map-by slot:PE="$OMP_NUM_THREADS" "$PROGRAM" \
  --model tiny-gdn --out "$OUT" --resume auto --save-every 100 "$@" &
pid=$!
asked=1
trap 'asked=1; kill -USR1 $pid' USR1
while [ $asked = 1 ]; do # the signal ends `wait` early
  asked=0
  wait $pid
  code=$?
done
# by the signal or --stop-after; who made the file STOP does not want it back
if [ "$code" = 75 ] && ! tail -n 1 "$OUT/log.jsonl" 2>/dev/null | grep -q '"kind":"stop".*the file STOP'; then
  scontrol requeue "${SLURM_JOB_ID:?}"
fi
exit "$code"
