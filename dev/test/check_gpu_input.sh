#!/bin/bash
# check_gpu_input.sh: machines that train_gdncu cannot use, or not now: each must end in one line and exit code 3 or 6, soon,
# and leave nothing on the GPU. For a machine with a GPU and PyTorch; what needs them is skipped elsewhere.
# (Old drivers and old cards, which nobody can make, are tested without any: dev/test/test_machine.c.)
#   dev/test/check_gpu_input.sh PROGRAM [OTHER_BUILD]
# OTHER_BUILD: a train_gdncu for another kind of card (make train_gdncu GPU_ARCH=80 on a Hopper), which must say so.
# About a minute on an H200. Ends with `N passed, N failed, N skipped`; exit status 0 when nothing failed.
set -u
if [ $# -lt 1 ] || [ $# -gt 2 ] || [ ! -x "$1" ]; then sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//' && exit 2; fi
program=$(realpath "$1") other=${2:+$(realpath "$2")} python=${PYTHON:-python3}
work=$(mktemp -d) && cd "$work" || exit 3
holder=
finish() {
  if [ -n "$holder" ]; then kill "$holder" 2>/dev/null; fi
  rm -rf "$work"
}
trap finish EXIT
passed=0 failed=0 skipped=0
pass() { passed=$((passed + 1)) && echo "PASS $*"; }
failure() { failed=$((failed + 1)) && echo "FAIL $*"; }
skip() { skipped=$((skipped + 1)) && echo "SKIPPED: $*"; }

tiny="--model tiny-gdn --head-k 64 --head-v 64 --steps 2 --warmup 0 --eval-every 0 --eval-batches 1"
tiny_h1="--model tiny-h1 --head-k 64 --head-v 64 --attn-head-dim 64 --steps 2 --warmup 0 --eval-every 0 --eval-batches 1"
big="--model gdn-1.3b --train recall --steps 2 --warmup 0 --total-batch 131072"

# NAME CODE 'word|word' command...: that exit code within a minute, one line on stderr, with all the words
refuse() {
  local name=$1 code=$2 words=$3 got lines word
  shift 3
  rm -rf out
  timeout 60 "$@" --out out >stdout.txt 2>stderr.txt </dev/null
  got=$?
  lines=$(grep -c . stderr.txt)
  if [ "$got" != "$code" ]; then failure "$name: exit code $got, needed $code: $(head -c 300 stderr.txt)"; return; fi
  if [ "$lines" != 1 ] || ! grep -q '^train_gdncu: error: ' stderr.txt; then
    failure "$name: $lines lines on stderr, needed one that begins with train_gdncu: error: $(head -c 300 stderr.txt)"
    return
  fi
  while IFS= read -r word; do
    if ! grep -qE -- "$word" stderr.txt; then failure "$name: no '$word' in: $(cat stderr.txt)" && return; fi
  done <<<"${words//|/$'\n'}"
  pass "$name: exit $got: $(sed 's/^train_gdncu: error: //' stderr.txt)"
}
accept() { # NAME command...: exit code 0
  local name=$1
  shift
  rm -rf out
  timeout 120 "$@" --out out >stdout.txt 2>stderr.txt </dev/null
  code=$?
  if [ $code = 0 ]; then pass "$name: exit 0"; else failure "$name: exit code $code: $(head -c 300 stderr.txt)"; fi
}
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1; }

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ "$gpus" = 0 ]; then echo "no GPU here"; fi
why="CUDA_VISIBLE_DEVICES|unset it"
if [ "$gpus" = 0 ]; then why="no NVIDIA"; fi

# no GPU to be seen
for value in 99 '' garbage -1; do
  # shellcheck disable=SC2086
  refuse "CUDA_VISIBLE_DEVICES='$value'" 3 "$why" env "CUDA_VISIBLE_DEVICES=$value" "$program" $tiny
done
# shellcheck disable=SC2086
refuse "CUDA_VISIBLE_DEVICES='', attention" 3 "$why" env CUDA_VISIBLE_DEVICES= "$program" $tiny_h1
# shellcheck disable=SC2086
accept "a forecast needs no GPU" env CUDA_VISIBLE_DEVICES= "$program" $tiny_h1 --dry-run

if [ "$gpus" = 0 ]; then
  skip "no GPU: its number, its memory, a build for another one"
else
  # a number too high
  number=$((gpus + 6))
  # shellcheck disable=SC2086
  refuse "--device $number of $gpus" 3 "GPU $number|found $gpus|--device" "$program" $tiny --device $number
  # shellcheck disable=SC2086
  refuse "--device $number of $gpus, attention" 3 "GPU $number|found $gpus|--device" "$program" $tiny_h1 --device $number

  # a build for another card
  if [ -n "$other" ]; then
    # shellcheck disable=SC2086
    refuse "a build for another card" 3 "no code for GPU 0|GPU_ARCH=" "$other" $tiny
  else
    skip "no OTHER_BUILD: a program without code for this GPU"
  fi

  # more than there is
  before=$(used)
  # shellcheck disable=SC2086
  refuse "a batch that does not fit" 6 "[0-9.]+ [GM]iB|free|--batch" "$program" $big --seq-len 4096 --batch 256 --total-batch 1048576

  # another process holds the memory: all but 4 GiB, in which not even the weights fit; then all but 40 GiB
  hold() { # GiB that stay free
    rm -f holder.txt
    "$python" - "$1" <<'PY' >holder.txt 2>holder.err &
import sys, time, torch
keep = float(sys.argv[1]) * 2**30
free = torch.cuda.mem_get_info()[0]
held = []
while free - keep > 2**28:  # pieces, so that no single one is too large
    held.append(torch.empty(int(min(free - keep, 2**33)), dtype=torch.uint8, device="cuda"))
    free = torch.cuda.mem_get_info()[0]
print(f"{free / 2**30:.1f}", flush=True)
time.sleep(300)
PY
    holder=$!
    for _ in $(seq 300); do
      if [ -s holder.txt ]; then return 0; fi
      kill -0 $holder 2>/dev/null || return 1
      sleep 0.2
    done
    return 1
  }
  release() { kill $holder 2>/dev/null && wait $holder 2>/dev/null; holder=; }
  if ! "$python" -c 'import torch' 2>/dev/null; then
    skip "no PyTorch: memory that another process holds"
  else
    if hold 4; then
      # shellcheck disable=SC2086
      refuse "another process left $(cat holder.txt) GiB" 6 "[0-9.]+ [GM]iB|free|--batch" "$program" $big --seq-len 1024 --batch 1
    else
      failure "the process that was to hold memory ended: $(tail -n 1 holder.err)"
    fi
    release
    if hold 40; then
      # shellcheck disable=SC2086
      refuse "another process left $(cat holder.txt) GiB" 6 "activations of 32 x 4096 tokens|free|--batch" "$program" $big --seq-len 4096 --batch 32
      # shellcheck disable=SC2086
      accept "a small model beside it" "$program" $tiny
    else
      failure "the process that was to hold memory ended: $(tail -n 1 holder.err)"
    fi
    release
  fi
  sleep 2
  after=$(used)
  if [ "$after" -le $((before + 64)) ]; then pass "the GPU's memory is given back: $before MiB in use before, $after after"; else
    failure "$before MiB of the GPU's memory in use before, $after after"; fi
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" != 0 ]
