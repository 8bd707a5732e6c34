#!/bin/bash
# watch_run.sh: sourced by bench_gpu.sh and bench_ranks.sh.
#   watch_run CONSOLE LOG STEPS COMMAND...
# Starts COMMAND in the background, its output in CONSOLE, and waits until its log.jsonl, LOG, has that many steps. Status 0: it
# is still running as $run_pid, for the caller to end; 1: it ended before. $run_first: seconds from the start to the first step.
watch_run() {
  local console=$1 log=$2 steps=$3 count=0 begin
  shift 3
  run_first='' begin=$(date +%s%N)
  "$@" >"$console" 2>&1 </dev/null &
  run_pid=$!
  while kill -0 $run_pid 2>/dev/null && [ "$count" -lt "$steps" ]; do
    sleep 0.1
    count=$(cat "$log" 2>/dev/null | grep -c '"kind":"step"')
    if [ -z "$run_first" ] && [ "$count" -gt 0 ]; then run_first=$(($(date +%s%N) - begin)) run_first=${run_first%??????}; fi
  done
  if [ -n "$run_first" ]; then run_first=$(printf '%d.%03d' $((run_first / 1000)) $((run_first % 1000))); fi
  kill -0 $run_pid 2>/dev/null
}
