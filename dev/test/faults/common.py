"""common.py: what the fault tests share: tiny runs as any number of ranks, with failing or slow system calls; reference
runs that nothing disturbed; comparing what is on the disk with them; counting.

Helpers for single runs come from dev/test/test_trainer.py.
"""
import ctypes
import ctypes.util
import glob
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PROJECT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
BUILD = os.path.join(PROJECT, "build", "faults")
sys.path.insert(0, os.path.dirname(HERE))
_argv, sys.argv = sys.argv, sys.argv[:1]  # the module reads names of tests from the command line
import test_trainer as trainer  # noqa: E402
sys.argv = _argv
shutil.rmtree(trainer.ROOT, ignore_errors=True)

from case_runner import Failure, Skip, check  # noqa: E402,F401
from mpi_jobs import rank_pids  # noqa: E402,F401
from test_trainer import log_lines, own_shard_writer, step_dir, text_shards  # noqa: E402,F401

PROGRAM = os.path.abspath(os.environ.get("FAULTS_PROGRAM", os.path.join(PROJECT, "train_gdn")))
LIBRARY = os.path.join(BUILD, "io_faults.so")
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np"]
# memory is faster than a disk, and what is tested is the order of calls
ROOT = trainer.ROOT = tempfile.mkdtemp(prefix="gdn_faults_", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)

# 8 rows of 16 tokens a step, two layers; several ranks need rows for each of them
TINY = ["--width", "16", "--layers", "2", "--ff", "16", "--heads", "1", "--head-k", "8", "--head-v", "8", "--seq-len", "16",
        "--recall-pairs", "2", "--recall-keys", "16", "--recall-values", "16", "--eval-every", "4", "--eval-batches", "2",
        "--warmup", "3", "--lr", "0.01", "--threads", "1"]
SMALL = TINY + ["--batch", "4", "--total-batch", "128"]
RANKS = TINY + ["--batch", "2", "--total-batch", "192"]  # 12 rows: for 1, 2 and 3 ranks


def environment(fault=None, faults=None, match=None, delay=None, trace=None, **more):
    """fault: GDN_FAULT. The rest: see io_faults.c."""
    env = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", **more)
    env.pop("GDN_FAULT", None)
    for name, value in (("GDN_FAULT", fault), ("IO_FAULTS", faults), ("IO_FAULTS_MATCH", match), ("IO_FAULTS_DELAY", delay),
                        ("IO_FAULTS_TRACE", trace)):
        if value:
            env[name] = value
    return env


def command(args, ranks=1, preload=False, program=None):
    own = ["env", f"LD_PRELOAD={LIBRARY}", f"IO_FAULTS_ROOT={ROOT}"] if preload else []
    return (MPIRUN + [str(ranks)] if ranks > 1 else []) + own + [program or PROGRAM] + args


def start(args, ranks=1, program=None, cwd=None, quiet=False, **env):
    preload = any(env.get(k) for k in ("faults", "delay", "trace"))
    to = subprocess.DEVNULL if quiet else subprocess.PIPE
    return subprocess.Popen(command(args, ranks, preload, program), stdout=to, stderr=subprocess.PIPE, cwd=cwd or ROOT,
                            bufsize=0, env=environment(**env))


def finish(p, want, what="", seconds=60):
    """(exit code, stdout, stderr) of a program that must end by then, with one of the exit codes."""
    try:
        out, err = p.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for pid in rank_pids(p).values():
            send(pid, signal.SIGKILL)
        p.kill()
        p.communicate()
        raise Failure(f"{what}: still there after {seconds} s")
    out, err = (out or b"").decode(errors="replace"), err.decode(errors="replace")
    check(p.returncode in want, f"{what}: exit {p.returncode}, needed {want}\n    ...{out[-300:]}\n    {err[-900:]}")
    return p.returncode, out, err


def run(args, want=(0,), what="", **more):
    return finish(start(args, **more), want, what or " ".join(args[-8:]))


def send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def wait_for(condition, what, seconds=30, p=None):
    """Waits until condition() is true; the program p must live until then."""
    end = time.time() + seconds
    while not condition():
        check(time.time() < end, f"waited {seconds} s for {what}")
        if p and p.poll() is not None:
            raise Failure(f"the program ended with {p.returncode} before {what}: {p.stderr.read()[-500:]}")
        time.sleep(0.001)


def has_ranks():
    """Whether PROGRAM runs as several ranks here."""
    if not shutil.which("mpirun"):
        return False
    p = subprocess.run(["ldd", PROGRAM], stdout=subprocess.PIPE)
    return b"libmpi" in p.stdout


# ----------------------------------------------------------------------------
# what is on the disk


def digest(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def step_folders(out):
    """step -> folder, by name: exactly what a person would see."""
    return {int(os.path.basename(d)[5:]): d for d in glob.glob(os.path.join(out, "step-*"))}


def state(folder):
    return [digest(os.path.join(folder, name)) for name in ("model.safetensors", "trainer_state.safetensors")]


class Reference:
    """A run that nothing disturbed, with the state after every step."""

    def __init__(self, name, args, steps, ranks=1, fault=None, program=None):
        self.out, self.args, self.steps, self.ranks = os.path.join(ROOT, name), args, steps, ranks
        run(args + ["--steps", str(steps), "--save-every", "1", "--keep", "0", "--out", self.out], ranks=ranks, fault=fault,
            program=program)
        self.state = {step: state(folder) for step, folder in step_folders(self.out).items()}
        check(sorted(self.state) == list(range(1, steps + 1)), f"{name}: checkpoints {sorted(self.state)}")
        self.log = log_lines(self.out)

    def check_visible(self, out, what):
        """Every checkpoint that can be seen holds exactly the state of its step. Returns their steps."""
        found = step_folders(out)
        for step, folder in sorted(found.items()):
            try:
                same = state(folder) == self.state[step]
                with open(os.path.join(folder, "manifest.json")) as f:
                    same = same and json.load(f)["step"] == step
            except (OSError, ValueError, KeyError) as e:
                raise Failure(f"{what}: {os.path.basename(folder)} is visible and not whole: {e}")
            check(same, f"{what}: {os.path.basename(folder)} is visible and holds another state")
        return sorted(found)

    def check_end(self, out, what, log=True):
        """The run in `out` has come to its end with the same bits, the same log, and nothing left behind."""
        check(self.steps in self.check_visible(out, what), f"{what}: no checkpoint of the last step")
        if log:
            lines = log_lines(out)
            for a, b in zip(self.log, lines):
                check(a == b, f"{what}: the log differs: {b}, needed {a}")
            check(len(lines) == len(self.log), f"{what}: {len(lines)} lines in the log, needed {len(self.log)}")
        left = [f for f in os.listdir(out) if not re.fullmatch(r"log\.jsonl|run\.lock|step-\d{8}", f)]
        check(not left, f"{what}: left behind: {left}")


def trace_lines(path):
    """[(op, result, [paths])] of IO_FAULTS_TRACE."""
    with open(path) as f:
        return [(w[0], int(w[1]), w[2:]) for w in map(str.split, f)]


def xxh3(data):
    lib = ctypes.CDLL(ctypes.util.find_library("xxhash") or "libxxhash.so.0")
    lib.XXH3_64bits.restype, lib.XXH3_64bits.argtypes = ctypes.c_uint64, [ctypes.c_char_p, ctypes.c_size_t]
    return lib.XXH3_64bits(bytes(data), len(data))


def manifest_edit(folder, change):
    """Rewrites a manifest as the program would: change(json) edits it; hashes of files are taken anew."""
    path = os.path.join(folder, "manifest.json")
    with open(path) as f:
        m = json.load(f)
    del m["manifest_xxh3"]
    change(m)
    for entry in m["files"]:
        with open(os.path.join(folder, entry["name"]), "rb") as f:
            data = f.read()
        entry["size"], entry["xxh3"] = len(data), [f"{xxh3(data):016x}"]  # one block: these files are small
    body = json.dumps(m, indent=2)[:-2]
    with open(path, "w") as f:
        f.write(body + f',\n  "manifest_xxh3": "{xxh3(body.encode()):016x}"\n}}\n')


# ----------------------------------------------------------------------------
# counting


class Counter:
    """Runs named cases, prints failures, and counts."""

    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def case(self, name, test, *args):
        begin = time.time()
        try:
            said = test(*args)
            self.passed += 1
            print(f"ok    {name}{': ' + said if said else ''} ({time.time() - begin:.1f} s)", flush=True)
        except Skip as e:
            self.skipped += 1
            print(f"SKIPPED {name}: {e}", flush=True)
        except (Failure, subprocess.SubprocessError, OSError, ValueError, LookupError, AttributeError, TypeError) as e:
            self.failed += 1
            print(f"FAILED {name}: {type(e).__name__}: {e}", flush=True)

    def end(self):
        if self.failed:
            print(f"the folders are in {ROOT}")
        else:
            shutil.rmtree(ROOT, ignore_errors=True)
        print(f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped")
        return 1 if self.failed else 0
