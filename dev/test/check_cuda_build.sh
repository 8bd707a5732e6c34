#!/bin/bash
# check_cuda_build.sh: compiles the CUDA side for sm_80 and sm_90a with warnings as errors and prints registers, shared
# memory and spills of each kernel. Needs nvcc, no GPU.   dev/test/check_cuda_build.sh [ARCHITECTURE...]
# A spill fails unless dev/test/cuda_spills.txt lists the kernel with a reason. Ends with `N passed, N failed, N skipped`.
set -u
cd "$(dirname "$0")/../.." || exit 1
if ! command -v nvcc >/dev/null; then
  echo "SKIPPED: no nvcc: the GPU side is not compiled here"
  echo "0 passed, 0 failed, 1 skipped"
  exit 0
fi
make -s build/deps.ok || exit 3
passed=0 failed=0 list=dev/test/cuda_spills.txt
for arch in "${@:-80 90a}"; do set -- $arch; for a in "$@"; do
  dir=build/cuda-ci/$a
  mkdir -p "$dir"
  for source in train_gdn.cu gdn/cuda/delta_rule.cu gdn/cuda/sliding_attention.cu; do echo "$source"; done |
    xargs -P 2 -I{} sh -c 'nvcc -std=c++17 -O3 -gencode=arch=compute_'"$a"',code=sm_'"$a"' -D_GNU_SOURCE -I. -Werror all-warnings \
      -Xcompiler -Wall,-Wextra,-Werror,-fopenmp -Xptxas -v -c {} -o '"$dir"'/$(basename {}).o >'"$dir"'/$(basename {}).log 2>&1 || echo FAILED >>'"$dir"'/$(basename {}).log'
  for log in "$dir"/*.log; do
    if grep -q '^FAILED' "$log"; then
      echo "FAILED: $(basename "$log" .log) for sm_$a:" && grep -E 'error|warning' "$log" | head -5
      failed=$((failed + 1))
    else
      passed=$((passed + 1))
    fi
  done
  python3 - "$a" "$list" "$dir"/*.log <<'PY' | tee "$dir/table.txt"
import re, subprocess, sys
arch, listed = sys.argv[1], []
for line in open(sys.argv[2]):
    if line.strip() and not line.startswith("#"):
        a, pattern = line.split()[:2]
        if a in (arch, "*"):
            listed.append(pattern)
rows, name = [], None
for path in sys.argv[3:]:
    for line in open(path, errors="replace"):
        m = re.search(r"Compiling entry function '(\S+)'", line)
        if m: name, spill = m.group(1), (0, 0)
        m = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if m: spill = (int(m.group(1)), int(m.group(2)))
        m = re.search(r"Used (\d+) registers", line)
        if m and name:
            shared = re.search(r"(\d+) bytes smem", line)
            rows.append((name, int(m.group(1)), int(shared.group(1)) if shared else 0, *spill))
            name = None
tool = "c++filt"
try: plain = subprocess.run([tool], input="\n".join(r[0] for r in rows), capture_output=True, text=True).stdout.split("\n")
except OSError: plain = [r[0] for r in rows]
seen, bad = set(), 0
print(f"sm_{arch}: {'registers':>9s} {'shared':>7s} {'spilled':>8s}  kernel")
for (mangled, registers, shared, stores, loads), name in sorted(zip(rows, plain), key=lambda x: x[1]):
    name = re.sub(r"\(.*", "", name.replace("void ", "").replace("(anonymous namespace)::", ""))
    name = re.sub(r"\(\w+\)", "", name)
    if (name, registers) in seen: continue
    seen.add((name, registers))
    verdict = ""
    if stores or loads:
        ok = any(re.search(p, name) for p in listed)
        bad += not ok
        verdict = "  (listed)" if ok else "  FAILED: spills and is not listed in dev/test/cuda_spills.txt"
    print(f"sm_{arch}: {registers:9d} {shared:7d} {stores + loads:8d}  {name[:100]}{verdict}")
print(f"sm_{arch}: {len(seen)} kernels, {bad} with a spill that is not listed")
PY
  bad=$(sed -n 's/.* kernels, \([0-9]*\) with a spill.*/\1/p' "$dir/table.txt")
  if [ "$bad" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done; done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ] && [ $passed != 0 ]
