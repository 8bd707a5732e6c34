#!/bin/bash
# run_fuzz.sh PROGRAMS SECONDS TARGET...: fuzzes each target for so long, beginning with the inputs in corpus/TARGET.
# New inputs stay in PROGRAMS/found/TARGET; one that breaks a target is kept there as crash-*. Ends with
# `N passed, N failed, N skipped`; exit status 1 when a target broke.
set -u
programs=$1 seconds=$2 here=$(cd "$(dirname "$0")" && pwd)
shift 2
passed=0 failed=0
for target in "$@"; do
  found=$programs/found/$target
  mkdir -p "$found"
  if "$programs/$target" -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$found/" "$found" "$here/corpus/$target" >"$programs/$target.log" 2>&1; then
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$programs/$target.log")
    edges=$(grep -oE 'cov: [0-9]+' "$programs/$target.log" | tail -n 1)
    echo "ok    $target: $runs inputs in $seconds s, $edges"
    passed=$((passed + 1))
  else
    echo "FAILED $target: see $programs/$target.log"
    grep -E 'ERROR|SUMMARY|runtime error|Test unit written' "$programs/$target.log" | head -n 5
    failed=$((failed + 1))
  fi
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
