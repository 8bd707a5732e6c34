"""case_runner.py: runs a file's test functions and counts them. Python's own library only.

  from case_runner import Failure, Skip, check, run_cases
  sys.exit(run_cases(globals(), sys.argv[1:], ROOT))

A function test_NAME passes when it returns, fails by check() or an error, and is skipped by raising Skip. Lines that begin
with FAILED or SKIPPED are what run_all.sh repeats; the last line is `N passed, N failed, N skipped`.
"""

import shutil
import subprocess
import time


class Failure(Exception):
    pass


class Skip(Exception):
    pass


def check(ok, what):
    if not ok:
        raise Failure(what)
    return ok


def run_cases(functions, only, folder):
    """functions: a module's globals(); only: names, empty for all; folder: removed when nothing failed. Exit status."""
    passed = failed = skipped = 0
    for name, test in sorted((n, t) for n, t in functions.items() if n.startswith("test_") and (not only or n in only)):
        begin = time.time()
        try:
            test()
            passed += 1
            print(f"ok    {name} {time.time() - begin:.1f} s", flush=True)
        except Skip as e:
            skipped += 1
            print(f"SKIPPED {name}: {e}", flush=True)
        except (Failure, subprocess.TimeoutExpired, OSError, ValueError, KeyError, AttributeError, IndexError) as e:
            failed += 1
            print(f"FAILED: {name}: {type(e).__name__}: {e}", flush=True)
    if failed:
        print(f"the folders are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0
