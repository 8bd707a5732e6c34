#!/bin/bash
# recall_runs.sh: which mixers can recall, at equal size of state: multi-query associative recall (gdn/recall.h, after
# Zoology, arXiv 2312.04927) and a form of it in which most pairs must be forgotten first. A table.
#   dev/bench/recall_runs.sh OUT [PROGRAM]
# OUT: a new folder, or one of an earlier call: what has finished there is not run again, so that several calls make one
# table. PROGRAM: ./train_gdncu. Exit status: 0 all finished, 1 some did not, 2 wrong arguments, 3 something is missing.
#
# Models: two layers of width 128, no MLP, two heads of (64,64): 8,192 numbers of state a layer for every recurrent mixer
# (Mamba2: state 64, two heads of 64). gdn swa has one such layer and a window of 64 tokens.
# Tasks:
#   recall   256 tokens, 64 pairs, then each key once more: 64 answers a row; 256 rows a step
#   stale    384 tokens, 128 pairs that are not asked for, two fillers, 16 of their keys with new values, then these keys
#            once more; 160 rows a step. A state that cannot let go of the 128 is full of them
# 256 keys, 256 values; AdamW, decay 0.1, cosine, 5% warm-up; for each model the best of the learning rates is taken.
#
# From the environment:
#   TASKS      recall stale          MODELS     gdn mamba2 deltanet gdn,swa gdn2 kda
#   LRS        3e-3 1e-3 1e-2        STEPS      3000
#   JOBS       runs at the same time on the one GPU (8): the seconds are then shared
#   LIMIT      seconds for this call (0: none): what would not fit is not started, what is under way is stopped
#   ARGS       further options for every run; PYTHON
set -u
if [ $# -lt 1 ] || [ $# -gt 2 ]; then sed -n '2,24p' "$0" | sed 's/^# \{0,1\}//'; exit 2; fi
out=$1 program=${2:-./train_gdncu}
begin=$SECONDS
tasks=${TASKS:-recall stale} models=${MODELS:-gdn mamba2 deltanet gdn,swa gdn2 kda} lrs=${LRS:-3e-3 1e-3 1e-2}
steps=${STEPS:-3000} jobs=${JOBS:-8} limit=${LIMIT:-0}
say() { echo "recall_runs: $*"; }
command -v "$program" >/dev/null || { say "error: $program: no such program; make train_gdncu" >&2; exit 3; }
mkdir -p "$out" || exit 3

took() { # CODE SECONDS: the longest run that finished; with less time than that left no other is started
  if [ "$1" = 0 ] && [ "$2" -gt "$(cat "$out/longest" 2>/dev/null || echo 20)" ]; then echo "$2" >"$out/longest"; fi
}

left() { # seconds of this call that are left; many without a limit
  if [ "$limit" = 0 ]; then echo 1000000; else echo $((limit - (SECONDS - begin))); fi
}

run() { # TASK MODEL LR: console in OUT/NAME.txt, exit code in OUT/NAME.code
  name=$1-${2//,/-}-$3
  rm -rf "${out:?}/$name" "$out/$name.code"
  stop=$(($(left) - 10))
  [ "$stop" -gt "$(cat "$out/longest" 2>/dev/null || echo 20)" ] || { echo "not started: $(left) s left" >"$out/$name.txt"; return; }
  case $1 in
  recall) task="--train recall --seq-len 256 --recall-pairs 64 --batch 256 --total-batch 65536 --eval-batches 1" ;;
  stale) task="--train recall-stale --seq-len 384 --recall-pairs 16 --recall-stale-pairs 128 --batch 160 --total-batch 61440 --eval-batches 4" ;;
  *) echo "no task $1" >"$out/$name.txt"; echo 2 >"$out/$name.code"; return ;;
  esac
  local start=$SECONDS
  # shellcheck disable=SC2086
  "$program" --model custom --pattern "$2" --width 128 --layers 2 --ff 0 --vocab 513 --bos -1 --tied off --heads 2 \
    --head-k 64 --head-v 64 --attn-heads 2 --attn-head-dim 64 --window 64 --mamba-state 64 --mamba-head 64 \
    --mamba-expand 1 --recall-keys 256 --recall-values 256 $task --steps "$steps" --lr "$3" \
    --warmup $((steps / 20)) --weight-decay 0.1 --schedule cosine --eval-every 0 --save-every 0 \
    --log-every 500 --threads 1 --stop-after "${stop}s" ${ARGS:-} --out "$out/$name" >"$out/$name.txt" 2>&1 </dev/null
  code=$?
  echo $code >"$out/$name.code"
  took $code $((SECONDS - start))
  rm -rf "$out/$name"/step-*
  [ $code = 0 ] || say "$name: exit code $code: $(tail -n 1 "$out/$name.txt" | cut -c1-200)"
}

for task in $tasks; do # the first learning rate of all models, then the next: a call that ends early has something of each
  for lr in $lrs; do
    for model in $models; do
      name=$task-${model//,/-}-$lr
      if [ "$(cat "$out/$name.code" 2>/dev/null)" = 0 ]; then continue; fi
      while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
      run "$task" "$model" "$lr" &
    done
  done
done
wait

python=${PYTHON:-python3}
"$python" - "$out" "$steps" "$tasks" "$models" "$lrs" <<'PY' | tee "$out/table.txt"
import json, math, os, re, sys
out, steps = sys.argv[1], int(sys.argv[2])
tasks, models, lrs = (a.split() for a in sys.argv[3:])
STATE = {"swa": 64 * 2 * 128}  # keys and values of the window
bad = 0
print(f"{steps} steps, learning rates {' '.join(lrs)}; state: numbers a layer, short convolutions not counted; learned: the "
      "step from which the mean loss of 20 steps is below half of that of guessing")
print(f"{'task':7s} {'model':9s} {'state':>12s} {'accuracy':>8s} {'at lr':>6s} {'learned':>8s} {'seconds':>8s}  accuracy at each lr")
for task in tasks:
    for model in models:
        found, cells = [], []
        for lr in lrs:
            name = f"{task}-{model.replace(',', '-')}-{lr}"
            def text(suffix):
                try:
                    with open(os.path.join(out, name + suffix), encoding="utf-8", errors="replace") as f:
                        return f.read()
                except OSError:
                    return ""
            console, code = text(".txt"), text(".code").strip()
            losses = [d["loss"] for d in map(json.loads, text("/log.jsonl").split("\n")[:-1]) if d["kind"] == "step"]
            m = re.search(r"^RECALL .* pct=([0-9.]+) .* steps=(\d+) seconds=([0-9.]+)", console, re.M)
            if code != "0" or not m or int(m.group(2)) != steps or len(losses) != steps:
                bad = 1
                cells.append(f"{lr}: none, exit code {code or 'none'}, {len(losses)} steps")
                continue
            learned = next((i for i in range(20, steps + 1) if None not in losses[i - 20 : i]
                            and sum(losses[i - 20 : i]) / 20 < math.log(256) / 2), None)
            found.append((float(m.group(1)), lr, learned, float(m.group(3))))
            cells.append(f"{lr}: {m.group(1)}%")
        state = " + ".join(str(STATE.get(x, 8192)) for x in model.split(","))
        if found:
            best = max(found, key=lambda f: f[0])
            print(f"{task:7s} {model:9s} {state:>12s} {best[0]:7.1f}% {best[1]:>6s} {best[2] or '-':>8} {best[3]:8.1f}  {', '.join(cells)}")
        else:
            print(f"{task:7s} {model:9s} {state:>12s} {'-':>8s} {'-':>6s} {'-':>8s} {'-':>8s}  {', '.join(cells)}")
sys.exit(bad)
PY
status=${PIPESTATUS[0]}
say "$((SECONDS - begin)) s in all, $jobs runs at a time, exit status $status"
exit "$status"
