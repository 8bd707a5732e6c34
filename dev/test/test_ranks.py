#!/usr/bin/env python3
"""Tests of train_gdn as several ranks: the same numbers for every split of a batch, checkpoints that any number of ranks
goes on from, dead, stopped and stuck ranks, refusals.

Runs ./train_gdn, build/train_gdn_f64 and build/train_gdn_alone (without MPI) under mpirun with tiny models in temporary
folders. Python's own library only. Ends with `N passed, N failed, N skipped`; exit status 1 when something failed.
"""
import array
import concurrent.futures
import glob
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

from case_runner import Failure, check, run_cases
from mpi_jobs import rank_pids

F32, F64, ALONE = (os.path.abspath(p) for p in ("./train_gdn", "build/train_gdn_f64", "build/train_gdn_alone"))
ONLY = sys.argv[1:]  # names of tests
ROOT = tempfile.mkdtemp(prefix="test_ranks_")
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np"]
GONE = 10  # seconds after which a job with a dead rank must be gone

# rows of 16 tokens; a mixer of each kind. Its blocks of 8 parameters come out even for no number of ranks used here.
MODEL = ["--pattern", "gdn swa mamba2", "--layers", "3", "--width", "12", "--ff", "24", "--heads", "1", "--head-k", "8",
         "--head-v", "8", "--attn-heads", "2", "--attn-head-dim", "8", "--window", "8", "--mamba-state", "4", "--mamba-head",
         "4", "--seq-len", "16", "--recall-pairs", "3", "--recall-keys", "16", "--recall-values", "16"]
RUN = MODEL + ["--steps", "12", "--warmup", "2", "--lr", "0.002", "--eval-every", "0", "--threads", "1", "--keep", "0"]
LOOP = RUN + ["--steps", "1000000", "--batch", "2", "--total-batch", "192"]  # 12 rows


def environment(fault=None, **more):
    env = dict(os.environ, OMP_NUM_THREADS="1", **more)
    env.pop("GDN_FAULT", None)
    if fault:
        env["GDN_FAULT"] = fault
    return env


def command(ranks, args, program=F32):
    return (MPIRUN + [str(ranks)] if ranks > 1 else []) + [program] + args


def run(ranks, args, want=0, fault=None, program=F32, **more):
    """Runs as this many ranks (1: without mpirun); checks the exit code; returns (stdout, stderr)."""
    code, out, err = finish(start(ranks, args, fault, program, **more), 60)
    check(code == want, f"{ranks} ranks {' '.join(args)}\n    exit {code}, needed {want}\n    {out[-300:]}\n    {err[-900:]}")
    return out, err


def start(ranks, args, fault=None, program=F32, **more):
    return subprocess.Popen(command(ranks, args, program), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, bufsize=0,
                            env=environment(fault, **more))


def read_until(p, text):
    seen, end = b"", time.time() + 20
    while text.encode() not in seen:
        piece = os.read(p.stdout.fileno(), 65536)
        check(piece and time.time() < end, f"{text!r} did not come: {seen[-300:]!r} {p.poll()}")
        seen += piece


def finish(p, seconds=30):
    """Exit code, stdout, stderr of a job that must be gone by then."""
    try:
        out, err = p.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for pid in [*rank_pids(p).values(), p.pid]:
            os.kill(pid, signal.SIGKILL)
        p.communicate()
        raise Failure(f"the job was still there after {seconds} s")
    return p.returncode, out.decode(errors="replace"), err.decode(errors="replace")


def log_lines(out, kind="step"):
    with open(os.path.join(ROOT, out, "log.jsonl")) as f:
        return [e for e in map(json.loads, f) if e["kind"] == kind]


def newest(out):
    """Step of the newest checkpoint that holds, by the program's own verification of every hash."""
    text, _ = run(1, ["inspect", os.path.join(ROOT, out)])
    m = re.search(r"newest that holds: \S*step-(\d+)", text)
    check(m, f"no checkpoint holds: {text}")
    return int(m.group(1))


def doubles(path):
    a = array.array("d")
    with open(path, "rb") as f:
        a.frombytes(f.read())
    return a


def tensors(out, step):
    """All tensors of a checkpoint, name -> floats."""
    found = {}
    for name in ("model.safetensors", "trainer_state.safetensors"):
        with open(os.path.join(ROOT, out, f"step-{step:08d}", name), "rb") as f:
            data = f.read()
        n, = struct.unpack("<Q", data[:8])
        for key, t in json.loads(data[8:8 + n]).items():
            if key != "__metadata__":
                begin, end = t["data_offsets"]
                found[key] = array.array("f", data[8 + n + begin:8 + n + end])
    return found


def distance(a, b):
    """Largest difference of a weight, relative to it; to 0.01, half of what linear weights begin at, where it is smaller."""
    check(len(a) == len(b) and all(map(math.isfinite, a)) and all(map(math.isfinite, b)), "sizes differ, or a NaN")
    return max(abs(x - y) / max(abs(y), 0.01) for x, y in zip(a, b))


def same_steps(a, b, limit, what):
    x, y = log_lines(a), log_lines(b)
    check(len(x) == len(y) and x, f"{what}: {len(x)} and {len(y)} steps")
    for p, q in zip(x, y):
        for key in ("step", "samples", "tokens", "batch_hash", "lr", "skipped"):
            check(p[key] == q[key], f"{what}: step {p['step']}: {key} {p[key]} and {q[key]}")
        for key in ("loss", "grad_norm"):
            check(math.isclose(p[key], q[key], rel_tol=limit),
                  f"{what}: step {p['step']}: {key} {p[key]} and {q[key]}: {abs(p[key] / q[key] - 1):.2g}")


# ----------------------------------------------------------------------------
# one batch, split in every way


def split(program, limit, name, rows, splits, args):
    """Five steps as (ranks, rows of a micro-batch, micro-batches); the first split is what the others are held against."""
    first = None
    for ranks, batch, count in splits:
        check(ranks * batch * count == rows, f"{ranks} x {batch} x {count} rows")
        out = f"{name}-{ranks}-{batch}-{count}"
        # AdamW moves a weight by lr whatever the size of its gradient, be it all rounding; a large eps keeps those still
        eps = "1e-5" if program == F64 else "0.01"
        run(ranks, RUN + args + ["--adam-eps", eps, "--steps", "5", "--batch", str(batch), "--total-batch", str(16 * rows),
                                 "--out", out], fault="dump@5", program=program)
        weights = [doubles(os.path.join(ROOT, out, f"weights-{r}.f64")) for r in range(ranks)]
        check(all(w == weights[0] for w in weights), f"{out}: the ranks hold different weights")
        if not first:
            first = (out, weights[0])
            check(log_lines(out)[0]["grad_norm"] > 0.5, "nothing is clipped")
            blocks = len(weights[0]) // 8
            check(all(blocks % n for n, _, _ in splits if n > 1), f"{blocks} blocks can be dealt out evenly")
            continue
        same_steps(first[0], out, limit, out)
        d = distance(weights[0], first[1])
        check(d <= limit, f"{out}: weights differ by {d:.2g}, at most {limit:g}")
        if os.environ.get("VERBOSE"):
            x, y = log_lines(first[0]), log_lines(out)
            print(out, "weights", d, *(max(abs(p[k] / q[k] - 1) for p, q in zip(x, y)) for k in ("loss", "grad_norm")))


EIGHT = [(1, 8, 1), (1, 1, 8), (2, 4, 1), (2, 1, 4), (4, 2, 1)]


def test_split_double():
    split(F64, 1e-12, "d-clip-untied", 8, EIGHT, ["--clip", "0.5", "--tied", "off"])
    split(F64, 1e-12, "d-noclip-tied", 8, EIGHT, ["--clip", "0", "--tied", "on"])
    split(F64, 1e-12, "d-clip-tied", 8, [(1, 8, 1), (4, 1, 2)], ["--clip", "0.5", "--tied", "on"])
    split(F64, 1e-12, "d-noclip-untied", 8, [(1, 8, 1), (2, 2, 2)], ["--clip", "0", "--tied", "off"])


def test_split_double_three_ranks():
    split(F64, 1e-12, "d-nine", 9, [(1, 9, 1), (3, 3, 1), (3, 1, 3)], ["--clip", "0.5"])
    split(F64, 1e-12, "d-twelve", 12, [(1, 12, 1), (3, 2, 2)], ["--clip", "0"])


def test_split_float():
    split(F32, 1e-5, "f-clip", 8, EIGHT, ["--clip", "0.5"])
    split(F32, 1e-5, "f-noclip", 8, [(1, 8, 1), (4, 2, 1)], ["--clip", "0", "--tied", "on"])


def test_split_large():
    # shards of more than one piece (comm.h: COMM_PIECE), the last of them short
    split(F64, 1e-12, "large", 6, [(1, 6, 1), (3, 1, 2)], ["--pattern", "gdn", "--layers", "1", "--width", "52", "--vocab",
                                                           "8192", "--tied", "off", "--seq-len", "16"])


# ----------------------------------------------------------------------------
# the same run on any number of ranks


def text_shards(name, counts):
    """Shards of llm.c's format with ids below 257."""
    os.makedirs(os.path.join(ROOT, name))
    x = 1
    for i, count in enumerate(counts):
        ids = []
        for _ in range(count):
            x = (x * 1103515245 + 12345) % 2**31
            ids.append((x >> 16) % 20 + 97)
        with open(os.path.join(ROOT, name, f"x_{i:06d}.bin"), "wb") as f:
            f.write(struct.pack("<3i", 20240520, 1, count).ljust(1024, b"\0") + struct.pack(f"<{count}H", *ids))
    return os.path.join(ROOT, name, "*.bin")


def model_bytes(out, step, name="model.safetensors"):
    with open(os.path.join(ROOT, out, f"step-{step:08d}", name), "rb") as f:
        return f.read()


def test_initial_weights():
    still = ["--lr", "0", "--min-lr", "0", "--warmup", "0", "--weight-decay", "0", "--steps", "1", "--batch", "2",
             "--total-batch", "192"]
    for ranks in (1, 2, 3):
        run(ranks, RUN + still + ["--out", f"init-{ranks}"])
    for ranks in (2, 3):
        check(model_bytes("init-1", 1) == model_bytes(f"init-{ranks}", 1), f"other first weights with {ranks} ranks")
    check(log_lines("init-1")[0]["loss"] > 4, "the first loss is not that of random weights")


def test_same_command_same_bits():
    for out in ("bits-a", "bits-b"):
        run(3, RUN + ["--batch", "2", "--total-batch", "192", "--out", out])
    for name in ("model.safetensors", "trainer_state.safetensors"):
        check(model_bytes("bits-a", 12, name) == model_bytes("bits-b", 12, name), f"{name} differs")


def test_resume_on_other_ranks():
    # 8 rows of 46 samples a step: an epoch ends in step 6; 7 rows of validation, split unevenly
    train, val = text_shards("data", [250, 300, 200]), text_shards("data-val", [113])
    args = RUN + ["--train", train, "--val", val, "--vocab", "257", "--batch", "1", "--total-batch", "128", "--eval-every", "2",
                  "--eval-batches", "0", "--save-every", "5", "--tokenizer", "bytes"]
    cuts = (4, 7, 10)
    for out, ranks in (("alone", (1, 1, 1, 1)), ("moved", (1, 2, 4, 1))):
        for i, n in enumerate(ranks):
            stop = f"stop@{cuts[i]}" if i < len(cuts) else None
            run(n, args + ["--out", out, "--resume", "auto"], want=75 if stop else 0, fault=stop, program=F64)
    same_steps("alone", "moved", 1e-12, "1, 2, 4, 1 ranks")
    for p, q in zip(log_lines("alone", "eval"), log_lines("moved", "eval")):
        check(p["step"] == q["step"] and p["tokens"] == q["tokens"] == 112 and math.isclose(p["loss"], q["loss"], rel_tol=1e-12),
              f"validation {p} and {q}")
    a, b = tensors("alone", 12), tensors("moved", 12)
    check(a.keys() == b.keys() and len(a) > 60, f"{len(a)} and {len(b)} tensors")
    for name in a:  # fp32 roundings of doubles that agree to 1e-12
        most = max(map(abs, a[name]))
        worst = max(abs(x - y) for x, y in zip(a[name], b[name]))
        check(worst <= 2.4e-7 * most, f"{name}: differs by {worst:.2g} of {most:.2g}")
    run(1, args + ["--out", "whole"], program=F64)  # and in one go: the same samples in the same order
    check([e["batch_hash"] for e in log_lines("whole")] == [e["batch_hash"] for e in log_lines("moved")], "other samples")
    check(len(set(e["batch_hash"] for e in log_lines("whole"))) == 12, "steps with equal samples")


def test_nan_on_one_rank():
    args = RUN + ["--batch", "2", "--total-batch", "192", "--save-every", "1", "--out"]
    run(3, args + ["nan"], fault="nan@5:1")
    steps = log_lines("nan")
    check([e["step"] for e in steps if e["skipped"]] == [5] and len(steps) == 12, f"skipped: {steps}")
    for name in ("model.safetensors", "trainer_state.safetensors"):
        check(model_bytes("nan", 4, name) == model_bytes("nan", 5, name) != model_bytes("nan", 6, name),
              f"{name}: the skipped step changed something, or the next one nothing")


# ----------------------------------------------------------------------------
# ranks that die, stop, hang


def whole_and_resumable(out, ranks, args, least):
    step = newest(out)
    check(step >= least, f"{out}: the newest checkpoint is of step {step}, needed {least}")
    end = ["--steps", str(step + 3), "--eval-every", "0"]
    run(ranks, args + end + ["--out", out, "--resume", "auto"])
    check(newest(out) == step + 3, f"{out}: not resumed to the end")
    steps = [e["step"] for e in log_lines(out)]
    check(steps == list(range(1, step + 4)), f"{out}: steps in the log {steps}")
    left = [f for f in os.listdir(os.path.join(ROOT, out)) if f.startswith(".tmp")]
    check(not left, f"{out}: left behind {left}")


def test_killed_rank():
    saves = LOOP + ["--save-every", "1", "--keep", "2", "--schedule", "constant"]
    args = saves + ["--eval-every", "1", "--eval-batches", "3", "--sample-every", "1", "--prompt", "1 2", "--num-tokens", "4"]
    phases = ("data", "gradient", "reduce", "update", "gather", "save", "eval", "sample")
    cases = [(phase, rank) for phase in phases for rank in range(3)]  # some 3 s each on two cores, 4 at a time

    def case(phase_and_rank):
        phase, rank = phase_and_rank
        out, begin = f"kill-{phase}-{rank}", time.time()
        # a death between two phases of a step costs at most what was not saved yet: the save before the last
        p = start(3, args + ["--out", out], fault=f"kill-{phase}@6:{rank}")
        code, _, err = finish(p, GONE)
        check(code not in (0, 75, 76) and time.time() - begin < GONE, f"{out}: exit {code}: {err[-300:]}")
        step = newest(out)
        check(4 <= step <= 6, f"{out}: the newest checkpoint is of step {step}")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # mpirun waits some seconds before it kills the others
        list(pool.map(case, cases))
    whole_and_resumable("kill-save-2", 2, saves, 4)
    out = "kill-any"  # from outside, wherever it is
    p = start(3, saves + ["--out", out])
    read_until(p, "step 20/")
    begin = time.time()
    os.kill(rank_pids(p)[1], signal.SIGKILL)
    code, _, _ = finish(p, GONE)
    check(code not in (0, 75, 76), f"exit {code} after {time.time() - begin:.1f} s")
    whole_and_resumable(out, 1, saves, 17)


def test_stopped_rank_is_named():
    out = "sigstop"
    # mpirun wakes the stopped rank and ends it some 2 s after another one left: a deadline near that would let it report too
    p = start(3, LOOP + ["--hang-timeout", "5s", "--save-every", "10", "--schedule", "constant", "--out", out])
    read_until(p, "step 30/")
    os.kill(rank_pids(p)[1], signal.SIGSTOP)
    begin = time.time()
    code, _, err = finish(p, 5 + GONE)
    check(code == 76 and time.time() - begin > 4.5, f"exit {code} after {time.time() - begin:.1f} s: {err[-500:]}")
    reports = [open(f).read() for f in glob.glob(os.path.join(ROOT, out, "hang-rank-[02].txt"))]
    check(reports and not os.path.exists(os.path.join(ROOT, out, "hang-rank-1.txt")), f"reports {os.listdir(os.path.join(ROOT, out))}")
    for text in reports + re.findall(r"^.*no progress.*$", err, re.M):
        check(re.search(r"rank [02] of 3: no progress for \d+ s in phase \w+ of step \d+", text), text)
    check(any(re.search(r"waiting for rank 1\b", text) for text in reports), f"rank 1 is not named: {reports}")
    check("no progress" in err, err)
    check(newest(out) >= 20, "no checkpoint")


def test_hang():
    # one process, no ranks; then a rank that leaves the others waiting
    _, err = run(1, LOOP + ["--hang-timeout", "1s", "--out", "hang-alone"], want=76, fault="hang-data@4")
    check("rank 0 of 1" in err and "phase data of step 4" in err and "--hang-timeout" in err, err)
    check(open(os.path.join(ROOT, "hang-alone", "hang-rank-0.txt")).read() in err, "the report is not in the file")
    _, err = run(2, LOOP + ["--hang-timeout", "1s", "--out", "hang-two"], want=76, fault="hang-update@4:1")
    check("phase update of step 4" in err or "waiting for rank 1" in err, err)
    # slow is not stuck: an evaluation much longer than the deadline, whose micro-batches are not
    count, ms = 5000, 0
    while ms < 1000:
        count *= 3
        run(1, MODEL + ["--steps", "1", "--warmup", "0", "--batch", "1", "--total-batch", "16", "--eval-batches", str(count),
                        "--hang-timeout", "0.8s", "--threads", "1", "--out", f"not-hung-{count}"])
        ms = log_lines(f"not-hung-{count}", "eval")[-1]["ms"]


def test_stop_request_to_one_rank():
    args = LOOP + ["--schedule", "constant"]
    for name, number, rank in (("usr1", signal.SIGUSR1, 1), ("term", signal.SIGTERM, 2), ("mpirun", signal.SIGUSR1, None)):
        out = "stop-" + name
        p = start(3, args + ["--out", out, "--eval-every", "3", "--eval-batches", "3"])
        read_until(p, "step 8/")
        os.kill(p.pid if rank is None else rank_pids(p)[rank], number)
        code, text, err = finish(p)
        check(code == 75, f"{name}: exit {code}: {err[-500:]}")
        check(f"to rank {rank} at step" in text or rank is None, f"{name}: who was asked is not said: {text[-300:]}")
        step = int(re.search(r"at step (\d+)", text).group(1))
        check(newest(out) == step, f"{name}: no checkpoint of step {step}")
        check(": error: " not in err, err)
    whole_and_resumable("stop-usr1", 2, args, 7)
    run(2, args + ["--out", "stop-first"], want=75, fault="stop@1:1")  # before the first update
    check(newest("stop-first") == 0, "no checkpoint of step 0")
    p = start(2, args + ["--out", "stop-file"])
    read_until(p, "step 5/")
    open(os.path.join(ROOT, "stop-file", "STOP"), "w").close()
    code, text, err = finish(p)
    check(code == 75 and "the file STOP" in text and not os.path.exists(os.path.join(ROOT, "stop-file", "STOP")), text + err)


# ----------------------------------------------------------------------------
# errors


def one_error(err, *words):
    lines = [line for line in err.splitlines() if ": error: " in line]
    check(len(lines) == 1, f"needed one error line, found {lines}")
    for word in words:
        check(word in lines[0], f"{word!r} is not in {lines[0]!r}")


def test_error_on_one_rank():
    train = text_shards("late-data", [2000, 2000])
    args = LOOP + ["--train", train, "--vocab", "257"]
    p = start(3, args + ["--out", "late"])
    read_until(p, "step 3/")
    os.truncate(sorted(glob.glob(train))[1], 4900)
    code, _, err = finish(p)
    check(code == 4, f"exit {code}: {err[-500:]}")
    one_error(err, "x_000001.bin")
    check(newest("late") == log_lines("late")[-1]["step"], "the steps before the damage were not saved")
    _, err = run(3, args + ["--out", "never", "--train", "/nowhere/*.bin"], want=4)
    one_error(err, "/nowhere/*.bin")
    check(not os.path.exists(os.path.join(ROOT, "never")), "left behind")
    _, err = run(2, args + ["--out", "late"], want=5)  # needs --resume
    one_error(err, "--resume")


def test_failing_saves():
    args = LOOP + ["--steps", "12", "--save-every", "3", "--out"]
    _, err = run(3, args + ["full"], fault="full@3:1,full@6:2")
    check(err.count("warning") == 2 and "(rank 1)" in err and "(rank 2)" in err and "No space left" in err, err)
    found = sorted(f for f in os.listdir(os.path.join(ROOT, "full")) if "step-" in f)
    check(found == ["step-00000009", "step-00000012"] and newest("full") == 12, f"found {found}")
    _, err = run(2, args + ["full-three"], want=5, fault="full@3:1,full@6:1,full@9:1,full@12:1")
    one_error(err, "3 saves in a row failed", "(rank 1)", "No space left")
    check(glob.glob(os.path.join(ROOT, "full-three", "*step-*")) == [], "left behind")
    # the last save cannot even begin: the run has not ended well, and was not stopped with all saved
    for fault, what in (("full-folder@3", "full-folder"), ("full-folder@2,stop@3", "full-stop")):
        p = start(2, LOOP + ["--steps", "3", "--save-every", "0", "--out", what], fault)
        code, out, err = finish(p)
        check(code == 5 and glob.glob(os.path.join(ROOT, what, "*step-*")) == [], f"{what}: exit {code}\n{out[-300:]}\n{err[-600:]}")


def test_refusals():
    _, err = run(3, RUN + ["--batch", "2", "--total-batch", "128", "--out", "odd"], want=2)
    one_error(err, "--total-batch 128", "2 x 16 x 3 = 96", "96 or 192")
    run(2, RUN + ["--total-batch", "256", "--steps", "2", "--out", "fit"])  # the preset's micro-batch is made to fit
    _, err = run(2, ["selftest"] + RUN, want=2)
    one_error(err, "selftest", "2 ranks")
    p = start(2, LOOP + ["--out", "locked"])
    read_until(p, "step 2/")
    _, err = run(2, LOOP + ["--out", "locked", "--resume"], want=5)
    one_error(err, "in use by another job")
    p.send_signal(signal.SIGUSR1)
    check(finish(p)[0] == 75, "the job that had the lock did not end")


def test_singletons():
    args = RUN + ["--batch", "1", "--warmup", "0", "--steps", "1", "--total-batch", "32", "--out"]
    for name, env in (("mpirun", {"OMPI_COMM_WORLD_SIZE": "4"}), ("PMI_SIZE", {"PMI_SIZE": "4", "PMI_RANK": "1"}),
                      ("srun", {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"})):
        for program in (F32, ALONE):
            _, err = run(1, args + ["single"], want=3, program=program, **env)
            one_error(err, name, "started 4", " 1 alone")
    _, err = run(2, args + ["single"], want=3, program=ALONE)
    check(re.search(r"started 2 processes, each of them is 1 alone: .*without MPI", err), err)
    check(not os.path.exists(os.path.join(ROOT, "single")), "a refused process left something behind")
    run(1, args + ["batch-script"], SLURM_NTASKS="4", SLURM_PROCID="0")  # a batch script is not a rank
    run(1, args + ["one-of-one"], OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0")
    run(1, args + ["no-mpi"], program=ALONE)
    check(model_bytes("no-mpi", 1) == model_bytes("batch-script", 1), "the build without MPI trains something else")


def main():
    for program in (F32, F64, ALONE):
        if not os.access(program, os.X_OK):
            print(f"{program}: no such program; run make test_programs first")
            print("0 passed, 1 failed, 0 skipped")
            return 1
    tests = sorted((n, t) for n, t in globals().items() if n.startswith("test_") and (not ONLY or n in ONLY))
    if not shutil.which("mpirun") or b"MPI_Init" not in open(F32, "rb").read():
        print(f"SKIPPED {len(tests)} tests: no mpirun here, or ./train_gdn was built without MPI (scripts/setup.sh test)")
        print(f"0 passed, 0 failed, {len(tests)} skipped")
        return 0
    return run_cases(globals(), ONLY, ROOT)


if __name__ == "__main__":
    sys.exit(main())
