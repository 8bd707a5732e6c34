#!/bin/bash
# run_all.sh: runs every test program, two at a time, and adds up what they counted. Logs lie in build/test/.
#   dev/test/run_all.sh                    what make test runs
#   dev/test/run_all.sh --programs DIR     only the C programs, from DIR (make sanitize)
# Exit status 0 when nothing failed. TESTS_ALLOW_SKIP=0 (CI) fails when anything but a GPU test is skipped.
set -u
cd "$(dirname "$0")/../.." || exit 1
build=build python=.venv/bin/python
logs=build/test
if [ "${1:-}" = --programs ]; then build=$2 logs=$2/log; fi
rm -rf "$logs" && mkdir -p "$logs"

# the longest first, so that two cores finish together
list="test_gdn|./test_gdn
test_trainer|$python dev/test/test_trainer.py
faults_quick|$python dev/test/faults/run_faults.py quick
test_ranks|$python dev/test/test_ranks.py
test_layers_f64|$build/test_layers_f64
test_layers_f32|$build/test_layers_f32
test_checkpoint|$build/test_checkpoint
test_headers|dev/test/test_headers.sh
test_fineweb|$python dev/test/test_fineweb.py
test_prepare|$python dev/test/test_prepare.py
test_run_scripts|$python dev/test/test_run_scripts.py
test_gpu_report|$python dev/test/test_gpu_report.py
test_tensorboard|$python dev/test/test_tensorboard.py
test_tokenizer_python|$python dev/test/test_tokenizer.py
test_shards|$build/test_shards
test_tokenizer|$build/test_tokenizer
test_sampler|$build/test_sampler
test_machine|$build/test_machine
test_config|$build/test_config"
if [ -x test_gdncu ] && nvidia-smi -L >/dev/null 2>&1; then list="test_gdncu|./test_gdncu
$list"; fi
if [ "${1:-}" = --programs ]; then list=$(echo "$list" | grep "|$build/"); fi

run_one() { # one line of the list
  name=${1%%|*} start=$SECONDS
  # shellcheck disable=SC2086
  OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} ${1#*|} >"$2/$name.log" 2>&1
  code=$?
  last=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$2/$name.log" | tail -n 1)
  # a program that died without its closing line has failed
  if [ -z "$last" ]; then last="0 passed, 1 failed, 0 skipped" && echo "FAILED: $name ended with status $code" >>"$2/$name.log"; fi
  if [ $code -ne 0 ] && echo "$last" | grep -q ' 0 failed'; then last="${last/ 0 failed/ 1 failed}"; fi
  echo "$last" >"$2/$name.count"
  printf '%-24s %s (%d s)\n' "$name" "$last" $((SECONDS - start))
  grep -E '^(FAILED|SKIPPED)' "$2/$name.log" | head -n 20 | sed 's/^/    /'
  return 0
}
export -f run_one
echo "$list" | xargs -d '\n' -P 2 -I{} bash -c 'run_one "$1" "$2"' _ {} "$logs"

read -r passed failed skipped < <(cat "$logs"/*.count | awk '{p += $1; f += $3; s += $5} END {print p + 0, f + 0, s + 0}')
if [ "${TESTS_ALLOW_SKIP:-1}" = 0 ]; then
  other=$(cat "$logs"/*.log | grep '^SKIPPED' | grep -vc GPU)
  if [ "$other" != 0 ]; then echo "$other skipped tests that are not for want of a GPU" && failed=$((failed + other)); fi
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" != 0 ]
