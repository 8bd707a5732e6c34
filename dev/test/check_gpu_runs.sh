#!/bin/bash
# check_gpu_runs.sh: whole runs of train_gdncu: does it learn one batch by heart, does the same command give the same bits,
# do the loss curves agree with the CPU program and PyTorch, does a checkpoint move between the CPU program and this one.
# Not part of `make test`: it is for a machine with a GPU.
#   dev/test/check_gpu_runs.sh PROGRAM DATA [WORK]
# PROGRAM: train_gdncu. DATA: one shard of token ids below 32000 (data/prepare.py), 1.7M tokens or more. WORK: a folder
# for the runs (default: a fresh one, removed at the end; given: logs stay, checkpoints do not).
#   PARTS   "overfit bits curves move"     MODEL  gdn-100m     CPU_PROGRAM  for curves and move: as in check_pytorch.sh
#   ARGS    further options for overfit and bits (tests of this script on CPUs); CURVES_ARGS: options of check_pytorch.py
# About 4 minutes on an H200 without move, which is mostly CPU_PROGRAM's time. Lines PASS or FAIL with numbers; the last
# one counts. Exit status 0: all passed, 1: not, 2: wrong arguments.
set -u
cd "$(dirname "$0")/../.." || exit 3
if [ $# -lt 2 ] || [ $# -gt 3 ]; then sed -n '2,/^set/{/^#/p}' "$0" | sed 's/^# \{0,1\}//' && exit 2; fi
program=$1 data=$2 work=${3:-}
parts=${PARTS:-overfit bits curves move} model=${MODEL:-gdn-100m} python=${PYTHON:-python3}
for file in "$program" "$data"; do [ -f "$file" ] || { echo "check_gpu_runs: $file: no such file"; exit 2; }; done
if [ -z "$work" ]; then work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT; fi
mkdir -p "$work" || exit 2
passed=0 failed=0
pass() { passed=$((passed + 1)) && echo "PASS $*"; }
failure() { failed=$((failed + 1)) && echo "FAIL $*"; }

train() { # NAME options...: a run in WORK/NAME; on failure one line and status 1
  name=$1 && shift
  # shellcheck disable=SC2086
  "$program" --model "$model" --val '' --eval-every 0 --save-every 0 --log-every 1000 "$@" ${ARGS:-} --out "$work/$name" \
    >"$work/$name.txt" 2>&1 </dev/null
  code=$?
  [ $code = 0 ] || { failure "$name: exit code $code: $(tail -n 1 "$work/$name.txt" | cut -c1-200)"; return 1; }
}

# One batch of 4 x 1024 tokens, over and over: a model of 100M parameters must know it by heart.
check_overfit() {
  rm -rf "$work/overfit"
  "$python" - "$data" "$work/batch.bin" 4097 <<'PY' || { failure "overfit: no batch could be made of $data"; return; }
import struct, sys
source, target, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with open(source, "rb") as f:
    head = f.read(256)
    if head[:8] != b"GDNSHARD" or struct.unpack("<I", head[24:28])[0] != 2:
        sys.exit(f"{source}: needed a shard of data/prepare.py with ids of 2 bytes")
    tokens = f.read(2 * count)
if len(tokens) != 2 * count:
    sys.exit(f"{source}: needed {count} tokens")
with open(target, "wb") as f:  # llm.c's format
    f.write(struct.pack("<256i", 20240520, 1, count, *[0] * 253) + tokens)
PY
  train overfit --train "$work/batch.bin" --batch 4 --seq-len 1024 --total-batch 4096 --steps 150 --lr 1e-3 --min-lr 1e-3 \
    --warmup 10 --schedule constant || return
  rm -rf "$work/overfit"/step-*
  line=$("$python" - "$work/overfit/log.jsonl" <<'PY'
import json, math, sys
losses = [d["loss"] for d in map(json.loads, open(sys.argv[1])) if d["kind"] == "step"]
losses = [math.inf if x is None else x for x in losses]
below = next((i for i, x in enumerate(losses, 1) if x < 0.05), None)
print(f"overfit: 4 x 1024 tokens, lr 1e-3: loss {losses[0]:.3f} at step 1, {losses[min(49, len(losses) - 1)]:.3f} at 50, "
      f"{losses[min(99, len(losses) - 1)]:.3f} at 100, {losses[-1]:.4f} at {len(losses)}; below 0.05 "
      + (f"from step {below}" if below else "never"))
sys.exit(0 if below and len(losses) == 150 else 1)
PY
  ) && pass "$line" || failure "$line"
}

# The same run again, and once more with the algorithms for matrix products that the first one chose, should they differ.
compare_bits() { # A B: what differs between two runs, nothing if nothing
  "$python" - "$work/$1" "$work/$2" <<'PY'
import glob, json, sys
def read(folder):
    steps = [d for d in map(json.loads, open(folder + "/log.jsonl")) if d["kind"] == "step"]
    found = glob.glob(folder + "/step-*/manifest.json")
    if len(found) != 1 or not steps:
        sys.exit(f"{folder}: {len(steps)} steps, {len(found)} checkpoints")
    files = {f["name"]: f["xxh3"] for f in json.load(open(found[0]))["files"]}
    return [(d["loss"], d["grad_norm"]) for d in steps], files, steps[-1]["loss"]
a, b = map(read, sys.argv[1:])
first = next((i for i, (x, y) in enumerate(zip(a[0], b[0]), 1) if x != y), None)
differ = [n for n in ("model.safetensors", "trainer_state.safetensors") if a[1][n] != b[1][n]]
print(f"{len(a[0])} steps, last loss {a[2]:.9g} and {b[2]:.9g}; weights {a[1]['model.safetensors'][0]} and "
      f"{b[1]['model.safetensors'][0]}", end="")
if first or differ or len(a[0]) != len(b[0]):
    print(f"; losses differ from step {first}, by {abs(a[2] / b[2] - 1):.1e} at the end; files that differ: {' '.join(differ) or 'none'}", end="")
    sys.exit(1)
PY
}
check_bits() {
  rm -rf "$work"/bits-[123]
  options=(--train "$data" --batch 8 --seq-len 2048 --total-batch 16384 --steps 100 --lr 1e-3 --warmup 10)
  train bits-1 "${options[@]}" && train bits-2 "${options[@]}" || return
  line=$(compare_bits bits-1 bits-2) && { pass "bits: two runs: $line"; rm -rf "$work"/bits-?/step-*; return; }
  failure "bits: two runs: $line"
  if cmp -s "$work"/bits-[12]/cublaslt.txt; then
    echo "     both chose the same algorithms for matrix products"
  elif [ -f "$work/bits-1/cublaslt.txt" ]; then
    echo "     they chose other algorithms for $(diff "$work"/bits-[12]/cublaslt.txt | grep -c '^<') of $(grep -c . "$work/bits-1/cublaslt.txt") lines of cublaslt.txt"
    mkdir -p "$work/bits-3" && cp "$work/bits-1/cublaslt.txt" "$work/bits-3/"
    if train bits-3 "${options[@]}"; then
      line=$(compare_bits bits-1 bits-3) && pass "bits: with the first run's cublaslt.txt: $line" || failure "bits: with the first run's cublaslt.txt: $line"
    fi
  fi
  rm -rf "$work"/bits-?/step-*
}

cpu=${CPU_PROGRAM:-build/pytorch_cpu/train_gdn}
if [ -z "${CPU_PROGRAM:-}" ] && [ ! -x "$cpu" ]; then cpu=./train_gdn; fi

check_curves() {
  without=()
  "$python" -c 'import torch' 2>/dev/null || { without=(--no-pytorch) && echo "     without PyTorch, which is not installed"; }
  # shellcheck disable=SC2086
  PYTHON=$python dev/test/check_pytorch.sh "$cpu" "$program" -- --work "$work/curves" "${without[@]}" ${CURVES_ARGS:-} >"$work/curves.txt" 2>&1
  code=$?
  grep -v '^[0-9]* passed' "$work/curves.txt" | sed 's/^/     /'
  rm -rf "$work"/curves/*/step-*
  if [ $code = 0 ]; then pass "curves: $(tail -n 1 "$work/curves.txt")"; else failure "curves: exit code $code: $(tail -n 1 "$work/curves.txt")"; fi
}

# One run on the GPU, on CPUs and on the GPU again, held against the same run on the GPU alone; then evaluation and
# sampling of its last checkpoint by both programs. A small model with a mixer of each kind; this repository's text in bytes.
move_train() { # PROGRAM NAME STEPS: goes on with the run WORK/NAME up to STEPS
  "$1" --model custom --pattern "gdn gdn2 mamba2 swa" --layers 4 --width 128 --ff 256 --heads 1 --head-k 64 --head-v 64 \
    --attn-heads 2 --attn-head-dim 64 --window 64 --mamba-state 64 --mamba-head 64 --vocab 257 --bos 256 --tied off --init fla \
    --train "$work/move-train.bin" --val "$work/move-val.bin" --batch 8 --seq-len 256 --total-batch 2048 --lr 1e-3 --min-lr 1e-3 \
    --schedule constant --warmup 20 --eval-every 0 --save-every 0 --log-every 1000 --keep 0 --resume auto --out "$work/$2" \
    --steps "$3" >>"$work/$2.txt" 2>&1 </dev/null && return
  failure "move: $1, to step $3: exit code $?: $(tail -n 1 "$work/$2.txt" | cut -c1-200)"
  return 1
}
check_move() {
  [ -x "$cpu" ] || { failure "move: no CPU program $cpu"; return; }
  rm -rf "$work"/move* "$work"/stayed* # an earlier call's logs would be gone on with
  "$python" - "$work" <<'PY' || { failure "move: no text"; return; }
import sys
sys.path.insert(0, "dev/test")
from check_pytorch import repository_tokens, write_llmc_shard
tokens = repository_tokens(".")
write_llmc_shard(sys.argv[1] + "/move-train.bin", tokens[:-100000])
write_llmc_shard(sys.argv[1] + "/move-val.bin", tokens[-100000:])
with open(sys.argv[1] + "/move-prompts.txt", "w") as f:  # 16 pieces of 32 bytes
    for i in range(16):
        print(*tokens[-100000 + 6000 * i:][:32], file=f)
PY
  move_train "$program" moved 60 && move_train "$cpu" moved 120 && move_train "$program" moved 180 || return
  move_train "$program" stayed 180 || return
  # the limit that check_pytorch.py has for programs of which one computes in bf16
  line=$("$python" - "$work" <<'PY'
import json, sys
def read(name):
    return [d for d in map(json.loads, open(f"{sys.argv[1]}/{name}/log.jsonl")) if d["kind"] == "step"]
moved, stayed = read("moved"), read("stayed")
same = [d["step"] for d in moved] == [d["step"] for d in stayed] == list(range(1, 181))
same = same and all(a["batch_hash"] == b["batch_hash"] for a, b in zip(moved, stayed))
worst, at = max((abs(a["loss"] / b["loss"] - 1), a["step"]) for a, b in zip(moved, stayed))
print(f"180 steps, on CPUs from 61 to 120: {'the same' if same else 'OTHER'} steps and batches; loss {moved[0]['loss']:.4f} to "
      f"{moved[-1]['loss']:.4f}, from that of the run that stayed {100 * worst:.3f}% at most (step {at}), limit 0.5%")
# below half of the first loss, 2.8 nats: the frequencies of this text's bytes alone give 3.55
sys.exit(not (same and worst <= 0.005 and moved[-1]["loss"] < 0.5 * moved[0]["loss"]))
PY
  ) && pass "move: $line" || failure "move: $line"

  # The same weights on the same rows: in curves the loss of step 1 differs by 0.012% (gdn2 swa), and the trained weights are
  # larger than those: 0.1% of the loss.
  for name in gpu cpu; do
    if [ $name = gpu ]; then which=$program; else which=$cpu; fi
    "$which" eval "$work/moved" --val "$work/move-val.bin" --batch 8 --seq-len 256 --eval-batches 8 >"$work/move-eval-$name.txt" 2>&1 ||
      { failure "move: eval by $which: $(tail -n 1 "$work/move-eval-$name.txt")"; return; }
    while read -r prompt; do
      "$which" sample "$work/moved" --prompt "$prompt" --temperature 0 --num-tokens 32 2>>"$work/moved.txt" ||
        { failure "move: sample by $which: $(tail -n 1 "$work/moved.txt")"; return; }
    done <"$work/move-prompts.txt" >"$work/move-sample-$name.txt"
  done
  line=$("$python" - "$work" <<'PY'
import re, sys
def loss(name):
    return float(re.search(r"^loss ([\d.]+) nats", open(f"{sys.argv[1]}/move-eval-{name}.txt").read(), re.M).group(1))
gpu, cpu = loss("gpu"), loss("cpu")
print(f"eval of the checkpoint of step 180: {gpu:.6f} and on CPUs {cpu:.6f}, {100 * abs(gpu / cpu - 1):.4f}% apart, limit 0.1%")
sys.exit(not abs(gpu / cpu - 1) <= 0.001)
PY
  ) && pass "move: $line" || failure "move: $line"

  # The likeliest token is another one only where the two likeliest are nearer to each other than bf16 rounds the logits;
  # from there on the texts differ. So the first token must agree for all prompts but one, and half of all tokens lie before
  # the first difference of their text.
  line=$("$python" - "$work" <<'PY'
import sys
texts = [[line.split()[32:] for line in open(f"{sys.argv[1]}/move-sample-{name}.txt")] for name in ("gpu", "cpu")]
whole = len(texts[0]) == len(texts[1]) == 16 and all(len(t) == 32 for side in texts for t in side)
equal = [next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), len(x)) for x, y in zip(*texts)]
kinds = len({t for text in texts[1] for t in text})
print(f"greedy samples of 16 prompts, 32 tokens each ({kinds} kinds): the first token agrees in {sum(n > 0 for n in equal)}, needed 15; "
      f"{sum(equal)} tokens before a difference, needed 256; {sum(n == 32 for n in equal)} agree to the end")
sys.exit(not (whole and sum(n > 0 for n in equal) >= 15 and sum(equal) >= 256 and kinds > 4))
PY
  ) && pass "move: $line" || failure "move: $line"
  rm -rf "$work"/moved/step-* "$work"/stayed/step-*
}

for part in $parts; do
  case $part in
  overfit) check_overfit ;;
  bits) check_bits ;;
  curves) check_curves ;;
  move) check_move ;;
  *) failure "no part $part" ;;
  esac
done
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ] && [ "$passed" != 0 ]
