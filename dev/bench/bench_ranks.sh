#!/bin/bash
# bench_ranks.sh: training speed on one GPU and on two of the same machine: full steps with clipping and AdamW, bf16.
#   dev/bench/bench_ranks.sh DATA [PROGRAM] < list      list: lines `model batch seq_len`
# DATA: a glob of token shards. For each model, a step of 16 micro-batches (0.5M tokens at 8 x 4096) on one GPU against 8 on
# each of two; then one micro-batch a step and GPU. Median of steps 2 to STEPS (default 4). Columns: GB that a GPU sent in a
# step, ms in which it waited for the exchange, memory of a GPU, and how many times one GPU's tokens/s.
# MICRO ("16 1"): micro-batches a step in all. ONLY_MANY=1: without the runs on one GPU.
# RANKS, EXTRA, SMALL: another number of ranks, more options, and 1 for a machine without GPUs (the script itself is tried so).
data=$1 program=${2:-./train_gdncu} steps=${STEPS:-4} ranks=${RANKS:-2} work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$(dirname "$0")/watch_run.sh"
run_pid=0  # by watch_run

memory() { if [ -n "$SMALL" ]; then echo 0; else nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | sort -n | tail -1; fi; }

# measure NAME RANKS MODEL BATCH SEQ MICRO-BATCHES: runs until enough steps are logged; leaves NAME.mem
measure() {
  local out=$work/$1 n=$2
  shift 2
  # shellcheck disable=SC2086
  set -- --model "$1" --train "$data" --val '' --batch "$2" --seq-len "$3" --total-batch $(($2 * $3 * $4 * n)) --steps 1000 \
    --eval-every 0 --save-every 1000000 --log-every 1 $EXTRA --out "$out"
  local command=("$program")
  if [ "$n" != 1 ]; then command=(setsid mpirun --allow-run-as-root --oversubscribe --bind-to none -np "$n" "$program"); fi
  watch_run "$out.log" "$out/log.jsonl" "$steps" "${command[@]}" "$@"
  local ended=$?
  memory >"$out.mem"
  if [ $ended != 0 ]; then
    echo "$(basename "$out") ended: $(grep error "$out.log" | head -1 | cut -c1-200)"
    return 1
  fi
  {
    if [ "$n" = 1 ]; then kill -9 "$run_pid"; else pkill -9 -f -- "--out $out\$"; fi
    wait "$run_pid"
  } 2>/dev/null
  return 0
}

row() { # row NAME OF MODEL RANKS BATCH SEQ MICRO-BATCHES
  [ -s "$work/$1/log.jsonl" ] && python3 - "$work" "$@" <<'PY'
import json, sys
work, name, of, model, ranks, batch, seq, micro = sys.argv[1:]
def median(run):
    steps = [d for d in map(json.loads, open(f"{work}/{run}/log.jsonl")) if d["kind"] == "step"][1:]
    steps.sort(key=lambda d: d["ms"])
    return steps[len(steps) // 2]
d = median(name)
times = d["tokens_per_s"] / median(of)["tokens_per_s"] if of != "-" else 1
print(f"{model:18s} {ranks:>4s} {batch:>5s} {seq:>6s} {micro:>5s} {d['ms']:9.1f} {d['tokens_per_s']:10,.0f} "
      f"{d.get('exchange_gb', 0):6.2f} {d.get('exchange_ms', 0):6.1f} {int(open(f'{work}/{name}.mem').read()) / 1024:7.1f} "
      f"{times:6.3f}", flush=True)
PY
}

printf '%-18s %4s %5s %6s %5s %9s %10s %6s %6s %7s %6s\n' model GPUs batch seq micro ms tokens/s GB wait GiB times
n=0
while read -r model batch seq; do
  [ -n "$model" ] || continue
  for micro in ${MICRO:-16 1}; do
    n=$((n + 1))
    each=$((micro > 1 ? micro / ranks : 1))
    if [ -n "${ONLY_MANY:-}" ]; then measure many-$n "$ranks" "$model" "$batch" "$seq" $each && row many-$n - "$model" "$ranks" "$batch" "$seq" $each; continue; fi
    measure one-$n 1 "$model" "$batch" "$seq" $micro && row one-$n - "$model" 1 "$batch" "$seq" $micro
    measure many-$n "$ranks" "$model" "$batch" "$seq" $each && row many-$n one-$n "$model" "$ranks" "$batch" "$seq" $each
  done
done
