#!/bin/bash
# bench_gpu.sh: training speed of whole models on one GPU: full steps with clipping and AdamW, bf16, nothing recomputed.
#   dev/bench/bench_gpu.sh DATA [PROGRAM] < list      list: lines `model batch seq_len [floor tokens/s]`
# DATA: a glob of token shards. One line a model: median of steps 3 to STEPS (default 8), memory at the end, seconds from
# the command to the first finished step. MFU: (6 x parameters in matrix products + the mixers' own products) x tokens/s
# / 989 TFLOP/s, as train_gdn --help says. The algorithm table of cuBLASLt is kept in CACHE (default: a fresh folder).
data=$1 program=${2:-./train_gdncu} steps=${STEPS:-8} work=$(mktemp -d)
printf '%-18s %5s %6s %9s %10s %6s %8s %9s %9s\n' model batch seq ms tokens/s mfu floor% GiB first_s
while read -r model batch seq floor; do
  [ -n "$model" ] || continue
  begin=$(date +%s.%N)
  # shellcheck disable=SC2086
  "$program" --model "$model" --train "$data" --val '' --batch "$batch" --seq-len "$seq" \
    --total-batch $((batch * seq)) --steps 1000 --eval-every 0 --save-every 1000000 --out "$work/$model-$seq" \
    ${BENCH_ARGS:-} >"$work/log" 2>&1 </dev/null &
  pid=$!
  log=$work/$model-$seq/log.jsonl first= done=0
  while kill -0 $pid 2>/dev/null && [ "$done" -lt "$steps" ]; do
    sleep 0.1
    done=$(cat "$log" 2>/dev/null | grep -c '"kind":"step"')
    if [ -z "$first" ] && [ "$done" -gt 0 ]; then first=$(date +%s.%N); fi
  done
  memory=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -1)
  if ! kill -0 $pid 2>/dev/null; then
    printf '%-18s %5s %6s  ended: %s\n' "$model" "$batch" "$seq" "$(grep error "$work/log" | tail -1 | cut -c1-150)"
    continue
  fi
  kill -9 $pid && wait $pid 2>/dev/null
  python3 - "$log" "$model" "$batch" "$seq" "${floor:-0}" "$memory" "$begin" "${first:-$(date +%s.%N)}" <<'PY'
import json, sys
path, model, batch, seq, floor, memory, begin, first = sys.argv[1:]
steps = [d for d in map(json.loads, open(path)) if d["kind"] == "step"][2:]
steps.sort(key=lambda d: d["ms"])
d = steps[len(steps) // 2]
share = f"{100 * d['tokens_per_s'] / float(floor):.1f}" if float(floor) else "-"
print(f"{model:18s} {batch:>5s} {seq:>6s} {d['ms']:9.1f} {d['tokens_per_s']:10,.0f} {100 * (d['mfu'] or 0):5.1f}% {share:>8s} "
      f"{int(memory) / 1024:9.1f} {float(first) - float(begin):9.1f}", flush=True)
PY
done
rm -rf "$work"
