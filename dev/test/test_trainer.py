#!/usr/bin/env python3
"""End-to-end tests of the program: resume, stop requests, checkpoints, logs, evaluation, sampling, bad input.

Runs ./train_gdn (or the program named by the first argument) with tiny models in temporary folders. Python's own
library only. Ends with `N passed, N failed, N skipped`; the exit status is 1 when something failed.
"""
import array
import ctypes
import ctypes.util
import glob
import json
import math
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time

from case_runner import Skip, check, run_cases

PROGRAM = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "./train_gdn")
ONLY = sys.argv[2:]  # names of tests
ROOT = tempfile.mkdtemp(prefix="test_trainer_")
TIME_FIELDS = {"time", "ms", "tokens_per_s", "eta_s", "mfu", "run"}

# 8 rows of 16 tokens a step, in two micro-batches
SMALL = ["--width", "16", "--layers", "2", "--ff", "16", "--heads", "1", "--head-k", "8", "--head-v", "8", "--batch", "4",
         "--seq-len", "16", "--total-batch", "128", "--recall-pairs", "2", "--recall-keys", "16", "--recall-values", "16",
         "--eval-every", "4", "--eval-batches", "2", "--steps", "12", "--warmup", "3", "--lr", "0.01", "--threads", "1",
         "--keep", "0"]


def environment(fault=None):
    env = dict(os.environ)
    env.pop("GDN_FAULT", None)
    if fault:
        env["GDN_FAULT"] = fault
    return env


def run(args, want=0, fault=None, cwd=None, raw=False):
    """Runs the program; checks the exit code; returns (stdout, stderr)."""
    p = subprocess.run([PROGRAM] + args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd or ROOT, timeout=60,
                       env=environment(fault))
    out, err = p.stdout.decode(errors="replace"), p.stderr.decode(errors="replace")
    check(p.returncode == want, f"{' '.join(args)}\n    exit {p.returncode}, needed {want}\n    stdout ...{out[-300:]}\n"
                                f"    stderr {err[-600:]}")
    if want not in (0, 75) and want > 0:
        errors = [line for line in err.splitlines() if ": error: " in line]
        check(len(errors) == 1 and err.rstrip().splitlines()[-1] == errors[0],
              f"{' '.join(args)}: needed one error line at the end, found {err!r}")
    return out, err


def folder(name):
    path = os.path.join(ROOT, name)
    os.makedirs(path, exist_ok=True)
    return path


def step_dir(out, step):
    return os.path.join(out, f"step-{step:08d}")


def weights(out, step):
    """Everything that the state consists of, as bytes."""
    parts = []
    for name in ("model.safetensors", "trainer_state.safetensors"):
        with open(os.path.join(step_dir(out, step), name), "rb") as f:
            parts.append(f.read())
    return parts


def log_lines(out, kinds=("step", "eval")):
    lines = []
    with open(os.path.join(out, "log.jsonl")) as f:
        for line in f:
            entry = json.loads(line)
            if entry["kind"] in kinds:
                lines.append({k: v for k, v in entry.items() if k not in TIME_FIELDS})
    return lines


def write_shard(path, tokens):
    """A shard in llm.c's format."""
    with open(path, "wb") as f:
        f.write(struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0"))
        f.write(struct.pack(f"<{len(tokens)}H", *tokens))


def own_shard_writer():
    """A writer of the project's own shards; None when libxxhash cannot be called."""
    try:
        lib = ctypes.CDLL(ctypes.util.find_library("xxhash") or "libxxhash.so.0")
    except OSError:
        return None
    lib.XXH3_64bits.restype = ctypes.c_uint64
    lib.XXH3_64bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]

    def xxh3(data):
        return struct.pack("<Q", lib.XXH3_64bits(bytes(data), len(data)))

    def write(path, tokens):  # gdn/shard.h says where everything lies; the byte tokenizer, BOS 256 first
        block, body = 4096, struct.pack(f"<{len(tokens) + 1}H", 256, *tokens)
        table = bytes(-len(body) % 8) + b"".join(xxh3(body[i:i + block]) for i in range(0, len(body), block))
        documents = struct.pack("<q", 0)
        head = b"GDNSHARD" + struct.pack("<IIQIIiiIIQQ", 1, 256, len(tokens) + 1, 2, 257, 256, -1, 1, block, 1, len(tokens))
        head = (head + bytes(32) + xxh3(table) + xxh3(documents)).ljust(248, b"\0")
        with open(path, "wb") as f:
            f.write(head + xxh3(head) + body + table + documents)

    return write


def text_shards(name, counts, seed=1, write_shard=write_shard):
    """Shards of printable bytes with some structure."""
    out, r = folder(name), random.Random(seed)
    words = [bytes(r.choice(b"abcdefgh") for _ in range(r.randint(1, 6))) for _ in range(20)]
    for i, count in enumerate(counts):
        text = b""
        while len(text) < count:
            text += r.choice(words) + b" "
        write_shard(os.path.join(out, f"x_{i:06d}.bin"), text[:count])
    return os.path.join(out, "*.bin")


def same_run(a, b, step, what):
    check(weights(a, step) == weights(b, step), f"{what}: weights or moments at step {step} differ")
    x, y = log_lines(a), log_lines(b)
    for p, q in zip(x, y):
        check(p == q, f"{what}: log lines differ: {p} and {q}")
    check(len(x) == len(y), f"{what}: {len(x)} and {len(y)} log lines")


# ----------------------------------------------------------------------------
# resume


def resume_case(name, args, stops, faults="", steps=12):
    """One run in one go against the same run cut at the given steps."""
    whole, cut = os.path.join(ROOT, name + "-whole"), os.path.join(ROOT, name + "-cut")
    run(args + ["--out", whole], fault=faults or None)
    for i, stop in enumerate(stops):
        run(args + ["--out", cut] + (["--resume"] if i else []), want=75, fault=",".join(filter(None, [faults, f"stop@{stop}"])))
        check(os.path.isdir(step_dir(cut, stop - 1)), f"no checkpoint of step {stop - 1}")
    run(args + ["--out", cut, "--resume", "auto"], fault=faults or None)
    same_run(whole, cut, steps, name)


def test_resume_two_and_three_pieces():
    resume_case("resume2", SMALL, [7])
    resume_case("resume3", SMALL, [5, 9])  # one of them where an evaluation is due
    resume_case("resume-first", SMALL, [1, 2])  # in the first step; inside the warm-up


def test_resume_across_shards_and_epochs():
    # 3 shards of 250, 300 and 200 tokens: 46 samples, 8 a step: an epoch ends inside step 6; shards end inside rows
    train, val = text_shards("data", [250, 300, 200]), text_shards("data-val", [200], seed=2)
    args = SMALL + ["--train", train, "--val", val, "--vocab", "257", "--tokenizer", "bytes"]
    resume_case("epochs", args, [6, 7])
    resume_case("epochs-late", args, [12])


def test_resume_after_skipped_step():
    args = SMALL + ["--save-every", "3"]
    resume_case("skip", args, [5], faults="nan@4")
    steps = log_lines(os.path.join(ROOT, "skip-whole"), ("step",))
    check(steps[3]["skipped"] and not steps[4]["skipped"], "step 4 is not marked as skipped")
    events = [e for e in log_lines(os.path.join(ROOT, "skip-whole"), ("skip",))]
    check(len(events) == 1 and "24 to 31" in json.dumps(events[0]), f"no event with the sample positions: {events}")
    resume_case("skip-twice", SMALL, [6], faults="nan@5,nan@6,nan@9")  # the count in a row survives


def test_skipped_step_changes_nothing():
    out = os.path.join(ROOT, "skip-still")
    run(SMALL + ["--out", out, "--save-every", "1"], fault="nan@5")
    check(weights(out, 4) == weights(out, 5), "a skipped step changed weights or moments")
    check(weights(out, 5) != weights(out, 6), "the step after did not change the weights")
    # AdamW's own count of steps stands still too: its first update moves every weight by lr, whatever the gradient
    out = os.path.join(ROOT, "skip-first")
    run(SMALL + ["--out", out, "--save-every", "1", "--steps", "3", "--schedule", "constant", "--warmup", "0",
                 "--weight-decay", "0", "--lr", "0.001"], fault="nan@1,nan@2")
    before, after = (array.array("f", data[8 + struct.unpack("<Q", data[:8])[0]:])
                     for data in (weights(out, 2)[0], weights(out, 3)[0]))
    largest = max(abs(a - b) for a, b in zip(after, before))
    check(0.00099 < largest < 0.00101, f"the first update after skipped steps moved a weight by {largest}, needed 0.001")


def test_divergence_ends_the_run():
    out = os.path.join(ROOT, "diverge")
    _, err = run(SMALL + ["--out", out, "--max-skips", "3", "--save-every", "2"], want=78, fault="nan@3,nan@4,nan@5")
    check("3 steps in a row" in err, err)
    run(SMALL + ["--out", os.path.join(ROOT, "no-diverge"), "--max-skips", "3"], fault="nan@3,nan@4,nan@6,nan@7")
    # over a resume: two before the stop, the third after it
    out = os.path.join(ROOT, "diverge-resume")
    run(SMALL + ["--out", out, "--max-skips", "3"], want=75, fault="nan@3,nan@4,stop@5")
    run(SMALL + ["--out", out, "--max-skips", "3", "--resume"], want=78, fault="nan@5")


def test_log_has_no_gaps_after_kill():
    whole, out = os.path.join(ROOT, "kill-whole"), os.path.join(ROOT, "kill")
    args = SMALL + ["--save-every", "3", "--steps", "14"]
    run(args + ["--out", whole])
    run(args + ["--out", out], want=-9, fault="kill@8")
    run(args + ["--out", out, "--resume"], want=-9, fault="kill@11")
    run(args + ["--out", out, "--resume"])
    same_run(whole, out, 14, "kill -9")
    steps = [e["step"] for e in log_lines(out, ("step",))]
    check(steps == list(range(1, 15)), f"steps in the log: {steps}")
    out = os.path.join(ROOT, "kill-early")  # before the first checkpoint
    run(args + ["--out", out], want=-9, fault="kill@2")
    run(args + ["--out", out], want=5)
    text, _ = run(args + ["--out", out, "--resume"])
    check("no checkpoint" in text, "nothing was said about the missing checkpoint")
    same_run(whole, out, 14, "kill -9 before the first checkpoint")


def test_random_kills():
    # kill -9 at random moments of a run that saves at every step: most of them hit a save
    whole, out, r = os.path.join(ROOT, "kills-whole"), os.path.join(ROOT, "kills"), random.Random(5)
    args = SMALL + ["--save-every", "1", "--keep", "2", "--steps", "120"]
    begin = time.monotonic()
    run(args + ["--out", whole])
    tenth = (time.monotonic() - begin) / 10  # of what this machine takes now: about ten kills before the end
    kills = 0
    while kills < 15:
        p = start(args + ["--out", out, "--resume"])
        time.sleep(r.uniform(0.01, 0.02 + tenth))
        p.kill()
        p.communicate()
        if p.returncode == 0:
            break
        check(p.returncode == -9, f"exit {p.returncode}")
        kills += 1
    run(args + ["--out", out, "--resume"])
    check(kills >= 3, f"only {kills} kills hit the run")
    same_run(whole, out, 120, f"{kills} kills")
    left = [f for f in os.listdir(out) if not re.fullmatch(r"log\.jsonl|run\.lock|step-\d{8}", f)]
    check(not left, f"left behind: {left}")


def test_resume_from_named_checkpoint():
    whole, out = os.path.join(ROOT, "named-whole"), os.path.join(ROOT, "named")
    args = SMALL + ["--save-every", "4"]
    run(args + ["--out", whole])
    run(args + ["--resume", step_dir(whole, 8), "--out", out])
    check(weights(out, 12) == weights(whole, 12), "weights differ")
    _, err = run(args + ["--resume", step_dir(whole, 4)], want=5)
    check("newer checkpoint" in err, err)
    run(args + ["--resume", whole, "--steps", "14"])  # the run's folder, more steps
    check(os.path.isdir(step_dir(whole, 14)), "no checkpoint of step 14")


def test_damaged_checkpoint_falls_back():
    out, whole = os.path.join(ROOT, "damage"), os.path.join(ROOT, "damage-whole")
    args = SMALL + ["--save-every", "4"]
    run(args + ["--out", whole])
    run(args + ["--out", out], want=75, fault="stop@10")
    path = os.path.join(step_dir(out, 9), "model.safetensors")
    data = bytearray(open(path, "rb").read())
    data[len(data) // 2] ^= 1
    open(path, "wb").write(data)
    text, err = run(args + ["--out", out, "--resume"])
    check("step-00000009" in err and "step-00000008" in text, f"{text}{err}")
    check(weights(out, 12) == weights(whole, 12), "weights differ after the fall-back")
    for step in (4, 8, 9, 12):  # none holds
        p = os.path.join(step_dir(out, step), "trainer_state.safetensors")
        if os.path.exists(p):
            os.truncate(p, os.path.getsize(p) - 1)
    run(args + ["--out", out, "--resume"], want=5)


def test_resume_refuses_another_run():
    out = os.path.join(ROOT, "refuse")
    run(SMALL + ["--out", out], want=75, fault="stop@4")
    for change, words in ((["--width", "24"], ["width", "16", "24"]), (["--layers", "3"], ["layers", "2", "3"]),
                          (["--seq-len", "32"], ["--seq-len", "16", "32"]),
                          (["--total-batch", "64"], ["--total-batch", "128", "64"]), (["--seed", "7"], ["--seed", "1234", "7"]),
                          (["--recall-pairs", "3"], ["pairs=2", "pairs=3"])):
        _, err = run(SMALL + ["--out", out, "--resume"] + change, want=5)
        for word in words:
            check(word in err, f"{change}: {word!r} is not in {err!r}")
    train = text_shards("refuse-data", [400])
    _, err = run(SMALL + ["--out", out, "--resume", "--train", train], want=5)
    check("recall" in err and "shards:" in err, err)
    _, err = run(SMALL + ["--out", out, "--resume", "--batch", "8"])  # allowed, and said
    check("--batch" in err, err)


# ----------------------------------------------------------------------------
# stop requests, locks, folders


def start(args, fault=None):
    # signals as in a terminal, also where these tests were started with them ignored (nohup, a background job)
    return subprocess.Popen([PROGRAM] + args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, bufsize=0,
                            env=environment(fault),
                            preexec_fn=lambda: [signal.signal(s, signal.SIG_DFL) for s in (signal.SIGHUP, signal.SIGINT)])


def read_until(p, text):
    seen, end = b"", time.time() + 20
    while text.encode() not in seen:
        piece = os.read(p.stdout.fileno(), 65536)
        check(piece and time.time() < end, f"{text!r} did not come: {seen[-300:]!r} {p.poll()}")
        seen += piece
    return seen.decode(errors="replace")


def finish(p, want):
    out, err = p.communicate(timeout=30)
    check(p.returncode == want, f"exit {p.returncode}, needed {want}: {out[-300:]!r} {err[-500:]!r}")
    return out.decode(errors="replace"), err.decode(errors="replace")


def check_resumable(args, out, text):
    step = int(re.search(r"at step (\d+)", text).group(1))
    check(os.path.isdir(step_dir(out, step)), f"no checkpoint of step {step}")
    run(args + ["--out", out, "--resume"], want=75, fault=f"stop@{step + 3}")
    steps = [e["step"] for e in log_lines(out, ("step",))]
    check(steps == list(range(1, step + 3)), "the log has gaps")


def test_signals_stop_and_resume():
    args = SMALL + ["--steps", "1000000", "--eval-every", "2"]
    for name, number in (("USR1", signal.SIGUSR1), ("TERM", signal.SIGTERM), ("INT", signal.SIGINT), ("HUP", signal.SIGHUP)):
        out = os.path.join(ROOT, "signal-" + name)
        p = start(args + ["--out", out])
        read_until(p, "step 3/")
        p.send_signal(number)
        text, _ = finish(p, 75)
        check("SIG" + name in text, text[-300:])
        check_resumable(args, out, text)


def test_second_interrupt_ends_at_once():
    # a step so large that its rows alone take seconds to make: the first signal has to wait for them
    out = os.path.join(ROOT, "interrupt")
    p = start(SMALL + ["--out", out, "--steps", "1000000", "--total-batch", "64M"])
    time.sleep(0.5)
    p.send_signal(signal.SIGINT)
    time.sleep(0.02)
    p.send_signal(signal.SIGINT)
    begin = time.time()
    p.communicate(timeout=20)
    check(p.returncode == -signal.SIGINT and time.time() - begin < 2, f"exit {p.returncode}")


def test_stop_in_evaluation():
    out = os.path.join(ROOT, "stop-eval")
    args = SMALL + ["--steps", "1000000", "--eval-every", "2", "--eval-batches", "1000000"]
    p = start(args + ["--out", out])
    read_until(p, "step 2/")
    time.sleep(0.3)
    p.send_signal(signal.SIGUSR1)
    text, _ = finish(p, 75)
    check("at step 2 " in text, text[-300:])
    check(os.path.isdir(step_dir(out, 2)), "no checkpoint")
    check(log_lines(out, ("eval",)) == [], "an evaluation that was not finished is in the log")
    run(args + ["--out", out, "--resume", "--eval-batches", "2"], want=75, fault="stop@6")
    evals = [e["step"] for e in log_lines(out, ("eval",))]
    check(evals == [2, 4], f"evaluations in the log: {evals}")


def test_stop_file():
    out = os.path.join(ROOT, "stop-file")
    args = SMALL + ["--steps", "1000000"]
    p = start(args + ["--out", out])
    read_until(p, "step 3/")
    open(os.path.join(out, "STOP"), "w").close()
    text, _ = finish(p, 75)
    check(not os.path.exists(os.path.join(out, "STOP")), "the file STOP is still there")
    check_resumable(args, out, text)


def test_stop_after():
    out = os.path.join(ROOT, "stop-after")
    args = SMALL + ["--steps", "1000000"]
    begin = time.time()
    text, _ = run(args + ["--out", out, "--stop-after", "0.5s"], want=75)
    check(0.4 < time.time() - begin < 10 and "--stop-after" in text, text[-300:])
    check_resumable(args, out, text)


def test_second_job_is_refused():
    out = os.path.join(ROOT, "locked")
    args = SMALL + ["--steps", "1000000", "--save-every", "2", "--keep", "2"]
    p = start(args + ["--out", out])
    read_until(p, "step 5/")
    _, err = run(args + ["--out", out, "--resume"], want=5)
    check(str(p.pid) in err, f"the message does not name the process {p.pid}: {err}")
    p.kill()
    p.communicate()
    run(args + ["--out", out, "--resume", "--stop-after", "0.2s"], want=75)  # a lock that nobody holds


def test_fresh_numbered_folders():
    cwd = folder("numbered")
    for _ in range(3):
        run(SMALL, cwd=cwd)
    check(sorted(os.listdir(os.path.join(cwd, "out"))) == ["run-0001", "run-0002", "run-0003"], "out/ holds other folders")
    a, b = (os.path.join(cwd, "out", d) for d in ("run-0001", "run-0003"))
    same_run(a, b, 12, "the same command twice")
    _, err = run(SMALL + ["--out", a], want=5)
    check("already holds a run" in err and "--resume" in err, err)
    run(SMALL + ["--out", os.path.join(cwd, "a/b/c")])
    run(SMALL + ["--resume"], want=2, cwd=cwd)


def test_failing_disk():
    # files of more than 8 kB fail: weights do not fit, the log does
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))

    out = os.path.join(ROOT, "disk")
    p = subprocess.run([PROGRAM] + SMALL + ["--out", out, "--save-every", "2"], stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, preexec_fn=limit, timeout=60, env=environment())
    err = p.stderr.decode()
    check(p.returncode == 5, f"exit {p.returncode}: {err}")
    check(err.count("warning") in (3, 4) and "in a row failed" in err, err)
    check(glob.glob(os.path.join(out, "*step-*")) == [], f"left behind: {os.listdir(out)}")
    steps = [e["step"] for e in log_lines(out, ("step",))]
    check(steps == list(range(1, len(steps) + 1)) and 6 <= len(steps) <= 9, f"steps in the log: {steps}")


def test_keep_removes_old_checkpoints():
    out = os.path.join(ROOT, "keep")
    run(SMALL + ["--out", out, "--save-every", "2", "--keep", "2", "--keep-every", "6"])
    found = sorted(os.path.basename(p) for p in glob.glob(os.path.join(out, "step-*")))
    check(found == ["step-00000006", "step-00000010", "step-00000012"], f"kept {found}")


# ----------------------------------------------------------------------------
# numbers


def test_micro_batches_give_the_same_update():
    outs = []
    for batch in ("8", "4", "1"):
        out = os.path.join(ROOT, "micro" + batch)
        run(SMALL + ["--out", out, "--batch", batch, "--clip", "0.05"])
        outs.append(log_lines(out, ("step",)))
    for other in outs[1:]:
        for p, q in zip(outs[0][:5], other):  # later the rounding of other sums grows
            check(p["batch_hash"] == q["batch_hash"], f"step {p['step']}: other samples")
            for key in ("loss", "grad_norm"):
                check(math.isclose(p[key], q[key], rel_tol=1e-5), f"step {p['step']}: {key} {p[key]} and {q[key]}")


def test_loss_falls():
    out = os.path.join(ROOT, "learn")
    run(SMALL + ["--out", out, "--steps", "150", "--lr", "0.02"])
    losses = [e["loss"] for e in log_lines(out, ("step",))]
    check(abs(losses[0] - math.log(129)) < 0.5, f"the first loss is {losses[0]}, needed about {math.log(129)}")
    check(sum(losses[-10:]) / 10 < 0.8 * losses[0], f"from {losses[0]} to {losses[-1]}")


def test_eval_equals_training():
    train, val = text_shards("eval-data", [600]), text_shards("eval-val", [300], seed=2)
    out = os.path.join(ROOT, "eval")
    args = SMALL + ["--train", train, "--val", val, "--vocab", "257", "--tokenizer", "bytes"]
    text, _ = run(args + ["--out", out])
    trained = log_lines(out, ("eval",))[-1]
    printed, _ = run(["eval", out, "--val", val, "--eval-batches", "2", "--buckets", "4", "--threads", "1"])
    loss = float(re.search(r"loss ([\d.]+) nats", printed).group(1))
    check(abs(loss - trained["loss"]) < 2e-6, f"eval {loss}, training {trained['loss']}")
    bits = float(re.search(r"bits/byte ([\d.]+)", printed).group(1))
    check(abs(bits - loss / math.log(2)) < 1e-4, f"{bits} bits a byte for {loss} nats a byte")
    buckets = re.findall(r"positions +(\d+) to +(\d+) \| loss ([\d.]+) \| (\d+) tokens", printed)
    check(len(buckets) == 4 and buckets[0][0] == "0" and buckets[3][1] == "15", printed)
    mean = sum(float(b[2]) * int(b[3]) for b in buckets) / sum(int(b[3]) for b in buckets)
    check(abs(mean - loss) < 1e-5, f"mean over buckets {mean}, loss {loss}")
    longer, _ = run(["eval", step_dir(out, 12), "--val", val, "--eval-batches", "0", "--seq-len", "64", "--batch", "1"])
    check("4 rows of 64 tokens" in longer, longer)
    # logits in a file: their cross entropy is the loss
    path = os.path.join(ROOT, "logits.safetensors")
    run(["eval", out, "--val", val, "--eval-batches", "2", "--write-logits", path])
    data = open(path, "rb").read()
    n, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    rows, T, V = header["logits"]["shape"]
    check((rows, T, V) == (4, 16, 257), f"shape {rows, T, V}")
    begin = 8 + n + header["logits"]["data_offsets"][0]
    targets = struct.unpack_from(f"<{rows * T}i", data, 8 + n + header["targets"]["data_offsets"][0])
    total = 0
    for i in range(rows * T):
        row = struct.unpack_from(f"<{V}f", data, begin + 4 * V * i)
        top = max(row)
        total += math.log(sum(math.exp(x - top) for x in row)) + top - row[targets[i]]
    one, _ = run(["eval", out, "--val", val, "--eval-batches", "1"])
    loss = float(re.search(r"loss ([\d.]+) nats", one).group(1))
    check(abs(total / (rows * T) - loss) < 1e-4, f"{total / (rows * T)} from the file, {loss} printed")
    _, err = run(["eval", out, "--val", val, "--width", "32"], want=5)
    check("width" in err, err)


def test_own_shards():
    write = own_shard_writer()
    if not write:
        raise Skip("libxxhash cannot be called from Python")
    train, val = text_shards("own", [9000, 700], write_shard=write), text_shards("own-val", [300], 2, write)
    out = os.path.join(ROOT, "own-run")
    args = SMALL + ["--train", train, "--val", val, "--vocab", "257", "--out", out]
    run(args, want=75, fault="stop@7")
    text, _ = run(["eval", out, "--val", val])
    check("bits/byte" in text, "the byte tokenizer of the shards was not seen")
    text, _ = run(["sample", out, "--prompt", "abc", "--num-tokens", "3"])
    check(text.startswith("abc"), text)
    text, _ = run(["inspect", train.replace("*", "x_000000")])
    check("9001 tokens" in text and "tokenizer bytes" in text, text)
    path = train.replace("*", "x_000000")
    data = open(path, "rb").read()
    for at in (300, 9000):  # one flipped bit in the first block, in another one
        open(path, "wb").write(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
        _, err = run(args + ["--resume", "--steps", "200"], want=4)
        check("x_000000.bin" in err and "checksum" in err, err)
    open(path, "wb").write(data)
    run(args + ["--resume", "--steps", "30"])  # the state was saved when the damage was met
    write(train.replace("*", "x_000001"), b"other text, other fingerprint")
    _, err = run(args + ["--resume", "--steps", "40"], want=5)
    check(err.count("shards:") == 2, err)


def test_eval_does_not_move_training():
    a, b = os.path.join(ROOT, "quiet"), os.path.join(ROOT, "busy")
    run(SMALL + ["--out", a, "--eval-every", "0"])
    run(SMALL + ["--out", b, "--eval-every", "1", "--sample-every", "3", "--save-every", "1", "--num-tokens", "5",
               "--prompt", "1 2"])
    check(weights(a, 12) == weights(b, 12), "evaluating, sampling and saving changed the weights")


def test_recall_line():
    text, _ = run(SMALL + ["--out", os.path.join(ROOT, "recall")])
    check(re.search(r"^RECALL model=\S+ pct=[\d.]+ pairs=2 length=16 steps=12 seconds=[\d.]+$", text, re.M), text[-300:])


def test_sample():
    train = text_shards("sample-data", [3000])
    out = os.path.join(ROOT, "sample")
    run(SMALL + ["--train", train, "--vocab", "257", "--tokenizer", "bytes", "--out", out, "--steps", "40"])
    base = ["sample", out, "--prompt", "abc abc", "--num-tokens", "20", "--threads", "1"]
    one, _ = run(base + ["--seed", "1", "--samples", "2"])
    again, _ = run(base + ["--seed", "1", "--samples", "2"])
    other, _ = run(base + ["--seed", "2", "--samples", "2"])
    check(one == again, "the same seed gave another text")
    check(one != other, "another seed gave the same text")
    parts = one.split("--- sample ")
    check(len(parts) == 3 and parts[1][2:] != parts[2][2:], f"two samples are alike: {one!r}")
    check("abc abc" in one, one)
    greedy, _ = run(base + ["--temperature", "0"])
    check(greedy == run(base + ["--temperature", "0", "--seed", "9"])[0], "greedy depends on the seed")
    check(greedy == run(base + ["--top-k", "1"])[0] and greedy == run(base + ["--top-p", "1e-9"])[0],
          "top-k 1 or a tiny top-p is not greedy")
    ids, _ = run(["sample", os.path.join(ROOT, "recall") if os.path.isdir(os.path.join(ROOT, "recall")) else out, "--prompt",
                  "1 2 3", "--num-tokens", "4"])
    check(ids.startswith("1 2 3"), ids)


def test_inspect():
    out = os.path.join(ROOT, "inspect")
    run(SMALL + ["--out", out, "--save-every", "6"])
    text, _ = run(["inspect", out])
    check("newest that holds" in text and "step-00000012" in text and "2 checkpoints" in text, text)
    text, _ = run(["inspect", step_dir(out, 12)])
    check("step 12, 1536 tokens" in text and "model.embeddings.weight" in text and "A_log" in text, text)
    text, _ = run(["inspect", "--verify", out])
    check(text.count(": whole") == 2, text)
    path = os.path.join(step_dir(out, 12), "model.safetensors")
    os.truncate(path, os.path.getsize(path) - 4)
    text, err = run(["inspect", "--verify", out], want=5)
    check(text.count(": whole") == 1 and "model.safetensors" in err and step_dir(out, 6) in text, text + err)
    _, err = run(["inspect", step_dir(out, 12)], want=5)
    check("model.safetensors" in err, err)
    text, err = run(["inspect", out])
    check("newest that holds: " + step_dir(out, 6) in text and "step-00000012" in err, text + err)
    shard = text_shards("inspect-data", [500]).replace("*", "x_000000")
    text, _ = run(["inspect", shard])
    check("500 tokens" in text, text)
    run(["inspect", os.path.join(ROOT, "nowhere")], want=5)


def test_init_from():
    first, second = os.path.join(ROOT, "init-a"), os.path.join(ROOT, "init-b")
    run(SMALL + ["--out", first])
    rest = [a for a in SMALL]
    for name in ("--width", "--layers", "--ff", "--heads", "--head-k", "--head-v"):
        at = rest.index(name)
        del rest[at:at + 2]
    run(rest + ["--out", second, "--init-from", first, "--lr", "0", "--min-lr", "0", "--weight-decay", "0"])
    check(weights(first, 12)[0] == weights(second, 12)[0], "weights are not those of --init-from")
    _, err = run(SMALL + ["--out", os.path.join(ROOT, "init-c"), "--init-from", first, "--width", "32"], want=5)
    check("width 16" in err and "32" in err, err)


def test_selftest():
    text, _ = run(["selftest"] + SMALL)
    check("equal bits" in text and "20 steps" in text, text)


def test_dry_run():
    cwd = folder("dry")
    text, _ = run(["--model", "gdn-1.3b", "--dry-run"], cwd=cwd)
    check("1,446,891,696" in text, text[-2000:])
    run(["--model", "gdn-1.3b", "--recompute", "all", "--dry-run"], cwd=cwd)  # forecast without a GPU, too
    check(os.listdir(cwd) == [], "a dry run left something behind")


# ----------------------------------------------------------------------------
# bad input


def test_bad_options():
    cwd = folder("bad")
    data = text_shards("bad-data", [300])
    cases = [
        (["--bacth", "4"], 2, ["--bacth", "--batch"]),
        (["trian"], 2, ["train"]),
        (["--batch", "x"], 2, ["--batch", "x"]),
        (["--batch", "0"], 2, ["--batch"]),
        (["--batch", "3", "--total-batch", "128", "--seq-len", "16"], 2, ["--total-batch", "--batch", "48"]),
        (["--heads", "2", "--v-heads", "3"], 3, ["--v-heads"]),
        (["--recall-keys", "2", "--recall-pairs", "3"], 2, ["recall"]),
        (["--vocab", "10"], 2, ["vocabulary", "10"]),
        (["--train", "/nowhere/*.bin"], 4, ["/nowhere/*.bin", "--train"]),
        (["--train", cwd], 4, [cwd]),
        (["--train", data, "--vocab", "80"], 4, ["x_000000.bin", "--vocab"]),
        (["--train", data, data], 2, [data, "quotes"]),
        (["--train", data, "--vocab", "257", "--seq-len", "512", "--batch", "1", "--total-batch", "512"], 4, ["300", "--seq-len"]),
        (["--out", "/proc/nowhere/x"], 5, ["/proc/nowhere"]),
        (["--resume", "/nowhere"], 5, ["/nowhere"]),
        (["--init-from", "/nowhere"], 5, ["/nowhere"]),
        (["eval"], 2, ["eval"]),
        (["sample", "/nowhere"], 5, ["/nowhere"]),
        (["--tokenizer", "/nowhere.model"], 4, ["/nowhere.model"]),
    ]
    own = own_shard_writer()
    if own:  # llm.c's shards do not say which token is BOS
        data = text_shards("bad-bos", [300], write_shard=own)
        reset = ["--train", data, "--vocab", "257", "--boundary", "reset", "--bos"]
        cases.append((reset + ["7"], 4, ["BOS 7", "--bos 256"]))
        run(SMALL + reset + ["256", "--out", os.path.join(ROOT, "right-bos")])
    for args, code, words in cases:
        full = args if args[0][:1] != "-" else SMALL + args
        _, err = run(full, want=code, cwd=cwd)
        for word in words:
            check(word in err, f"{args}: {word!r} is not in {err!r}")
        check(os.listdir(cwd) == [], f"{args} left {os.listdir(cwd)} behind")


def test_damaged_data_in_the_middle():
    train = text_shards("late-data", [400, 400])
    out = os.path.join(ROOT, "late")
    args = SMALL + ["--train", train, "--vocab", "257", "--out", out, "--steps", "1000000"]
    p = start(args)
    read_until(p, "step 3/")
    os.truncate(sorted(glob.glob(train))[1], 1100)
    text, err = finish(p, 4)
    check("x_000001.bin" in err and "cut" in err, err)
    step = max(int(os.path.basename(d)[5:]) for d in glob.glob(os.path.join(out, "step-*")))
    check(log_lines(out, ("step",))[-1]["step"] == step, "the steps before the damage were not saved")


def main():
    if not os.access(PROGRAM, os.X_OK):
        print(f"{PROGRAM}: no such program; run make first")
        print("0 passed, 1 failed, 0 skipped")
        return 1
    return run_cases(globals(), ONLY, ROOT)


if __name__ == "__main__":
    sys.exit(main())
