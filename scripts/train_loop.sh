#!/bin/bash
# train_loop.sh: what the scripts of the published runs share. Each of them sets the variables of its cost sheet,
# then sources this file, which starts the trainer, again after every crash, until the run is done.
#
#   scripts/gdn_1.3b_100b.sh                        one GPU
#   GPUS=8 scripts/gdn_1.3b_100b.sh                 one machine, by mpirun
#   GPUS=32 HOSTFILE=hosts.txt scripts/...          several; this folder and OUT on a file system that they share
#   sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 --time=1-0 --signal=B:USR1@600 \
#          --requeue --open-mode=append --export=ALL,GPUS=32 scripts/...  Slurm; mpirun finds the machines itself; at
#                                                                         USR1 the job goes back into the queue
#   DRY_RUN=1 scripts/...     (or --dry-run)        settings, memory, disk, time, dollars; needs no GPU and no data
#   COSTS=1 scripts/...                             the table of the cost sheet, computed again
#   kill -USR1 PID            saves and ends with code 75; the same command goes on from there (TERM, INT, HUP: the same)
#
# Further arguments are options of train_gdn and win over the script's. From the environment:
#   DATA     out/data/fwe        shards $DATA_train_*.bin and $DATA_val_*.bin (data/README.md makes them), or: recall
#   OUT      out/NAME            folder of the run, checkpoints and log
#   GPUS     1                   HOSTFILE  empty: this machine
#   BATCH    8                   rows of a micro-batch, as many as the memory takes; made smaller to fit the GPUs
#   TOTAL_BATCH, SEQ_LEN, TOKENS, SAVE_EVERY, MODEL    as the script says
#   PRICE    3.00                dollars for a GPU hour
#   TRAIN    ./train_gdncu       the trainer (a dry run: ./train_gdn)
#   TRIES    3                   crashes in a row without a new checkpoint that end the loop
#   RETRY_WAIT  10               seconds before the next try
#
# What ends the loop: 0 the run is done; 2, 3, 4 (options, machine, data) and 78 (diverged), which would come again;
# a signal to the script, the file OUT/STOP (75); TRIES. Else (75 by --stop-after, 76 a hang, a crash) the run goes on.
set -u

# the recipe of both papers (WARMUP and KEEP_EVERY are the script's); the environment may have set other values
options=(
  --lr 4e-4 --min-lr 4e-5 --warmup-tokens "$WARMUP" --schedule cosine --beta1 0.9 --beta2 0.95 --clip 1
  --weight-decay 0.1 --decay-all on # on every parameter, as the papers' code has it
  --seed 3407 --eval-every 250 --keep 2 --keep-every "$KEEP_EVERY"
)
: "${TOTAL_BATCH:=524288}" "${SEQ_LEN:=4096}" "${BATCH:=8}" "${SAVE_EVERY:=250}" "${GPUS:=1}" "${HOSTFILE:=}"
: "${DATA:=out/data/fwe}" "${OUT:=out/$NAME}" "${MODEL:=$PRESET}" "${PRICE:=3.00}" "${TRIES:=3}" "${RETRY_WAIT:=10}"
: "${DRY_RUN:=0}" "${COSTS:=0}"
for argument in "$@"; do if [ "$argument" = --dry-run ]; then DRY_RUN=1; fi; done

loop_say() { echo "$NAME: $*" >&2; }
loop_fail() {
  echo "$NAME: error: $*" >&2
  exit 3
}
for variable in GPUS BATCH TOTAL_BATCH SEQ_LEN SAVE_EVERY TRIES RETRY_WAIT; do
  case ${!variable} in
    '' | *[!0-9]*) loop_fail "$variable is '${!variable}': needed a whole number" ;;
  esac
done
if [ "$GPUS" -lt 1 ] || [ "$BATCH" -lt 1 ] || [ "$SEQ_LEN" -lt 1 ]; then
  loop_fail "GPUS, BATCH and SEQ_LEN: needed 1 or more"
fi

# ---------------------------------------------------------------------------- costs

measured=1 # RATE is a number
case $RATE in
  '' | *[!0-9.]*) measured="" ;;
esac

# speed GPUS: tokens/s of all of them. One GPU is RATE, two of a machine RATE2, both measured. More are extrapolated: a
# step takes the time of its part of the rows, and for the exchange of gradients (fp32) and weights (bf16), nothing of it
# hidden, 6 bytes for every parameter at 250 GB/s a GPU within a machine of 8 and at 45 GB/s a GPU between machines
# (gdn/gpu_speed.h reckons the same).
speed() {
  LC_ALL=C awk -v n="$1" -v rate="$RATE" -v step="$TOTAL_BATCH" -v p="$PARAMETERS" -v two="${RATE2:-0}" 'BEGIN {
    seconds = step / (rate * n)
    if (n > 1) seconds += 6 * p * (n - 1) / n / (n > 8 ? 45e9 : 250e9)
    if (n == 2 && two > 0) seconds = step / two
    printf "%.9g\n", step / seconds
  }'
}

# costs GPUS...: one line each
costs() {
  if [ -z "$measured" ]; then
    echo "    tokens/s of $PRESET: not measured yet ($RATE)"
    return
  fi
  echo "    GPUs     tokens/s        hours    GPU hours      dollars   at \$$PRICE a GPU hour"
  for gpus in "$@"; do
    LC_ALL=C awk -v n="$gpus" -v speed="$(speed "$gpus")" -v step="$TOTAL_BATCH" -v tokens="$TOKENS" -v price="$PRICE" \
      -v two="${RATE2:-0}" 'BEGIN {
      unit["K"] = 1e3; unit["M"] = 1e6; unit["B"] = 1e9; unit["T"] = 1e12
      last = substr(tokens, length(tokens)); all = last in unit ? tokens * unit[last] : tokens + 0
      all = int(all / step) * step
      hours = all / speed / 3600
      printf "    %4d %12.0f %12.1f %12.0f %12.0f   %s\n", n, speed, hours, hours * n, hours * n * price,
        (n == 1 || (n == 2 && two > 0) ? "measured" : "extrapolated")
    }'
  done
}

if [ "$COSTS" = 1 ]; then
  costs 1 2 8 16 32
  exit 0
fi

# ---------------------------------------------------------------------------- the command

# the largest micro-batch up to BATCH that divides the rows of a GPU; what does not divide is left to the trainer to say
rows=$((TOTAL_BATCH / SEQ_LEN / GPUS))
if [ $((rows * SEQ_LEN * GPUS)) = "$TOTAL_BATCH" ]; then
  while [ "$BATCH" -gt 1 ] && [ $((rows % BATCH)) != 0 ]; do BATCH=$((BATCH - 1)); done
fi

train="${DATA}_train_*.bin" val="${DATA}_val_*.bin"
if [ "$DATA" = recall ]; then train=recall val=recall; fi
command=(--model "$MODEL" --train "$train" --val "$val" --out "$OUT" --tokens "$TOKENS" --seq-len "$SEQ_LEN"
  --batch "$BATCH" --total-batch "$TOTAL_BATCH" --eval-batches $(((256 + BATCH - 1) / BATCH)) --save-every "$SAVE_EVERY"
  --tensorboard on "${options[@]}" "$@")

if [ "$DRY_RUN" = 1 ]; then
  forecast=(--dry-run --ranks "$GPUS" --nodes $(((GPUS + 7) / 8)))
  # the trainer's hours and the dollars below come from one speed, the exchange in it. It is known of the script's model
  # in rows of 4,096 tokens, and reckoned from the script's variables. Of options, those named here change neither that
  # speed nor the length of the run; all others leave the hours to the trainer
  elsewhere=""
  if [ "$MODEL" != "$PRESET" ]; then elsewhere="MODEL=$MODEL"; fi
  if [ "$SEQ_LEN" != 4096 ]; then elsewhere="SEQ_LEN=$SEQ_LEN"; fi
  for argument in "$@"; do
    case $argument in
      --dry-run* | --out* | --train | --train=* | --val | --val=* | --tokenizer* | --batch* | --seed* | --init | --init=*) ;;
      --lr* | --min-lr* | --warmup* | --schedule* | --decay-fraction* | --weight-decay* | --decay-all*) ;;
      --beta1* | --beta2* | --adam-eps* | --clip* | --eval-* | --log-every* | --tensorboard*) ;;
      --save-every* | --keep* | --resume* | --stop-after* | --max-skips* | --hang-timeout* | --threads* | --device*) ;;
      --*) elsewhere=$argument ;;
    esac
  done
  if [ -n "$elsewhere" ]; then measured=""; fi
  if [ -n "$measured" ]; then
    forecast+=(--tokens-per-sec "$(LC_ALL=C awk -v all="$(speed "$GPUS")" -v n="$GPUS" 'BEGIN { printf "%.9g", all / n }')")
  fi
  said=$("${TRAIN:-./train_gdn}" "${command[@]}" "${forecast[@]}") || exit
  echo "$said"
  echo "Costs"
  case $said in
    *"it cannot be run like this"*)
      echo "    none: $GPUS GPUs cannot share steps of $TOTAL_BATCH tokens; change GPUS, BATCH or TOTAL_BATCH"
      exit 0
      ;;
  esac
  if [ -z "$elsewhere" ]; then
    costs "$GPUS"
  else
    echo "    none with $elsewhere: they are known for $PRESET as it is, with TOKENS and TOTAL_BATCH from the environment"
  fi
  if [ -z "$measured" ]; then
    echo "    a checkpoint every $SAVE_EVERY steps"
  else
    LC_ALL=C awk -v n="$SAVE_EVERY" -v s="$((TOTAL_BATCH * SAVE_EVERY))" -v speed="$(speed "$GPUS")" \
      'BEGIN { m = s / speed / 60; printf "    a checkpoint every %d steps, about every %.*f minutes\n", n, m < 10, m }'
  fi
  exit 0
fi

TRAIN=${TRAIN:-./train_gdncu}
if [ ! -x "$TRAIN" ]; then loop_fail "$TRAIN: no such program; run make train_gdncu, or name another by TRAIN"; fi
launch=("$TRAIN")
if [ "$GPUS" -gt 1 ] || [ -n "$HOSTFILE" ]; then
  command -v mpirun >/dev/null || loop_fail "GPUS=$GPUS needs mpirun: install Open MPI (scripts/setup.sh test)"
  # in a container one is root, which mpirun refuses at first
  if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
  launch=(mpirun -np "$GPUS")
  if [ -n "$HOSTFILE" ]; then
    if [ ! -r "$HOSTFILE" ]; then
      loop_fail "HOSTFILE $HOSTFILE: no such file; needed one line a machine: NAME slots=COUNT"
    fi
    launch+=(--hostfile "$HOSTFILE")
  fi
  launch+=(--bind-to none "$TRAIN")
fi

# ---------------------------------------------------------------------------- the loop

child="" asked="" interrupted=""
loop_stop() { # a signal to the script: the trainer saves and ends
  asked=$1 interrupted=1
  loop_say "$1: stopping at the next step"
  if [ -n "$child" ]; then kill -USR1 "$child" 2>/dev/null; fi
}
for signal in USR1 TERM INT HUP; do
  # shellcheck disable=SC2064
  trap "loop_stop SIG$signal" $signal
done

loop_requeue() { # after USR1, which Slurm sends when the time of a job is nearly over; other stops are meant to last
  if [ "$asked" != SIGUSR1 ] || [ "$1" != 75 ] || [ -z "${SLURM_JOB_ID:-}" ]; then return; fi
  if command -v scontrol >/dev/null && scontrol requeue "$SLURM_JOB_ID"; then
    loop_say "job $SLURM_JOB_ID is in the queue again"
  else
    loop_say "job $SLURM_JOB_ID is not in the queue again: scontrol requeue failed or is missing; submit it by hand"
  fi
}

newest_step() { # name of the newest checkpoint, or nothing
  local found=""
  for folder in "$OUT"/step-*; do if [ -d "$folder" ]; then found=$folder; fi; done
  echo "$found"
}

stopped_by_file() { # the last event of the log says that someone made OUT/STOP
  tail -n 1 "$OUT/log.jsonl" 2>/dev/null | grep -q '"kind":"stop".*the file STOP'
}

crashes=0 before=$(newest_step)
loop_say "kill -USR1 $$ saves and stops; the same command goes on"
while [ -z "$asked" ]; do
  "${launch[@]}" "${command[@]}" --resume auto &
  child=$!
  if [ -n "$asked" ]; then kill -USR1 "$child" 2>/dev/null; fi # the signal came before there was a child
  while :; do # a signal ends `wait` early
    interrupted=""
    wait "$child" 2>/dev/null # bash would say how it was killed; the exit code is said below
    code=$?                   # asked again, bash gives the same code again
    if [ -z "$interrupted" ]; then break; fi
  done
  child=""
  case $code in
    0)
      loop_say "done: $OUT"
      exit 0
      ;;
    2 | 3 | 4 | 78)
      loop_say "ends with exit code $code"
      exit "$code"
      ;;
  esac
  if [ -n "$asked" ] || { [ "$code" = 75 ] && stopped_by_file; }; then
    if [ "$code" -gt 128 ]; then code=75; fi # the signal came before the trainer could take it
    loop_say "stopped; the same command goes on"
    loop_requeue "$code"
    exit "$code"
  fi
  now=$(newest_step)
  if [ "$now" = "$before" ]; then crashes=$((crashes + 1)); else crashes=0; fi
  before=$now
  if [ "$crashes" -ge "$TRIES" ]; then
    loop_say "ends with exit code $code: $crashes times in a row without a new checkpoint"
    exit "$code"
  fi
  loop_say "exit code $code, newest checkpoint ${now:-none}: starting again in $RETRY_WAIT s"
  for ((i = 0; i < RETRY_WAIT; i++)); do # in pieces: a signal is heard between two commands
    if [ -z "$asked" ]; then sleep 1; fi
  done
done
loop_requeue 75
exit 75
