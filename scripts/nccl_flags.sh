#!/bin/sh
# nccl_flags.sh: prints the flags with which nvcc builds train_gdncu for several GPUs: MPI's ($1: what mpi_flags.sh printed)
# and, where it can be compiled against and linked, NCCL's. Nothing without MPI. The Makefile calls it. A program with MPI
# and without NCCL says what it lacks when it is started as several ranks.
set -u
mpi=${1:-}
if [ -z "$mpi" ] || ! nvcc=$(command -v "${NVCC:-nvcc}"); then exit 0; fi
cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
d=$(mktemp -d) || exit 0
printf '#include <nccl.h>\nint main() { ncclUniqueId id; return ncclGetUniqueId(&id); }\n' >"$d/t.cc"
# nvcc takes flags for the host's compiler and linker in its own wrapping
for f in $mpi; do
  case $f in
  -Wl,*) printf '%s ' "-Xlinker ${f#-Wl,}" ;;
  -D* | -I* | -L* | -l*) printf '%s ' "$f" ;;
  *) printf '%s ' "-Xcompiler $f" ;;
  esac
done
if ${CXX:-g++} "$d/t.cc" -I"$cuda/include" -o "$d/t" -L"$cuda/lib64" -L"$cuda/lib" -lnccl >/dev/null 2>&1; then
  printf '%s' "-DGDN_NCCL -lnccl"
fi
echo
rm -rf "$d"
