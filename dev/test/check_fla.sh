#!/bin/bash
# check_fla.sh: holds train_gdn's checkpoints against fla (check_fla.py says what is compared). Not part of `make test`:
# it needs a GPU and Python with torch, triton, transformers 5, einops, numpy and safetensors.
#   dev/test/check_fla.sh [--only TEXT]...   runs the check, with the options of check_fla.py
#   dev/test/check_fla.sh --wheels           downloads fla's two wheels, for a machine without a network
#   dev/test/check_fla.sh --build            builds build/fla/train_gdn, static, for a machine without our libraries
# fla is taken from Python's own packages, or from build/fla/wheels, where --wheels puts it. The program is
# build/fla/train_gdn if --build made one, else ./train_gdn, made when it is not there.
# Exit status 0: all agree; 1: not; 2: wrong options; 3: something that is needed is not there.
set -u
cd "$(dirname "$0")/../.." || exit 3
version=0.6.0 wheels=build/fla/wheels

case ${1:-} in
--wheels)
  exec python3 -m pip download -q --no-deps --only-binary=:all: -d "$wheels" "fla-core==$version" \
    "flash-linear-attention==$version"
  ;;
--build)
  mkdir -p build/fla
  exec "${CC:-cc}" -std=c11 -D_GNU_SOURCE -Wall -Wextra -O3 "-march=${MARCH:-x86-64-v3}" -fopenmp -static -I. \
    -DGDN_BUILD='"check_fla"' train_gdn.c -o build/fla/train_gdn -ljansson -lxxhash -lpthread -lm
  ;;
esac

if ! python3 -c 'import importlib.metadata as m; m.version("fla-core"), m.version("flash-linear-attention")' 2>/dev/null; then
  if ! ls "$wheels"/fla_core-*.whl "$wheels"/flash_linear_attention-*.whl >/dev/null 2>&1; then
    echo "check_fla: fla is not installed: pip install flash-linear-attention==$version, or $0 --wheels and again"
    exit 3
  fi
  site=$(mktemp -d) && trap 'rm -rf "$site"' EXIT
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" \
    "$wheels"/fla_core-*.whl "$wheels"/flash_linear_attention-*.whl || exit 3
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
program=build/fla/train_gdn
if [ ! -x $program ]; then program=./train_gdn && make -s train_gdn || exit 3; fi
python3 dev/test/check_fla.py --train-gdn "$program" "$@"
