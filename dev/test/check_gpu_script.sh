#!/bin/bash
# check_gpu_script.sh: a script of the published runs, from its start to a stop and on from there, on this machine.
#
#   dev/test/check_gpu_script.sh PROGRAM DATA [OPTIONS...]   ./train_gdncu out/data/fwe (DATA as scripts/train_loop.sh
#                                                            has it); OPTIONS go to the trainer and win
#
# Starts scripts/SCRIPT.sh (gdn_1.3b_100b), waits for a step, sends USR1 to the script: it must end with 75 and leave a
# whole checkpoint of the last step. The same command must then go on at the next step; it is stopped the same way.
# Prints the seconds to the first step. One GPU, for the 1.3B models 33 GB of disk below TMPDIR, removed at the end; about
# a minute and a half. The other variables of scripts/train_loop.sh (TOTAL_BATCH, BATCH, ...) are passed on.
set -u
cd "$(dirname "$0")/../.." || exit 1
if [ $# -lt 2 ]; then sed -n '2,/^set/{/^#/p}' "$0" && exit 2; fi
program=$1 data=$2 passed=0 failed=0
shift 2
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
out=$work/run

check() { # check CONDITION-WAS WHAT
  if [ "$1" = 0 ]; then passed=$((passed + 1)) && echo "ok     $2"; else failed=$((failed + 1)) && echo "FAILED $2"; fi
}
finish() {
  echo "$passed passed, $failed failed, 0 skipped"
  [ "$failed" = 0 ]
  exit
}
steps() { grep -o '"kind":"step".*"step":[0-9]*' "$out/log.jsonl" 2>/dev/null | grep -o '[0-9]*$'; }
newest() { find "$out/" -maxdepth 1 -name 'step-*' | sort | tail -n 1; }

round() { # round OPTIONS...: starts the script, waits for step $first, stops it
  begin=$EPOCHREALTIME
  TRAIN=$program DATA=$data OUT=$out "scripts/${SCRIPT:-gdn_1.3b_100b}.sh" "$@" >"$work/log" 2>&1 &
  pid=$!
  for ((i = 0; i < 6000; i++)); do # two minutes
    if steps | grep -qx "$first" || ! kill -0 $pid 2>/dev/null; then break; fi
    sleep 0.02
  done
  seconds=$(awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
  steps | grep -qx "$first"
  check $? "$what: step $first after $seconds s"
  kill -USR1 $pid 2>/dev/null
  begin=$EPOCHREALTIME
  wait $pid
  code=$?
  seconds=$(awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
  [ $code = 75 ]
  check $? "$what: USR1 to the script: exit code $code after $seconds s, needed 75"
  if [ $code != 75 ]; then tail -n 15 "$work/log" && finish; fi
  last=$(steps | tail -n 1) folder=$(newest)
  said=$("$program" inspect "$folder" 2>&1) && [ "$folder" = "$out/step-$(printf %08d "$last")" ] && grep -q 'sizes and hashes of the manifest' <<<"$said"
  check $? "$what: $(basename "$folder") of $(du -sh "$folder" | cut -f1) is whole, the last step in the log is $last"
}

first=1 what=start
round "$@"
if [ "$failed" != 0 ]; then finish; fi
first=$((last + 1)) what=again
round "$@"
steps | awk 'NR != $1 { bad = 1 } END { exit bad }'
check $? "the log has every step from 1 to $last once"
finish
