#!/bin/sh
# mpi_flags.sh: prints the flags that build train_gdn with MPI, or nothing where no MPI can be compiled against and
# linked. The Makefile calls it; MPI=0 says no.
set -u
if [ "${MPI:-1}" = 0 ] || ! command -v mpicc >/dev/null; then exit 0; fi
# Open MPI prints its flags by --showme, MPICH and its relatives print the whole command by -show
flags="$(mpicc --showme:compile 2>/dev/null) $(mpicc --showme:link 2>/dev/null)" || flags=$(mpicc -show | cut -d' ' -f2-)
d=$(mktemp -d) || exit 0
printf '#include <mpi.h>\nint main(void) { int n; return MPI_Init(0, 0) + MPI_Comm_size(MPI_COMM_WORLD, &n); }\n' >"$d/t.c"
# shellcheck disable=SC2086
if ${CC:-cc} "$d/t.c" -o "$d/t" $flags >/dev/null 2>&1; then echo "-DGDN_MPI $flags"; fi
rm -rf "$d"
