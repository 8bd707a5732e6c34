#!/usr/bin/env python3
"""run_faults.py: the fault tests, in two processes at a time.

  run_faults.py quick             under a minute: make faults-quick, part of make test
  run_faults.py long [KILLS]      make faults: as reliability demands; KILLS 500
  run_faults.py AREA [quick|long] one area alone: kills, disk, signals, damage, nonfinite, plants

Needs the program (./train_gdn, or the one that FAULTS_PROGRAM names), build/faults/io_faults.so, engine.o and damage:
make builds them. The long form prints the seeds of its random numbers. Ends with `N passed, N failed, N skipped`; exit status 1 when something failed.
"""
import importlib
import os
import re
import subprocess
import sys

AREAS = ["plants", "signals", "kills", "disk", "nonfinite", "damage"]  # the longest first


def run_area(area, long, kills):
    import common
    counter = common.Counter()
    module = importlib.import_module(area)
    module.tests(counter, long, kills) if area == "kills" else module.tests(counter, long)
    return counter.end()


def mounting():
    """What makes a program one that may mount: nothing for root, else a user namespace where the system has them."""
    wrap = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        return wrap if os.geteuid() and subprocess.run(wrap + ["true"], stderr=subprocess.DEVNULL).returncode == 0 else []
    except OSError:
        return []


def run_all(long, kills):
    waiting, running, totals = list(AREAS), [], [0, 0, 0]
    while waiting or running:
        while waiting and len(running) < 2:
            area = waiting.pop(0)
            line = [sys.executable, __file__, area, "long" if long else "quick", str(kills)]
            p = subprocess.Popen((mounting() if area == "disk" else []) + line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            running.append((area, p))
        area, p = running.pop(0)
        try:
            out, _ = p.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            running.append((area, p))
            continue
        text = out.decode(errors="replace")
        lines = text.rstrip().splitlines()
        m = re.fullmatch(r"(\d+) passed, (\d+) failed, (\d+) skipped", lines[-1] if lines else "")
        for line in lines[:-1] if m else lines:
            print(line if line.startswith(("FAILED", "SKIPPED")) else f"{area}: {line}", flush=True)
        if m:
            totals = [a + int(b) for a, b in zip(totals, m.groups())]
        if not m or p.returncode not in (0, 1):
            print(f"FAILED {area}: ended with status {p.returncode}", flush=True)
            totals[1] += 1
    print("%d passed, %d failed, %d skipped" % tuple(totals))
    return 1 if totals[1] or not totals[0] else 0


def main(args):
    kills = int(args.pop()) if args and args[-1].isdigit() else 500
    if args and args[0] in AREAS:
        return run_area(args[0], args[1:] == ["long"], kills)
    if args not in (["quick"], ["long"]):
        print(__doc__)
        return 2
    return run_all(args == ["long"], kills)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
