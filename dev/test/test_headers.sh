#!/bin/bash
# test_headers.sh: every header of gdn/ compiles alone, without a warning, as C11 and as C++17 (the CUDA side includes
# them), with gcc and with clang where it is installed. cpu_matmul.h is for the CPU engine alone and needs `real`.
cd "$(dirname "$0")/../.." || exit 1
passed=0 failed=0 skipped=0
try() { # try COMPILER LANGUAGE STANDARD HEADER
  if out=$("$1" -x "$2" "-std=$3" -D_GNU_SOURCE -Wall -Wextra -Werror -fopenmp -fsyntax-only -I. "$4" 2>&1); then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "FAILED: $1 -std=$3 $4: $(echo "$out" | grep -E 'error' | head -n 1)"
  fi
}
for h in gdn/*.h; do
  if [ "$h" = gdn/cpu_matmul.h ]; then continue; fi
  printf '#include "%s"\nint main(void) { return 0; }\n' "$h" >"build/header_$$.c"
  try gcc c c11 "build/header_$$.c"
  try g++ c++ c++17 "build/header_$$.c"
  if command -v clang >/dev/null; then
    try clang c c11 "build/header_$$.c"
    try clang++ c++ c++17 "build/header_$$.c"
  fi
  rm -f "build/header_$$.c"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
