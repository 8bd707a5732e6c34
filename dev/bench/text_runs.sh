#!/bin/bash
# text_runs.sh: the models of one size side by side on real text: same data, same order, same settings; a table, one
# picture of all validation curves, a sample.
#   dev/bench/text_runs.sh DATA OUT [PROGRAM]
# DATA: a folder with NAME_train_*.bin and NAME_val_*.bin of one name, or 'TRAIN_GLOB VAL_GLOB'. OUT: a new folder, or one
# of an earlier call: models that have finished there are not trained again, so that several calls make one table.
# PROGRAM: ./train_gdncu. Exit status: 0 all finished, 1 some did not, 2 wrong arguments, 3 something is missing.
#
# From the environment:
#   MODELS     which presets (default: the seven of the -100m set)
#   EPOCHS     passes over the training data (4); STEPS=N instead: so many steps
#   BATCH SEQ_LEN TOTAL_BATCH LR MIN_LR WARMUP      the same for all models; defaults below
#   TOKENIZER  of the shards: bits a byte, and a text sample of the first model; PROMPT
#   JOBS       models that train at the same time on the one GPU (1); with more the speeds are marked as shared
#   LIMIT      seconds for this call (0: none): models that would not fit any more are not started, one that is under way
#              is stopped; the table shows what there is
#   KEEP       1: the checkpoints stay
#   ARGS       further options for every run; PYTHON: one with matplotlib for the picture (.venv/bin/python or python3)
#
# Why these settings: a run is short (47M tokens over 102M parameters), so that many small steps do better than few large
# ones: 32,768 tokens a step are 1,422 steps; rows of 4,096 tokens as in the papers, twice the window of 2,048; the rate
# that small models take at such a batch (1e-3, 100 steps of warm-up, cosine down to 3% of it), AdamW (0.9, 0.95), decay 0.1,
# clipping at 1, as in the papers. No rate is tuned for one model alone.
set -u
here=$(cd "$(dirname "$0")/../.." && pwd)
if [ $# -lt 2 ] || [ $# -gt 3 ]; then sed -n '2,21p' "$0" | sed 's/^# \{0,1\}//'; exit 2; fi
data=$1 out=$2 program=${3:-./train_gdncu}
begin=$SECONDS
models=${MODELS:-gdn-100m h1-100m h2-100m mamba2-100m transformer-100m gdn2-100m kda-100m}
epochs=${EPOCHS:-4} batch=${BATCH:-8} seq=${SEQ_LEN:-4096} jobs=${JOBS:-1} limit=${LIMIT:-0}
total=${TOTAL_BATCH:-32768} lr=${LR:-1e-3} min_lr=${MIN_LR:-3e-5} warmup=${WARMUP:-100}
tokenizer=${TOKENIZER:-} prompt=${PROMPT:-The cell membrane is}
python=${PYTHON:-$here/.venv/bin/python}
[ -x "$python" ] || python=python3
say() { echo "text_runs: $*"; }
die() { code=$1; shift; say "error: $*" >&2; exit "$code"; }
command -v "$program" >/dev/null || die 3 "$program: no such program; make train_gdncu"
case $data in
*' '*) train=${data% *} val=${data##* } ;;
*) train="$data/*_train_*.bin" val="$data/*_val_*.bin" ;;
esac
mkdir -p "$out" || exit 3

# steps of the run: from the number of tokens in the shards' headers
steps=$("$python" - "$train" "$val" "$total" "$seq" "$epochs" "${STEPS:-0}" <<'PY'
import glob, struct, sys
train, val, total, seq, epochs, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6])
counts = []
for pattern in (train, val):
    count, files = 0, sorted(glob.glob(pattern))
    for path in files:
        with open(path, "rb") as f:
            head = f.read(24)
        if head[:8] != b"GDNSHARD":
            sys.exit(f"{path}: not a shard of data/prepare.py")
        count += struct.unpack("<Q", head[16:24])[0]
    if not files:
        sys.exit(f"{pattern}: no such files")
    counts.append(count)
rows = total // seq
if rows < 1 or total % seq:
    sys.exit(f"TOTAL_BATCH {total}: needed a multiple of SEQ_LEN {seq}")
print(steps or max(1, int(epochs * ((counts[0] - 1) // seq)) // rows))
print(f"text_runs: {counts[0]:,} tokens for training, {counts[1]:,} for validation", file=sys.stderr)
PY
) || die 4 "the data cannot be used: $data"
every=$(((steps + 9) / 10))
say "$steps steps of $total tokens, rows of $seq; lr $lr to $min_lr, warm-up $warmup; validation every $every steps"

took() { # CODE SECONDS: the longest run that finished; with less time than that left no other is started
  if [ "$1" = 0 ] && [ "$2" -gt "$(cat "$out/longest" 2>/dev/null || echo 20)" ]; then echo "$2" >"$out/longest"; fi
}

left() { # seconds of this call that are left; many without a limit
  if [ "$limit" = 0 ]; then echo 1000000; else echo $((limit - (SECONDS - begin))); fi
}

run_model() { # one model: its log in OUT/MODEL, its console in OUT/MODEL.txt, its exit code in OUT/MODEL.code
  model=$1
  rm -rf "${out:?}/$model" "$out/$model.code"
  stop=$(($(left) - 15))
  [ "$stop" -gt "$(cat "$out/longest" 2>/dev/null || echo 20)" ] || { echo "not started: $(left) s left" >"$out/$model.txt"; return; }
  echo "$jobs" >"$out/$model.jobs"
  local start=$SECONDS
  # shellcheck disable=SC2086
  "$program" --model "$model" --train "$train" --val "$val" ${tokenizer:+--tokenizer "$tokenizer"} --batch "$batch" \
    --seq-len "$seq" --total-batch "$total" --steps "$steps" --lr "$lr" --min-lr "$min_lr" --warmup "$warmup" \
    --eval-every "$every" --eval-batches 0 --save-every 0 --log-every "$every" --stop-after "${stop}s" ${ARGS:-} \
    --out "$out/$model" >"$out/$model.txt" 2>&1 </dev/null
  code=$?
  echo $code >"$out/$model.code"
  took $code $((SECONDS - start))
  say "$model: exit code $code, $((SECONDS - start)) s$([ $code = 0 ] || grep -h 'error:' "$out/$model.txt" | tail -n 1 | sed 's/^/: /' | cut -c1-200)"
  if [ "$model" = "$first" ] && [ "$code" = 0 ]; then sample "$model"; fi
  [ -n "${KEEP:-}" ] || rm -rf "$out/$model"/step-* # a gigabyte each
}

sample() { # one model's text into OUT/sample.txt
  if [ -z "$tokenizer" ]; then say "$1: no TOKENIZER, no sample" && return; fi
  timeout "$(left)" "$program" sample "$out/$1" --tokenizer "$tokenizer" --prompt "$prompt" --num-tokens 100 \
    --temperature 0.7 >"$out/sample.txt" 2>&1 </dev/null
  say "sample of $1, exit code $?:"
  tail -n 6 "$out/sample.txt"
}

first=${models%% *}
for model in $models; do
  if [ "$(cat "$out/$model.code" 2>/dev/null)" = 0 ]; then say "$model: finished earlier"; continue; fi
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
  run_model "$model" &
done
wait

# shellcheck disable=SC2086
"$python" - "$out" "$steps" $models <<'PY' | tee "$out/table.txt"
import json, math, os, re, sys
out, steps, models = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
def text(name):
    try:
        with open(os.path.join(out, name), encoding="utf-8", errors="replace") as f:
            return f.read()
    except OSError:
        return ""
print(f"{'model':17s} {'parameters':>12s} {'val loss':>9s} {'perplexity':>10s} {'tokens/s':>9s} {'5% .. 95%':>17s} {'seconds':>8s} {'GiB':>6s}")
bad = 0
for model in models:
    console, code = text(model + ".txt"), text(model + ".code").strip()
    lines = [json.loads(l) for l in text(f"{model}/log.jsonl").split("\n")[:-1]]
    done = [d for d in lines if d["kind"] == "step"]
    evals = [d for d in lines if d["kind"] == "eval"]
    finished = code == "0" and len(done) == steps and evals and evals[-1]["step"] == steps
    if not done or not evals:
        print(f"{model:17s} no validation yet, {len(done)} steps, exit code {code or 'none'}: {(console.strip().split(chr(10))[-1:] or [''])[0][:90]}")
        bad = 1
        continue
    speeds = sorted(d["tokens_per_s"] for d in done[max(2, len(done) // 20):]) or [math.nan]
    at = lambda q: speeds[min(len(speeds) - 1, int(q * len(speeds)))]
    found = re.search(r"engine \S+, ([0-9.]+) MiB \| .* ([0-9,]+) parameters", console)
    seconds = sum(d["ms"] for d in done + evals) / 1e3
    shared = text(model + ".jobs").strip() not in ("", "1")
    print(f"{model:17s} {found.group(2) if found else '?':>12s} {evals[-1]['loss']:9.4f} {evals[-1]['perplexity']:10.2f} {at(.5):9,.0f}"
          f"{'*' if shared else ' '}{at(.05):8,.0f} .. {at(.95):7,.0f} {seconds:8.1f} {float(found.group(1)) / 1024 if found else math.nan:6.1f}"
          + ("" if finished else f"  UNFINISHED: step {done[-1]['step']} of {steps}, loss of step {evals[-1]['step']}, exit code {code}")
          + (f"  {sum(d['skipped'] for d in done)} skipped" if any(d["skipped"] for d in done) else ""))
    bad |= not finished
if any(text(m + ".jobs").strip() not in ("", "1") for m in models):
    print("* shared the GPU with other runs")
print("validation: the whole set; seconds: training steps and validations; GiB: what the engine allocates")
sys.exit(bad)
PY
status=${PIPESTATUS[0]}

logs=
for model in $models; do
  if grep -q '"kind":"eval"' "$out/$model/log.jsonl" 2>/dev/null; then logs="$logs $out/$model"; fi
done
if [ -n "$logs" ]; then
  # shellcheck disable=SC2086
  "$python" "$here/scripts/plot.py" $logs --out "$out/validation.png" --validation &&
    "$python" "$here/scripts/plot.py" $logs --out "$out/runs.png" || status=1
fi
say "$((SECONDS - begin)) s in all, exit status $status"
exit "$status"
