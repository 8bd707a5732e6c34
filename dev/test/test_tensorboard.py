#!/usr/bin/env python3
"""Tests of the pictures of a run: TensorBoard event files, read by the tensorboard package, and scripts/plot.py.

.venv/bin/python dev/test/test_tensorboard.py [PROGRAM]      PROGRAM: ./train_gdn
"""

import glob
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(REPOSITORY, "train_gdn"))
ROOT = tempfile.mkdtemp(prefix="test_tensorboard_")
SMALL = "--width 16 --layers 2 --ff 16 --heads 1 --head-k 8 --head-v 8 --batch 4 --seq-len 16 --total-batch 128".split()
SMALL += "--recall-pairs 2 --recall-keys 16 --recall-values 16 --eval-every 4 --eval-batches 2 --steps 24".split()
SMALL += "--warmup 3 --lr 0.01 --threads 1 --save-every 5 --keep 0".split()
TAGS = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/lr": "lr", "train/tokens_per_s": "tokens_per_s"}
counts = {"passed": 0, "failed": 0, "skipped": 0}


def check(ok, what):
    counts["passed" if ok else "failed"] += 1
    if not ok:
        print(f"FAILED: {what}")


def train(*args, want=0, fault=None, cwd=ROOT):
    env = {k: v for k, v in os.environ.items() if k != "GDN_FAULT"}
    if fault:
        env["GDN_FAULT"] = fault
    p = subprocess.run([PROGRAM, *SMALL, *args], capture_output=True, text=True, timeout=60, env=env, cwd=cwd)
    check(p.returncode == want, f"{args}: exit code {p.returncode}, needed {want}: {p.stderr[-400:]}")
    return p.stderr


def event_files(folder):
    return sorted(glob.glob(os.path.join(folder, "events.out.tfevents.*")))


def read_log(out):
    with open(os.path.join(out, "log.jsonl")) as f:
        return [json.loads(line) for line in f]


def as_float32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def scalars(folder):
    """Tag to {step: value}, as TensorBoard shows a folder; a step that came twice is a failure."""
    accumulator = EventAccumulator(folder, size_guidance={"scalars": 0})
    accumulator.Reload()
    found = {}
    for tag in accumulator.Tags()["scalars"]:
        points = accumulator.Scalars(tag)
        found[tag] = {p.step: p.value for p in points}
        check(len(found[tag]) == len(points), f"{folder} {tag}: steps {[p.step for p in points]}")
        check(all(abs(p.wall_time - os.path.getmtime(folder)) < 600 for p in points), f"{folder} {tag}: wall time")
    return found


def compare(folder, out, what):
    """Every number of log.jsonl, and nothing else; NaN where the log has null."""
    found, log = scalars(folder), read_log(out)
    want = {tag: {e["step"]: e[name] for e in log if e["kind"] == "step"} for tag, name in TAGS.items()}
    want["val/loss"] = {e["step"]: e["loss"] for e in log if e["kind"] == "eval"}
    check(set(found) == set(want), f"{what}: tags {sorted(found)}")
    for tag in want:
        got = found.get(tag, {})
        check(list(got) == list(want[tag]), f"{what} {tag}: steps {list(got)}, the log has {list(want[tag])}")
        wrong = [
            (step, got.get(step), x)
            for step, x in want[tag].items()
            if not (math.isnan(got.get(step, 0.0)) if x is None else got.get(step) == as_float32(x))
        ]
        check(not wrong, f"{what} {tag}: (step, event, log) {wrong[:3]}")


# ----------------------------------------------------------------------------
# event files


def test_one_run():
    out = os.path.join(ROOT, "one")
    train("--out", out, "--tensorboard")
    check(len(event_files(out)) == 1, f"{os.listdir(out)}")
    compare(out, out, "one run")
    check(len(read_log(out)) == 1 + 24 + 6, "the log of the run that is compared with")

    data = open(event_files(out)[0], "rb").read()
    at, events = 0, []
    while at < len(data):  # the framing, without TensorBoard
        (size,) = struct.unpack_from("<Q", data, at)
        events.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + size]))
        at += size + 16
    check(at == len(data), f"the file ends inside a record: {at} of {len(data)} bytes")
    check(events[0].file_version == "brain.Event:2", f"first event {events[0]}")
    check(events[1].session_log.status == 1 and events[1].step == 1, f"second event {events[1]}")
    check(len(events) == 2 + 24 + 6, f"{len(events)} events")

    for at, what in ((3, "length"), (9, "checksum of the length"), (30, "event"), (len(data) - 1, "last checksum")):
        damaged = os.path.join(ROOT, "damaged")
        with open(damaged, "wb") as f:
            f.write(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:  # so the checksums are read, and right
            n = len(list(RawEventFileLoader(damaged).Load()))
        except Exception as e:
            n = str(e)
        check(n != len(events), f"a flipped bit in the {what} was not seen")
    with open(damaged, "wb") as f:
        f.write(data)
    check(len(list(RawEventFileLoader(damaged).Load())) == len(events), "TensorBoard does not read all events")


def test_resume():
    out = os.path.join(ROOT, "stopped")
    train("--out", out, "--tensorboard", "on", fault="stop@9", want=75)
    train("--out", out, "--tensorboard", "on", "--resume")
    check(len(event_files(out)) == 2, f"stopped: {event_files(out)}")
    compare(out, out, "stopped")

    out = os.path.join(ROOT, "killed")  # twice, each time three steps and a validation behind the last checkpoint
    train("--out", out, "--tensorboard", fault="kill@8", want=-9)
    check(set(scalars(out)["train/loss"]) == set(range(1, 9)), "killed: steps of the first part")
    with open(event_files(out)[0], "ab") as f:
        f.write(b"\x60\x00\x00")  # and in the middle of a record
    train("--out", out, "--tensorboard", "--resume", fault="kill@13", want=-9)
    train("--out", out, "--tensorboard", "--resume")
    check(len(event_files(out)) == 3, f"killed: {event_files(out)}")
    compare(out, out, "killed")


def test_file_names():
    out = os.path.join(ROOT, "names")  # a clock that was set back: the new file still sorts last
    os.makedirs(out)
    old = os.path.join(out, "events.out.tfevents.9000000000.zz.9999999")
    open(old, "wb").close()
    train("--out", out, "--tensorboard", "--steps", "4")
    files = event_files(out)
    check(len(files) == 2 and files[0] == old and "tfevents.9000000001." in files[1], f"{files}")


def test_not_finite():
    out = os.path.join(ROOT, "nan")
    train("--out", out, "--tensorboard", fault="nan@6")
    check(math.isnan(scalars(out)["train/grad_norm"][6]), "the norm of the skipped step is not NaN")
    compare(out, out, "not finite")


def test_where():
    out, other = os.path.join(ROOT, "where"), os.path.join(ROOT, "deep", "er", "tb")
    train("--out", out, "--tensorboard", other)
    check(event_files(out) == [] and len(event_files(other)) == 1, f"{os.listdir(out)} {os.listdir(other)}")
    compare(other, out, "a folder of its own")
    out = os.path.join(ROOT, "off")
    train("--out", out, "--tensorboard", "off", "--steps", "4")
    train("--out", out + "2", "--steps", "4")
    check(event_files(out) + event_files(out + "2") == [], "off and the default write nothing")
    file = os.path.join(ROOT, "a-file")
    open(file, "w").close()
    for bad in (file, os.path.join(file, "x"), "/proc/nowhere/x"):
        err = train("--out", os.path.join(ROOT, "bad"), "--resume", "--tensorboard", bad, want=5)
        check(err.count("error:") == 1 and "--tensorboard" in err and bad in err, f"{bad}: {err!r}")


# ----------------------------------------------------------------------------
# plot.py


def plot(*args, want=0):
    p = subprocess.run(
        [sys.executable, os.path.join(REPOSITORY, "scripts", "plot.py"), *args],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    check(p.returncode == want, f"plot.py {args}: exit code {p.returncode}, needed {want}: {p.stderr[-400:]}")
    if want:
        lines = p.stderr.strip().split("\n")
        check("error: " in lines[-1] and "Traceback" not in p.stderr, f"plot.py {args}: {p.stderr!r}")
    return p.stdout + p.stderr


def coloured(path, colour):
    """Pixels of a picture that have just this colour, given as #rrggbb."""
    image = matplotlib.image.imread(path)
    want = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return int((abs(image[:, :, :3] - want).max(axis=2) < 0.002).sum())


def test_plot():
    one, killed, nan = (os.path.join(ROOT, name) for name in ("one", "killed", "nan"))
    alone, several = os.path.join(ROOT, "alone.png"), os.path.join(ROOT, "several.png")
    plot(one, "--out", alone)
    with open(os.path.join(killed, "log.jsonl"), "a") as f:
        f.write('{"kind":"st')  # a run that goes on while it is drawn
    said = plot(os.path.join(one, "log.jsonl"), killed, nan, "--out", several, "--x", "steps", "--smooth", "0.5")
    check("3 runs" in said and "24 steps" in said, said)
    for path in (alone, several):
        data = open(path, "rb").read()
        check(data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR", f"{path} is no PNG")
        width, height = struct.unpack(">II", data[16:24])
        check(1000 <= width <= 4000 and 600 <= height <= 3000, f"{path}: {width} x {height}")
        check(20_000 < len(data) < 2_000_000, f"{path}: {len(data)} bytes")
    blue, orange, green = "#0072b2", "#d55e00", "#009e73"
    seen = [[coloured(path, c) for c in (blue, orange, green)] for path in (alone, several)]
    check(seen[0][0] > 500 and seen[0][1:] == [0, 0], f"one run in one colour: {seen[0]}")
    check(min(seen[1]) > 200, f"three runs in three colours: {seen[1]}")
    validation = os.path.join(ROOT, "validation.png")
    plot(one, killed, "--out", validation, "--validation")
    seen = [coloured(validation, c) for c in (blue, orange, green)]
    check(min(seen[:2]) > 40 and seen[2] == 0, f"validation losses of two runs in two colours: {seen}")
    check("--smooth" in plot("--help"), "plot.py --help")


def test_plot_refuses():
    one, empty = os.path.join(ROOT, "one"), os.path.join(ROOT, "empty.jsonl")
    open(empty, "w").close()
    other = os.path.join(ROOT, "other.jsonl")
    with open(other, "w") as f:
        f.write("loss 3\n")
    check("no steps" in plot(empty, want=4), "an empty log")
    check("line 1" in plot(other, want=4), "no log")
    check("cannot be read" in plot(os.path.join(ROOT, "nowhere"), want=4), "no folder")
    check("--smooth" in plot(one, "--smooth", "1", want=2), "--smooth 1")
    plot(one, "--x", "hours", want=2)
    plot(want=2)
    check("png" in plot(one, "--out", "x.pdf", want=2), "--out x.pdf")
    plot(one, "--out", "/proc/nowhere/x.png", want=5)


def main():
    if not os.access(PROGRAM, os.X_OK):
        print(f"FAILED: {PROGRAM}: no such program; run make first\n0 passed, 1 failed, 0 skipped")
        return 1
    for test in (
        test_one_run,
        test_resume,
        test_file_names,
        test_not_finite,
        test_where,
        test_plot,
        test_plot_refuses,
    ):
        test()
    if not counts["failed"]:
        shutil.rmtree(ROOT, ignore_errors=True)
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**counts))
    return counts["failed"] != 0


if __name__ == "__main__":
    try:
        import matplotlib.image
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto import event_pb2
    except ImportError as e:
        print(f"FAILED: {e.name} is missing: scripts/setup.sh test installs it\n0 passed, 1 failed, 0 skipped")
        sys.exit(1)
    sys.exit(main())
