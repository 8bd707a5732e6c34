#!/bin/bash
# check_pytorch.sh: loss curves of train_gdn and train_gdncu against plain PyTorch (check_pytorch.py says how). Not part of
# `make test`: it needs PyTorch, and a GPU to mean anything for train_gdncu.
#   dev/test/check_pytorch.sh [CPU_PROGRAM [GPU_PROGRAM]] [-- options of check_pytorch.py]
#   dev/test/check_pytorch.sh --build        builds build/pytorch_cpu/train_gdn, static, for a machine without our libraries
# CPU_PROGRAM: build/pytorch_cpu/train_gdn if --build made one, else ./train_gdn. GPU_PROGRAM: ./train_gdncu if it is there
# and nvidia-smi finds a GPU. About 2 minutes on an H200 with 16 CPU cores.
# Exit status 0: all agree; 1: not; 2: wrong options; 3: something that is needed is not there.
set -u
cd "$(dirname "$0")/../.." || exit 3
if [ "${1:-}" = --build ]; then
  mkdir -p build/pytorch_cpu
  exec "${CC:-cc}" -std=c11 -D_GNU_SOURCE -Wall -Wextra -O3 -ffp-contract=fast -fno-math-errno "-march=${MARCH:-x86-64-v3}" \
    -fopenmp -static -I. -DGDN_BUILD='"check_pytorch"' train_gdn.c -o build/pytorch_cpu/train_gdn -ljansson -lxxhash -lpthread -lm
fi
programs=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do programs+=("$1") && shift; done
[ $# -gt 0 ] && shift
if [ ${#programs[@]} -gt 2 ]; then echo "check_pytorch: ${#programs[@]} programs; needed at most two" && exit 2; fi
cpu=${programs[0]:-build/pytorch_cpu/train_gdn}
if [ -z "${programs[0]:-}" ] && [ ! -x "$cpu" ]; then cpu=./train_gdn; fi
if [ ! -x "$cpu" ]; then echo "check_pytorch: no $cpu: make train_gdn, or $0 --build" && exit 3; fi
gpu=${programs[1]:-}
if [ -z "$gpu" ] && [ -x ./train_gdncu ] && nvidia-smi -L >/dev/null 2>&1; then gpu=./train_gdncu; fi
if [ -n "$gpu" ] && [ ! -x "$gpu" ]; then echo "check_pytorch: no $gpu: make train_gdncu" && exit 3; fi
exec "${PYTHON:-python3}" dev/test/check_pytorch.py --cpu "$cpu" --gpu "$gpu" "$@"
