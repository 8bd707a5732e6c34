#!/bin/bash
# bench_gpu.sh: training speed of whole models on one GPU: full steps with clipping and AdamW, bf16, nothing recomputed.
#   dev/bench/bench_gpu.sh DATA [PROGRAM] < list      list: lines `model batch seq_len [floor tokens/s]`, # begins a comment
# DATA: a glob of token shards. One line a model: median of steps 3 to STEPS (default 8), memory at the end, seconds from
# the command to the first finished step, and the same of a second start. MFU: (6 x parameters in matrix products + the
# mixers' own products) x tokens/s / 989 TFLOP/s, as train_gdn --help says. A model's first start finds no choice of
# cuBLASLt's algorithms (the user's cache is a fresh folder) and measures them; its second one, in another run's folder,
# finds those. BENCH_ARGS: more options. SMALL=1: for a machine without GPUs (the script itself is tried so).
data=$1 program=${2:-./train_gdncu} steps=${STEPS:-8} work=$(mktemp -d)  # an absolute path, as XDG_CACHE_HOME must be
trap 'rm -rf "$work"' EXIT
. "$(dirname "$0")/watch_run.sh"
run_pid=0 run_first=0  # by watch_run
memory() { if [ -n "${SMALL:-}" ]; then echo 0; else nvidia-smi -i "${CUDA_VISIBLE_DEVICES:-0}" --query-gpu=memory.used --format=csv,noheader,nounits | head -1; fi; }

run() { # NAME STEPS: as far as so many steps, then killed; leaves NAME/log.jsonl and $first, $used; status 1: it ended before
  # shellcheck disable=SC2086
  watch_run "$work/$1.txt" "$work/$1/log.jsonl" "$2" env XDG_CACHE_HOME="$work/$n-cache" "$program" --model "$model" \
    --train "$data" --val '' --batch "$batch" --seq-len "$seq" --total-batch $((batch * seq)) --steps 1000 --eval-every 0 --save-every 1000000 \
    --out "$work/$1" ${BENCH_ARGS:-}
  local ended=$?
  first=$run_first used=$(memory)
  if [ $ended = 0 ]; then kill -9 "$run_pid"; wait "$run_pid" 2>/dev/null; return 0; fi
  printf '%-18s %5s %6s  ended: %s\n' "$model" "$batch" "$seq" "$(grep error "$work/$1.txt" | tail -1 | cut -c1-150)"
  return 1
}

printf '%-18s %5s %6s %9s %10s %6s %8s %9s %9s %9s\n' model batch seq ms tokens/s mfu floor% GiB first_s warm_s
n=0
while read -r model batch seq floor _; do
  case $model in '' | \#*) continue ;; esac
  n=$((n + 1))
  mkdir "$work/$n-cache"
  run $n-cold "$steps" || continue
  cold=$first peak=$used
  run $n-warm 1 || continue
  python3 - "$work/$n-cold/log.jsonl" "$model" "$batch" "$seq" "${floor:-0}" "$peak" "$cold" "$first" <<'PY'
import json, sys
path, model, batch, seq, floor, memory, cold, warm = sys.argv[1:]
steps = [d for d in map(json.loads, open(path)) if d["kind"] == "step"][2:]
steps.sort(key=lambda d: d["ms"])
d = steps[len(steps) // 2]
share = f"{100 * d['tokens_per_s'] / float(floor):.1f}" if float(floor) else "-"
print(f"{model:18s} {batch:>5s} {seq:>6s} {d['ms']:9.1f} {d['tokens_per_s']:10,.0f} {100 * (d['mfu'] or 0):5.1f}% {share:>8s} "
      f"{int(memory) / 1024:9.1f} {float(cold):9.1f} {float(warm):9.1f}", flush=True)
PY
  rm -rf "$work/$n"-*
done
