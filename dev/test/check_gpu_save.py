#!/usr/bin/env python3
"""check_gpu_save.py: does a save hold up the training of a large model, and does a kill -9 while it is written lose
anything? For a machine with a GPU and 40 GB of disk; some 150 s. Python's own library only.

  dev/test/check_gpu_save.py PROGRAM DATA [OPTIONS...]     ./train_gdncu 'data/*_train_*.bin'

Trains fla-gdn-1b (1.387B parameters, a checkpoint of 16.6 GB) with 524,288 tokens a step; OPTIONS go to the trainer
and win. A save every EVERY (3) steps; the third one is killed while its files are written. Prints the time from each
step to the next, those with a save in flight marked, and their ratio to the others, which must be at most LIMIT (1.05)
(0: not checked). Then: the newest checkpoint is whole, --resume auto goes on from it, and the next step has the same bits
as before the kill. OUT (a fresh folder below TMPDIR) is removed at the end. Exit status 1 when something failed.
"""
import glob
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

EVERY, LIMIT = int(os.environ.get("EVERY", "3")), float(os.environ.get("LIMIT", "1.05"))
failed = passed = 0


def check(ok, what):
    global failed, passed
    passed, failed = passed + bool(ok), failed + (not ok)
    print(f"{'ok    ' if ok else 'FAILED'} {what}", flush=True)
    return ok


class Run:
    """The program in the background: when its steps ended, and when a save was in flight."""

    def __init__(self, command):
        self.begin = time.monotonic()
        self.p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.ended, self.said = {}, []  # step: time
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        for line in self.p.stdout:
            now = time.monotonic()
            self.said.append(line.rstrip())
            word = line.split()
            if word[:1] == ["step"] and "/" in word[1]:
                self.ended[int(word[1].split("/")[0])] = now

    def wait(self, condition, what, seconds=150):
        end = time.monotonic() + seconds
        while not condition():
            if self.p.poll() is not None or time.monotonic() > end:
                self.kill()
                print("\n".join(self.said[-15:]))
                return check(False, f"{what}: the program ended with {self.p.returncode} or took too long")
            time.sleep(0.002)
        return True

    def kill(self):
        if self.p.poll() is None:
            self.p.send_signal(signal.SIGKILL)
        self.p.wait()
        self.thread.join()


def temporary(out, step="*"):
    return glob.glob(os.path.join(out, f".tmp-step-{step}-*"))


def half_written(out, step):
    """Some of the tensors of this save are in its file, and the file is not complete."""
    for folder in temporary(out, f"{step:08d}"):
        try:
            st = os.stat(os.path.join(folder, "model.safetensors"))
            return st.st_size // 20 < st.st_blocks * 512
        except OSError:
            pass
    return False


def log_steps(out):
    with open(os.path.join(out, "log.jsonl")) as f:
        return {e["step"]: e for e in map(json.loads, f) if e["kind"] == "step"}


def table(ended, log, busy, blocked):
    """busy, blocked: steps with a save in flight; steps before whose start the save before had to be waited for."""
    wall = {s: 1e3 * (ended[s] - ended[s - 1]) for s in sorted(ended) if s > 2 or s == 2 and EVERY > 1}
    quiet = statistics.median(ms for s, ms in wall.items() if s not in busy)
    print(f"{'step':>6} {'ms in all':>10} {'ms in log':>10} {'ratio':>7}")
    for s, ms in wall.items():
        mark = "  a save is copied and written" if s % EVERY == 1 else "  a save is written" if s in busy else ""
        mark = "  waited for the save before: the disk is too slow for a save so often" if s in blocked else mark
        print(f"{s:6d} {ms:10.1f} {log[s]['ms']:10.1f} {ms / quiet:7.3f}{mark}")
    held = [ms for s, ms in wall.items() if s in busy and s not in blocked]
    text = f"steps with a save {statistics.mean(held):.1f} ms on average, {max(held):.1f} at most; without {quiet:.1f} ms: " \
           f"ratio {statistics.mean(held) / quiet:.3f}, {max(held) / quiet:.3f}"
    if LIMIT:
        check(max(held) / quiet <= LIMIT, f"{text}, limit {LIMIT}")
    else:
        print(f"      {text}")


def main():
    if len(sys.argv) < 3:
        print(__doc__)
        return 2
    program, data = os.path.abspath(sys.argv[1]), sys.argv[2]
    out = os.environ.get("OUT") or os.path.join(tempfile.mkdtemp(prefix="check_gpu_save_"), "run")
    command = [program, "--model", "fla-gdn-1b", "--train", data, "--val", "", "--batch", "8", "--seq-len", "4096",
               "--total-batch", "524288", "--steps", "100000", "--eval-every", "0", "--log-every", "1", "--keep", "1",
               "--save-every", str(EVERY), *sys.argv[3:], "--out", out, "--resume", "auto"]
    last = 3 * EVERY
    try:
        run, busy, blocked, size = Run(command), set(), set(), 0

        def watch():
            done, saving = max(run.ended, default=0), temporary(out)
            if saving or done and done % EVERY == 0:
                busy.add(done + 1)
            if done > EVERY and done % EVERY == 0 and temporary(out, f"{done - EVERY:08d}"):
                blocked.add(done + 1)
            return half_written(out, last)

        if not run.wait(watch, "training"):
            return 1
        run.kill()
        print(f"first step {run.ended[1] - run.begin:.1f} s after the start; kill -9 while the save of step {last} is "
              f"written", flush=True)
        log = log_steps(out)
        table(run.ended, log, busy, blocked)
        found = sorted(os.path.basename(d) for d in glob.glob(os.path.join(out, "step-*")))
        check(temporary(out, f"{last:08d}") and found == [f"step-{last - EVERY:08d}"],
              f"killed inside the save of step {last}; complete: {' '.join(found)}")
        begin = time.monotonic()
        newest = os.path.join(out, f"step-{last - EVERY:08d}")
        p = subprocess.run([program, "inspect", newest], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        size = sum(os.path.getsize(os.path.join(newest, f)) for f in os.listdir(newest))
        check(p.returncode == 0 and "sizes and hashes of the manifest" in p.stdout,
              f"inspect {found[-1]}: {size / 1e9:.2f} GB, {(p.stdout.splitlines() or [''])[3 if not p.returncode else -1].strip()}, "
              f"exit {p.returncode} ({time.monotonic() - begin:.1f} s)")
        again, next_step = Run(command), last - EVERY + 1
        if not again.wait(lambda: next_step in again.ended, "resume"):
            return 1
        again.kill()
        one, two = log[next_step], log_steps(out)[next_step]
        same = all(one[k] == two[k] for k in ("loss", "grad_norm", "batch_hash", "tokens"))
        check(same, f"--resume auto: step {next_step} after {again.ended[next_step] - again.begin:.1f} s, loss {two['loss']:.9f}, "
                    f"norm {two['grad_norm']:.9f}; before the kill {one['loss']:.9f}, {one['grad_norm']:.9f}")
        check(not temporary(out), "what the killed save left is removed")
    finally:
        shutil.rmtree(os.path.dirname(out) if not os.environ.get("OUT") else out, ignore_errors=True)
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
