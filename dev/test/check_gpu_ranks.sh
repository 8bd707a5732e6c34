#!/bin/bash
# check_gpu_ranks.sh: several GPUs do the arithmetic of one. Not part of `make test`: needs a machine with two GPUs, MPI,
# NCCL and token shards.   dev/test/check_gpu_ranks.sh DATA [PROGRAM]
# DATA: a glob of token shards. MODEL, SEQ, EXTRA (more options) and NO_GPU=1 are for trying the script on a machine without GPUs.
data=$1 program=${2:-./train_gdncu} model=${MODEL:-gdn-100m} seq=${SEQ:-1024} work=$(mktemp -d) failed=0
trap 'rm -rf "$work"' EXIT
mpi() { local n=$1; shift; mpirun --allow-run-as-root --oversubscribe --bind-to none -np "$n" "$program" "$@"; }
args() { echo "--model $model --train $data --val= --seq-len $seq --batch 4 --total-batch $((16 * seq)) --steps $1 --eval-every 0 --save-every ${2:-1000000} --log-every 1 --warmup 40 --init fla $EXTRA --out $work/$3"; }
check() { # check NAME CONDITION-RESULT DETAIL
  if [ "$2" = 0 ]; then echo "PASS $1: $3"; else echo "FAIL $1: $3"; failed=$((failed + 1)); fi
}
log() { python3 - "$@" <<'PY'
import json, sys
def steps(path): return {d["step"]: d for d in map(json.loads, open(path + "/log.jsonl")) if d["kind"] == "step"}
what, a, b = sys.argv[1], steps(sys.argv[2]), steps(sys.argv[3])
common = sorted(set(a) & set(b))
if what == "near":
    worst = max(abs(a[s]["loss"] - b[s]["loss"]) / abs(a[s]["loss"]) for s in common)
    some = " ".join(f"{s}:{abs(a[s]['loss'] - b[s]['loss']) / abs(a[s]['loss']):.0e}" for s in common if s in (1, 2, 5, 10, 20, 30, 40, 50))
    print(f"{len(common)} steps, largest relative difference of the loss {worst:.1e}, needed 5e-4 (step:difference {some}); "
          f"last loss {a[common[-1]]['loss']:.4f}")
    sys.exit(not (worst < 5e-4 and len(common) >= 50))
if what == "bits":
    same = all(a[s]["loss"] == b[s]["loss"] and a[s]["grad_norm"] == b[s]["grad_norm"] for s in common)
    print(f"losses and norms of {len(common)} steps {'equal' if same else 'differ'}")
    sys.exit(not (same and len(common) >= 50))
if what == "samples":
    same = all(a[s]["batch_hash"] == b[s]["batch_hash"] for s in common)
    print(f"batches of {len(common)} steps {'equal' if same else 'differ'}, up to step {common[-1]}")
    sys.exit(not (same and len(common) >= 50))
PY
}
weights() { find "$work/$1" -name '*.safetensors' 2>/dev/null | sort | xargs -r cat | sha256sum | cut -c1-16; }

# shellcheck disable=SC2046
{
  "$program" $(args 50 1000000 one) >"$work/one.log" 2>&1 || tail -2 "$work/one.log"
  mpi 2 $(args 50 30 two) >"$work/two.log" 2>&1 || tail -2 "$work/two.log"
  mpi 2 $(args 50 30 again) >"$work/again.log" 2>&1 || tail -2 "$work/again.log"
  text=$(log near "$work/one" "$work/two"); check "one GPU and two" $? "$text"
  text=$(log bits "$work/two" "$work/again"); check "two GPUs, twice" $? "$text"
  a=$(weights two) b=$(weights again); [ -d "$work/two" ] && [ "$a" = "$b" ]; check "two GPUs, twice" $? "checkpoints $a $b"
  # from two GPUs to one: the checkpoint of step 30 goes on alone
  mkdir "$work/moved" && cp -r "$work"/two/step-*30 "$work/moved/" && grep '"step":\([0-9]\|[12][0-9]\|30\),' "$work/two/log.jsonl" >"$work/moved/log.jsonl"
  "$program" $(args 50 1000000 moved) --resume >"$work/moved.log" 2>&1 || tail -2 "$work/moved.log"
  text=$(log samples "$work/two" "$work/moved"); check "two GPUs, then one" $? "$text"
  text=$(log near "$work/two" "$work/moved"); check "two GPUs, then one" $? "$text"
  if [ -z "$NO_GPU" ]; then
    n=$(($(nvidia-smi -L | wc -l) + 1))
    text=$(mpi $n --model "$model" --train "$data" --val= --seq-len 64 --batch 1 --total-batch $((64 * n)) --steps 1 --out "$work/more" 2>&1 | grep error: | head -1); code=${PIPESTATUS[0]}
    case $text in *"$n ranks on this machine, $((n - 1)) GPUs"*) code=0 ;; *) code=1 ;; esac
    check "more ranks than GPUs" $code "$text"
  fi
  # a rank that dies takes the job with it, soon; the last checkpoint is whole
  mpi 2 $(args 1000000 20 killed) >"$work/killed.log" 2>&1 &
  pid=$!
  for _ in $(seq 300); do ls "$work"/killed/step-*20 >/dev/null 2>&1 && break; sleep 0.2; done
  rank=$(pgrep -f -- "--out $work/killed" | while read -r p; do [ "$(tr '\0' '\n' <"/proc/$p/environ" 2>/dev/null | grep -c '^OMPI_COMM_WORLD_RANK=1$')" = 1 ] && echo "$p"; done | head -1)
  begin=$(date +%s%N)
  [ -n "$rank" ] && kill -9 "$rank"
  wait $pid
  code=$? ms=$((($(date +%s%N) - begin) / 1000000))
  [ -n "$rank" ] && [ $code != 0 ] && [ $ms -lt 10000 ]; check "rank 1 killed" $? "the job ended after $ms ms with exit code $code"
  text=$("$program" inspect "$work/killed" 2>&1); check "rank 1 killed" $? "$(echo "$text" | grep step- | tail -1 | cut -c1-120)"
}
echo "$failed failed"
exit $((failed > 0))
