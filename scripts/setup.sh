#!/bin/sh
# setup.sh: installs what train_gdn needs and the machine lacks. The Makefile calls it; it can be called by hand.
#
#   scripts/setup.sh build   C libraries: jansson (JSON), xxHash (hashes)            for make, make run
#   scripts/setup.sh test    the same, Open MPI, Python and a .venv with the           for make test and data/prepare.py
#                            packages of data/requirements.txt
#
# Each library is looked for by compiling against it. Missing ones are installed with apt-get when that is possible
# (as root, or with a sudo that asks for no password); else one line says what to run, and the exit code is 3.
set -u
cd "$(dirname "$0")/.." || exit 3

compiles() { # compiles HEADER LIBRARY FUNCTION
  d=$(mktemp -d) || exit 3
  printf '#include <%s>\nint main(void) { return (void *)%s == (void *)0; }\n' "$1" "$3" >"$d/t.c"
  ${CC:-cc} "$d/t.c" -o "$d/t" "$2" >"$d/log" 2>&1
  code=$?
  rm -rf "$d"
  return $code
}

missing=""
compiles jansson.h -ljansson json_loads || missing="$missing libjansson-dev"
compiles xxhash.h -lxxhash XXH3_64bits || missing="$missing libxxhash-dev"
if [ "${1:-build}" = test ]; then
  command -v python3 >/dev/null || missing="$missing python3"
  python3 -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"
fi

install() { # install " PACKAGE..."
  run=""
  if [ "$(id -u)" != 0 ]; then run="sudo -n"; fi
  if ! command -v apt-get >/dev/null || { [ -n "$run" ] && ! sudo -n true 2>/dev/null; }; then
    echo "setup.sh: missing:$1. Run: sudo apt-get install$1" >&2
    return 1
  fi
  echo "setup.sh: installing$1"
  # an old package list names files that are gone: refresh it when the first try fails
  # shellcheck disable=SC2086
  if ! DEBIAN_FRONTEND=noninteractive $run apt-get install -y -qq --no-install-recommends $1 >build/setup.log 2>&1; then
    if ! { $run apt-get update -qq && DEBIAN_FRONTEND=noninteractive $run apt-get install -y -qq --no-install-recommends $1; } >build/setup.log 2>&1; then
      tail -n 3 build/setup.log >&2
      echo "setup.sh: could not install$1 (build/setup.log). Run: sudo apt-get install$1" >&2
      return 1
    fi
  fi
}

if [ -n "$missing" ]; then install "$missing" || exit 3; fi
if [ "${1:-build}" = test ] && [ "${MPI:-1}" != 0 ]; then
  if [ -z "$(scripts/mpi_flags.sh)" ] || ! command -v mpirun >/dev/null; then
    install " openmpi-bin libopenmpi-dev" || echo "setup.sh: without an MPI the tests of several ranks are skipped" >&2
  fi
fi

if [ "${1:-build}" = test ]; then
  if [ ! -x .venv/bin/python ]; then python3 -m venv .venv || exit 3; fi
  if ! .venv/bin/python -m pip install -q --disable-pip-version-check -r data/requirements.txt; then
    echo "setup.sh: could not install the Python packages of data/requirements.txt into .venv: is PyPI reachable?" >&2
    exit 3
  fi
fi
exit 0
