#!/bin/bash
# gpu_check.sh: what must be seen on a GPU, in parts of under 8 minutes that can be run one by one; `make gpu-check` builds
# the programs and runs all parts.
#   dev/gpu_check.sh PART...     right     the CUDA engine against the CPU reference: every activation and gradient
#                                lab       each kernel against loops in double, odd sizes, poisoned buffers
#                                sanitize  compute-sanitizer: memcheck, racecheck, initcheck on the labs, memcheck on the engine
#                                bench     each kernel's time beside its floor
#                                models    whole training steps: tokens/s, MFU, memory (DATA: a glob of token shards)
#                                input     a machine that cannot be used: one line, exit code 3 or 6
#                                report    dev/gpu_report.md from what the parts have left in $PARTS
#   dev/gpu_check.sh hash        the hash of the CUDA sources, comments and white space left out
#   dev/gpu_check.sh verdict     0 when right, lab and sanitize in dev/gpu_report.md are of these sources and clean, else 1;
#                                names the sections that are of others
# PROGRAMS: folder of train_gdncu, test_gdncu and the labs (default: where make puts them). PARTS: folder of the parts'
# results (default build/gpu_check).
set -u
cd "$(dirname "$0")/.." || exit 1
labs="rmsnorm swiglu gated_rmsnorm short_conv classifier embedding adamw matmul delta_rule sliding_attention"
parts=${PARTS:-build/gpu_check} report=dev/gpu_report.md

program() { # program NAME: its path
  if [ -n "${PROGRAMS:-}" ]; then echo "$PROGRAMS/$1"; else case $1 in *_gdncu) echo "./$1" ;; *) echo "build/lab/$1" ;; esac; fi
}
source_hash() {
  python3 - train_gdn.cu gdn/cuda/* <<'PY'
import hashlib, re, sys
text = ""
for path in sorted(sys.argv[1:]):  # a shell's order depends on its locale
    code = open(path, encoding="utf-8").read()
    # a string or character as it is, a comment as nothing
    code = re.sub(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|//[^\n]*|/\*.*?\*/', lambda m: m.group(1) or "", code, flags=re.S)
    text += path + "\n" + "".join(code.split())
print(hashlib.sha256(text.encode()).hexdigest()[:16])
PY
}
counted() { grep -E '^[0-9]+ passed, [0-9]+ failed' "$1" | tail -1; }
say() { tee -a "$out"; }
failed=0

# the largest error, as a part of its limit, of all shapes of each case, and its tensor
worst_of_cases() {
  sed -n 's/^cuda \(.*[^ ]\) *B=\([0-9]*\) T=\([0-9]*\) *worst error \/ limit \([0-9.]*\) (\(.*\))$/\1|\4|\2 x \3|\5/p' "$1" |
    awk -F'|' '{ n[$1]++; if ($2 + 0 >= most[$1] + 0) { most[$1] = $2; at[$1] = $3; of[$1] = $4 } }
      END { for (c in n) printf "%-34s %3d shapes  error / limit %.2f at %-9s %s\n", c, n[c], most[c], at[c], of[c] }' | LC_ALL=C sort
}
part_right() {
  timeout 450 "$(program test_gdncu)" >"$parts/right.log" 2>&1 || failed=1
  grep FAILED "$parts/right.log" | head -5
  {
    counted "$parts/right.log"
    worst_of_cases "$parts/right.log"
    echo "the same by tensor, layers taken together, over all cases"
    sed -n 's/^cuda tensor //p' "$parts/right.log"
  } | say
}
part_lab() {
  for lab in $labs; do
    timeout 100 "$(program "$lab")" check >"$parts/lab-$lab.log" 2>&1 || failed=1
    grep FAILED "$parts/lab-$lab.log" | head -3
    printf '%-18s %s\n' "$lab" "$(counted "$parts/lab-$lab.log")" | say
  done
}
sanitize_one() { # sanitize_one LAB TOOL: one line; status 1 with findings
  # barriers of a part of a block, and those of hardware copies, are not known to racecheck: built without them for it
  local name=$1 tool=$2 mode=$3 log result code
  log=$parts/sanitize-$1-${3//[^a-z0-9]/_}-$2.log
  if [ "$tool" = racecheck ] && [ -x "$(program "$1-racecheck")" ]; then name=$1-racecheck; fi
  set -- "$mode"
  if [ "$name" = test_gdncu ]; then set -- --only "$mode"; fi
  timeout "${SANITIZE_LIMIT:-240}" compute-sanitizer --tool "$tool" "$(program "$name")" "$@" >"$log" 2>&1
  code=$?
  result=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1 | sed 's/=* *//')
  if [ "$code" = 124 ]; then
    result="stopped after ${SANITIZE_LIMIT:-240} s, $(grep -cE '^=+ +(Invalid|Error:|Uninit|Warning:|Race)' "$log") findings until then"
  elif [ "$code" != 0 ] || [ -z "$result" ]; then
    result="exit code $code: ${result:-$(tail -1 "$log" | cut -c1-80)}"
  fi
  printf '%-18s %-8s %-9s %s\n' "${name%-racecheck}" "$mode" "$tool" "$result"
  case $result in "ERROR SUMMARY: 0 errors"* | "RACECHECK SUMMARY: 0 hazards"*) return 0 ;; *) return 1 ;; esac
}
sanitize_list() { # lines `LAB TOOL MODE`; of the engine's test the mode is the one case that is run
  for lab in $labs; do
    [ "$lab" != matmul ] || continue  # matmul's kernels are cuBLASLt's
    for tool in memcheck racecheck initcheck; do
      echo "$lab $tool small"
      if [ "$lab" = delta_rule ]; then echo "$lab $tool general"; fi
    done
  done
  # whole steps, forward and backward, of every kind of mixer; memcheck only: cuBLASLt's kernels run here, too
  echo 'test_gdncu memcheck "mamba2 gdn swa B=2 T=65"'
  echo 'test_gdncu memcheck "gdn2 kda documents B=2 T=129"'
}
part_sanitize() { # LABS: only these
  export -f sanitize_one program && export parts
  sanitize_list | { if [ -n "${LABS:-}" ]; then grep -E "^(${LABS// /|}) "; else cat; fi; } >"$parts/sanitize.list"
  # several at a time: nothing is timed here
  xargs -P "${JOBS:-6}" -L 1 bash -c 'sanitize_one "$@" || exit 1' _ <"$parts/sanitize.list" >"$parts/sanitize.lines" || failed=1
  LC_ALL=C sort "$parts/sanitize.lines" | say
}
part_bench() {
  for lab in $labs; do
    timeout 100 "$(program "$lab")" bench >"$parts/bench-$lab.log" 2>&1 || failed=1
    { echo "## $lab"; grep -vE 'passed,|warning|^$' "$parts/bench-$lab.log" | cut -c1-150; } | say
  done
}
part_models() {
  list=${LIST:-dev/bench/models.txt}
  dev/bench/bench_gpu.sh "${DATA:?a glob of token shards}" "$(program train_gdncu)" <"$list" | say
  awk 'NF == 10 && $2 ~ /^[0-9]+$/ { gsub(",", "", $5)
    printf "THROUGHPUT preset=%s gpus=1 B=%s T=%s ms=%s tok_s=%s mfu=%s floor_pct=%s peak_gib=%s first_step_s=%s first_step_warm_s=%s\n",
    $1, $2, $3, $4, $5, $6, $7, $8, $9, $10 }' \
    "$out" >"$parts/throughput.txt"
  say <"$parts/throughput.txt"
  # a line for each model of the list, whatever became of the others
  [ "$(wc -l <"$parts/throughput.txt")" = "$(grep -cvE '^ *(#|$)' "$list")" ] || failed=1
}
part_input() { dev/test/check_gpu_input.sh "$(program train_gdncu)" 2>&1 | say; [ "${PIPESTATUS[0]}" = 0 ] || failed=1; }
part_report() { dev/gpu_report.py write "$report" "$parts" "$(source_hash)"; }
needed() { # what the report must have for its verdict: a line for each lab, and for each pair of lab and tool
  for lab in $labs; do echo "lab $lab"; done
  sanitize_list | tr -d '"' | sed 's/^\([^ ]*\) \([^ ]*\) \(.*\)/sanitize \1 \3 \2/'
}

case ${1:-} in
hash)
  source_hash
  exit $?
  ;;
verdict)
  needed | dev/gpu_report.py verdict "$report" "$(source_hash)"
  exit $?
  ;;
'' | -h | --help) sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0" && exit 0 ;;
esac
mkdir -p "$parts"
for part in "$@"; do
  case $part in right | lab | sanitize | bench | models | input | report) ;; *) echo "gpu_check.sh: no part '$part'; see --help" >&2 && exit 2 ;; esac
  out=$parts/$part.new  # a part that is interrupted leaves what an earlier one found
  if [ "$part" != report ]; then
    {
      nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1
      echo "$(date +%F), sources $(source_hash), $(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/CUDA \1/p')"
    } >"$out"
  fi
  start=$SECONDS
  "part_$part"
  if [ "$part" != report ]; then mv "$out" "$parts/$part.txt"; fi
  echo "-- $part: $((SECONDS - start)) s"
done
if [ $failed != 0 ]; then echo "gpu_check: something failed"; fi
exit $failed
