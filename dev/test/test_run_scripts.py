#!/usr/bin/env python3
"""Tests of the scripts of the published runs: their cost sheets against the trainer's own count, and the loop that
goes on until a run is done, in a job of Slurm too, with the CPU engine on a tiny model.

dev/test/test_run_scripts.py [PROGRAM]      PROGRAM: ./train_gdn; Python's own library only
"""

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(REPOSITORY, "train_gdn"))
ROOT = tempfile.mkdtemp(prefix="test_run_scripts_")
RUNS = {  # script: preset, steps, warm-up
    "gdn_400m_15b": ("gdn-400m", 28610, 286),
    "gdn_1.3b_100b": ("gdn-1.3b", 190734, 1907),
    "h1_1.3b_100b": ("h1-1.3b", 190734, 1907),
    "h2_1.3b_100b": ("h2-1.3b", 190734, 1907),
    "gdn2_1.3b_100b": ("gdn2-1.3b", 190734, 1907),
    "gdn2_h_1.3b_100b": ("gdn2-h-1.3b", 190734, 1907),
    "transformer_1.3b_100b": ("transformer-1.3b", 190734, 1907),
    "mamba2_1.3b_100b": ("mamba2-1.3b", 190734, 1907),
}
# 300 steps of 16 rows of 32 tokens, a second or so; what the environment cannot say follows as options
STEPS = 300
TINY = dict(MODEL="tiny-gdn", DATA="recall", TOKENS="153600", TOTAL_BATCH="512", SEQ_LEN="32", BATCH="8")
TINY.update(SAVE_EVERY="20")
OPTIONS = (
    "--width 16 --ff 16 --heads 1 --head-k 8 --head-v 8 --recall-pairs 2 --recall-keys 16 --recall-values 16".split()
)
OPTIONS += "--warmup-tokens 5120 --eval-every 50 --eval-batches 2 --threads 1 --lr 0.01".split()
counts = {"passed": 0, "failed": 0, "skipped": 0}


def check(ok, what):
    counts["passed" if ok else "failed"] += 1
    if not ok:
        print(f"FAILED: {what}")
    return ok


def skip(what):
    counts["skipped"] += 1
    print(f"SKIPPED: {what}")


def environment(**more):
    names = "GDN_FAULT GPUS BATCH SEQ_LEN TOTAL_BATCH DATA OUT MODEL TOKENS TRAIN PRICE DRY_RUN COSTS HOSTFILE PROGRAM".split()
    env = {k: v for k, v in os.environ.items() if k not in names and not k.startswith("SLURM_")}
    return {**env, "RETRY_WAIT": "0", **more}


def take_interrupts():
    """A shell starts its background jobs with SIGINT ignored, and a script cannot trap what it was born to ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(script, *args, **env):
    return subprocess.Popen(
        [os.path.join(REPOSITORY, "scripts", script + ".sh"), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,  # not the repository
        env=environment(**env),
        start_new_session=True,
        preexec_fn=take_interrupts,
    )


def finish(p, want, what, seconds=60):
    try:
        out, err = p.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)  # the trainer too: it would hold the pipes open
        out, err = p.communicate()
    check(p.returncode == want, f"{what}: exit code {p.returncode}, needed {want}: {err[-600:]}")
    return out, err


def tiny(name, *args, want=0, program=PROGRAM, **env):
    """A script on the tiny model, until it ends: stdout and stderr."""
    env = {**TINY, "OUT": os.path.join(ROOT, name), "TRAIN": program, **env}
    return finish(start("gdn_1.3b_100b", *OPTIONS, *args, **env), want, name)


def final_weights(name, step=STEPS):
    parts = []
    for file in ("model.safetensors", "trainer_state.safetensors"):
        with open(os.path.join(ROOT, name, f"step-{step:08d}", file), "rb") as f:
            parts.append(f.read())
    return parts


def losses(name):
    with open(os.path.join(ROOT, name, "log.jsonl")) as f:
        lines = [json.loads(line) for line in f]
    return [(e["kind"], e["step"], e["loss"]) for e in lines if e["kind"] in ("step", "eval")]


def starts(name):
    with open(os.path.join(ROOT, name, "log.jsonl")) as f:
        return sum(json.loads(line)["kind"] == "run" for line in f)


def check_same(name, what):
    if not check(os.path.isdir(os.path.join(ROOT, name, f"step-{STEPS:08d}")), f"{what}: the run is not done"):
        return
    check(final_weights("whole") == final_weights(name), f"{what}: the weights differ from those of one go")
    check(losses("whole") == losses(name), f"{what}: the losses differ from those of one go")


def wrapper(name, first):
    """A trainer whose first start has the fault `first`."""
    path, mark = os.path.join(ROOT, name + ".sh"), os.path.join(ROOT, name + ".started")
    with open(path, "w") as f:
        f.write(
            f'#!/bin/sh\nif [ ! -e {mark} ]; then touch {mark}; export GDN_FAULT={first}; fi\nexec {PROGRAM} "$@"\n'
        )
    os.chmod(path, 0o755)
    return path


def wait_for_step(name, step):
    path, end = os.path.join(ROOT, name, "log.jsonl"), time.time() + 30
    while time.time() < end:
        if os.path.exists(path):
            with open(path) as f:
                if f.read().count('"kind":"step"') >= step:
                    return True
        time.sleep(0.005)
    return check(False, f"{name}: step {step} did not come")


# ----------------------------------------------------------------------------
# cost sheets and dry runs


def number(pattern, text):
    m = re.search(pattern, text, re.M)
    return int(m.group(1).replace(",", "")) if m else None


def test_dry_runs():
    check(
        sorted(os.path.basename(p)[:-3] for p in glob.glob(os.path.join(REPOSITORY, "scripts", "*_1*b.sh")))
        == sorted(RUNS),
        "another set of scripts",
    )
    with open(os.path.join(REPOSITORY, "README.md")) as f:
        readme = f.read()
    for script, (preset, steps, warmup) in RUNS.items():
        with open(os.path.join(REPOSITORY, "scripts", script + ".sh")) as f:
            text = f.read()
        out, _ = finish(start(script, "--dry-run"), 0, script)
        total = number(r"^  total +([\d,]+)", out)
        head = 0 if "also the head" in out else number(r"^  head +([\d,]+)", out)
        embedding = number(r"^  embedding +([\d,]+)", out)
        sheet = re.search(r"parameters +([\d,]+): ([\d,]+) in the blocks, ([\d,]+) in the final", text)
        check(f"| model *              | {preset} " in out, f"{script}: model")
        if check(sheet, f"{script}: no parameters in the cost sheet"):
            found = [int(g.replace(",", "")) for g in sheet.groups()]
            rest = embedding + head + number(r"\| width +\| (\d+) ", out)
            check(found == [total, total - rest, rest], f"{script}: sheet {found}, count {total}")
        check(number(r"PARAMETERS=(\d+)", text) == total, f"{script}: PARAMETERS")
        check(number(r"tokenizer: ([\d,]+) steps", text) == steps, f"{script}: steps in the sheet")
        check(number(r"tokens \(([\d,]+) steps\), cosine", text) == warmup, f"{script}: warm-up in the sheet")
        for name, value in (("steps", steps), ("warmup", warmup), ("lr *", "0.0004"), ("min-lr *", "4e-05")):
            check(re.search(rf"\| {re.escape(name)} +\| {value} ", out), f"{script}: {name} is not {value}")
        for name, value in (("batch *", 8), ("total-batch *", 524288), ("decay-all *", "on"), ("seq-len *", 4096)):
            check(re.search(rf"\| {re.escape(name)} +\| {value} ", out), f"{script}: {name} is not {value}")
        for part in ("kept of", "Memory of a rank", "Costs"):
            check(part in out, f"{script}: no {part!r} in the forecast")
        memory = re.findall(r"([\d.]+) GiB", re.search(r"^  sum .*", out, re.M).group())[1]
        check(f"memory        {memory} GiB" in text, f"{script}: memory in the sheet is not {memory} GiB")
        each = re.search(r"kept of ([\d.]+ GiB) each", out)
        check(each and f"{each.group(1)} for a checkpoint" in text, f"{script}: size of a checkpoint in the sheet")
        if "@TOKS_" in text:
            skip(f"{script}: its speed has not been measured yet")
            continue
        largest = int(re.search(r"largest --batch 80 GB \(H100\) +(\w+)", out).group(1))
        smaller = number(r"BATCH=(\d+) for a GPU of 80 GB", text)
        check(smaller == (largest if largest < 8 else None), f"{script}: BATCH={smaller} for 80 GB, forecast {largest}")
        rate = number(r"speed +([\d,]+) tokens/s", text)
        check(number(r"RATE=(\d+)", text) == rate, f"{script}: RATE is not the sheet's")
        costs, _ = finish(start(script, COSTS="1"), 0, script)
        commented = [line[1:] for line in text.split("\n") if re.match(r"#   +(GPUs|\d+ )", line)]
        row = [line for line in readme.split("\n") if line.startswith(f"| `{script}.sh`")]
        for gpus in (1, 8):
            cost = re.search(rf"^ +{gpus} +\d+ +(\S+) +\d+ +(\d+) ", costs, re.M)
            cost = f"| {cost.group(1)} h, ${int(cost.group(2)):,} |"
            check(len(row) == 1 and cost in row[0], f"README.md, {script}: {row}, needed {cost}")
        check(commented == costs.rstrip("\n").split("\n"), f"{script}: the sheet is not what COSTS=1 prints:\n{costs}")
    check(os.listdir(ROOT) == [], f"dry runs left {os.listdir(ROOT)}")


def test_dry_runs_of_many_gpus():
    for gpus, micro in (("8", "2 of 8 x 4096"), ("32", "1 of 4 x 4096"), ("128", "1 of 1 x 4096")):
        out, _ = finish(start("h1_1.3b_100b", DRY_RUN="1", GPUS=gpus), 0, f"{gpus} GPUs")
        nodes = (int(gpus) + 7) // 8
        check(f"{micro} tokens a step and rank, {gpus} ranks on {nodes} node" in out, f"{gpus} GPUs: {out[-1500:]}")
    out, _ = finish(start("h1_1.3b_100b", DRY_RUN="1", GPUS="3"), 0, "3 GPUs")
    check("cannot be run" in out, "3 GPUs do not divide the batch, and the forecast does not say so")
    for args, micro in (([], "1 of 2 x 4096"), (["--batch", "8"], "cannot be run")):  # without a --batch, one that fits
        line = [PROGRAM, "--dry-run", "--model", "gdn-1.3b", "--ranks", "64", "--nodes", "8", *args]
        p = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment())
        check(p.returncode == 0 and micro in p.stdout, f"{line}: {p.stdout[-1500:]} {p.stderr}")
    for gpus in ("3", "256"):  # the second: more GPUs than rows
        out, _ = finish(start("gdn_1.3b_100b", DRY_RUN="1", GPUS=gpus), 0, f"{gpus} GPUs")
        check("GPU hours" not in out and "$" not in out, f"{gpus} GPUs cannot be run, but have a price: {out[-1500:]}")
        check(f"none: {gpus} GPUs cannot share" in out, f"{gpus} GPUs: {out[-600:]}")


def hours(text):
    return {"h": 1, "days": 24, "min": 1 / 60}[text.split()[1]] * float(text.split()[0])


def test_one_answer():
    """Hours of the trainer and hours and dollars of the script: one speed, in the table of other numbers of GPUs too."""
    for script in ("gdn_1.3b_100b", "gdn_400m_15b"):
        for gpus in (1, 2, 8, 16, 64, 128):
            out, _ = finish(start(script, DRY_RUN="1", GPUS=str(gpus), PRICE="2.50"), 0, f"{script}, {gpus} GPUs")
            time, gpu_hours = re.search(r"^  ([\d.]+ \w+) +at --tokens-per-sec \S+ a rank: (\S+) GPU", out, re.M).groups()
            cost = re.search(rf"^ +{gpus} +(\d+) +([\d.]+) +(\d+) +(\d+)   \w+$", out, re.M)
            if not check(cost, f"{script}, {gpus} GPUs: {out[-1500:]}"):
                continue
            rate, its, all_hours, dollars = map(float, cost.groups())
            check(abs(hours(time) - its) <= 0.06 + 0.006 * its, f"{script}, {gpus} GPUs: {time} and {its} h")
            check(abs(float(gpu_hours) / all_hours - 1) < 0.03, f"{script}, {gpus} GPUs: {gpu_hours} and {all_hours}")
            check(abs(dollars - 2.5 * gpus * its) <= 0.15 * gpus + 1, f"{script}, {gpus} GPUs: {dollars} dollars")
            table = {int(n): float(r) for n, r in re.findall(r"^ +(\d+) +\d+ x \d+ .* (\d+) +\d+%$", out, re.M)}
            check(abs(table.get(gpus, 0) / rate - 1) < 1e-4, f"{script}, {gpus} GPUs: {rate}, table {table}")
            minutes = re.search(r"about every (\S+) minutes", out).group(1)
            check(abs(float(minutes) / (250 * 524288 / rate / 60) - 1) < 0.06, f"{script}, {gpus} GPUs: {minutes} minutes")
    # not what was measured: another length, model, form of it, or row
    for args, env in (
        (["--tokens", "10B"], {}),
        ([], {"MODEL": "gdn-400m"}),
        (["--layers", "9"], {}),
        (["--decay", "off"], {}),
        ([], {"SEQ_LEN": "16384"}),
        (["--seq-len=2048"], {}),
    ):
        out, _ = finish(start("gdn_1.3b_100b", *args, DRY_RUN="1", **env), 0, str(args))
        check("none with " in out and "$" not in out, f"{args} {env}: {out[-600:]}")
    out, _ = finish(start("gdn_1.3b_100b", "--lr", "1e-4", "--seed=5", "--keep", "3", DRY_RUN="1"), 0, "a rate")
    check("measured" in out and "none with" not in out, f"another learning rate: {out[-600:]}")


def test_costs():
    """The arithmetic, with a speed put in."""
    folder = os.path.join(ROOT, "copy", "scripts")
    os.makedirs(folder)
    for name in ("train_loop.sh", "gdn_1.3b_100b.sh"):
        with open(os.path.join(REPOSITORY, "scripts", name)) as f:
            text = re.sub(r" RATE=\S+( RATE2=\S+)?", " RATE=50000 RATE2=99000", f.read())
        with open(os.path.join(folder, name), "w") as f:
            f.write(text)
    p = subprocess.run(
        ["bash", os.path.join(folder, "gdn_1.3b_100b.sh")],
        capture_output=True,
        text=True,
        env=environment(COSTS="1", PRICE="2.50"),
    )
    lines = p.stdout.split("\n")[1:-1]
    check([int(line.split()[0]) for line in lines] == [1, 2, 8, 16, 32], f"{p.stdout} {p.stderr}")
    for line in lines:
        gpus, rate, hours, all_hours, dollars, said = line.split(None, 5)
        n, tokens, step = int(gpus), 190734 * 524288, 524288
        exchange = 6 * 1446891696 * (n - 1) / n / (45e9 if n > 8 else 250e9)
        seconds = step / 99000 if n == 2 else step / (50000 * n) + exchange
        want = [step / seconds, tokens / step * seconds / 3600]
        want += [want[1] * n, want[1] * n * 2.5]
        found = [float(x) for x in (rate, hours, all_hours, dollars)]
        check(all(abs(a - b) <= 0.51 for a, b in zip(found, want)), f"{n} GPUs: {found}, needed {want}")
        check(said == ("extrapolated" if n > 2 else "measured"), line)
    p = subprocess.run(
        ["bash", os.path.join(folder, "gdn_1.3b_100b.sh"), "--dry-run"],
        capture_output=True,
        text=True,
        env=environment(TRAIN=PROGRAM, GPUS="8"),
    )
    each = 524288 / (524288 / 50000 + 8 * 6 * 1446891696 * 7 / 8 / 250e9)
    found = number(r"at --tokens-per-sec (\d+)", p.stdout)
    check(found == int(each), f"the dry run uses {found} tokens/s a rank, needed {each}: {p.stdout[-600:]}")
    check(re.search(r"^ +8 .*extrapolated", p.stdout, re.M), f"no costs of 8 GPUs: {p.stdout[-600:]}")
    shutil.rmtree(os.path.join(ROOT, "copy"))


def test_refuses():
    for env, part in ((dict(GPUS="x"), "GPUS"), (dict(BATCH="0"), "BATCH"), (dict(TRAIN="/nowhere"), "/nowhere")):
        _, err = finish(start("gdn_1.3b_100b", **env), 3, str(env))
        check(part in err and err.count("\n") == 1, f"{env}: {err!r}")
    _, err = finish(start("gdn_1.3b_100b", TRAIN=PROGRAM, HOSTFILE="/nowhere/hosts"), 3, "HOSTFILE")
    check("/nowhere/hosts" in err, err)


# ----------------------------------------------------------------------------
# the loop


def test_one_go():
    _, err = tiny("whole")
    check("done" in err and starts("whole") == 1, err)
    n = STEPS + STEPS // 50
    check(len(losses("whole")) == n, f"{len(losses('whole'))} losses")
    check(glob.glob(os.path.join(ROOT, "whole", "events.out.tfevents.*")), "no event file")
    _, err = tiny("whole")  # a run that is done stays done
    check("done" in err and len(losses("whole")) == n, err)


def stop(name, asked, **env):
    """Starts, sends the signal to the script once it trains; the run must have ended soon, with all its steps saved."""
    p = start("gdn_1.3b_100b", *OPTIONS, **{**TINY, "OUT": os.path.join(ROOT, name), "TRAIN": PROGRAM, **env})
    if wait_for_step(name, 12):
        p.send_signal(asked)
    _, err = finish(p, 75, name, 30)
    check("goes on" in err and starts(name) == 1, f"{name}: {err}")
    last = [step for kind, step, _ in losses(name) if kind == "step"][-1]
    newest = sorted(glob.glob(os.path.join(ROOT, name, "step-*")))[-1]
    check(newest.endswith(f"step-{last:08d}"), f"{name}: newest {newest}, last step {last}")
    return last


def test_signals():
    last = stop("usr1", signal.SIGUSR1)
    check(12 <= last < STEPS, f"stopped at step {last}")
    tiny("usr1")  # the same command again
    check(starts("usr1") == 2, "usr1: starts")
    check_same("usr1", "stopped by USR1, run again")
    stop("term", signal.SIGTERM, TOKENS="512000000")
    stop("int", signal.SIGINT, TOKENS="512000000")


def test_signal_while_waiting():
    program = wrapper("waiting", "kill@3")
    env = dict(TINY, OUT=os.path.join(ROOT, "waiting"), TRAIN=program)
    p = start("gdn_1.3b_100b", *OPTIONS, **env, RETRY_WAIT="60")
    end = time.time() + 20
    line = ""
    while "starting again" not in line and time.time() < end:
        line = p.stderr.readline()
    p.send_signal(signal.SIGUSR1)
    finish(p, 75, "a signal before the next try", 20)
    check(starts("waiting") == 1, "it was started again")


def slurm(name, succeeds=True):
    """A folder for PATH with a scontrol that writes down what it was asked, and a mpirun of one rank; the record."""
    folder, asked = os.path.join(ROOT, name + ".bin"), os.path.join(ROOT, name + ".asked")
    os.makedirs(folder)
    for tool, text in (("scontrol", f'echo "$@" >>{asked}; exit {0 if succeeds else 1}'), ("mpirun", 'shift 4; exec "$@"')):
        with open(os.path.join(folder, tool), "w") as f:
            f.write(f"#!/bin/sh\n{text}\n")
        os.chmod(os.path.join(folder, tool), 0o755)
    return {"PATH": folder + ":" + os.environ["PATH"], "SLURM_JOB_ID": "4711"}, asked


def record(asked):
    if not os.path.exists(asked):
        return ""
    with open(asked) as f:
        return f.read()


def test_requeue():
    """In a job of Slurm USR1 saves and puts the job back into the queue, once; other ways to stop do not."""
    long = dict(TOKENS="512000000")
    for name, asked, want in (("requeue", signal.SIGUSR1, "requeue 4711\n"), ("cancel", signal.SIGTERM, "")):
        env, found = slurm(name)
        stop(name, asked, **env, **long)
        check(record(found) == want, f"{name}: scontrol was asked {record(found)!r}, needed {want!r}")
    stop("no-job", signal.SIGUSR1, **{**slurm("no-job")[0], "SLURM_JOB_ID": ""}, **long)
    check(record(os.path.join(ROOT, "no-job.asked")) == "", "scontrol was asked outside of a job")
    env, found = slurm("refused", succeeds=False)
    p = start("gdn_1.3b_100b", *OPTIONS, **{**TINY, "OUT": os.path.join(ROOT, "refused"), "TRAIN": PROGRAM, **env, **long})
    if wait_for_step("refused", 12):
        p.send_signal(signal.SIGUSR1)
    _, err = finish(p, 75, "refused", 30)
    check("not in the queue again" in err and record(found), f"scontrol that fails: {err}")
    env, found = slurm("stop-file")
    p = start("gdn_1.3b_100b", *OPTIONS, **{**TINY, "OUT": os.path.join(ROOT, "stop-file"), "TRAIN": PROGRAM, **env, **long})
    if wait_for_step("stop-file", 12):
        open(os.path.join(ROOT, "stop-file", "STOP"), "w").close()
    finish(p, 75, "stop-file", 30)
    check(record(found) == "", f"a file STOP: scontrol was asked {record(found)!r}")
    env, found = slurm("waits")  # the signal comes between two tries
    env.update(TINY, OUT=os.path.join(ROOT, "waits"), TRAIN=wrapper("waits", "kill@3"), RETRY_WAIT="60")
    p = start("gdn_1.3b_100b", *OPTIONS, **env)
    line, end = "", time.time() + 20
    while "starting again" not in line and time.time() < end:
        line = p.stderr.readline()
    p.send_signal(signal.SIGUSR1)
    finish(p, 75, "waits", 20)
    check(record(found) == "requeue 4711\n", f"between two tries: scontrol was asked {record(found)!r}")


def test_run_slurm():
    for name, by_file, want in (("job", False, "requeue 4711\n"), ("job-file", True, "")):
        env, found = slurm(name)
        out = os.path.join(ROOT, name)
        env.update(OUT=out, PROGRAM=PROGRAM, SLURM_NTASKS="1", SLURM_CPUS_PER_TASK="1", SLURM_SUBMIT_DIR=REPOSITORY)
        p = start("run_slurm", *OPTIONS, "--seq-len", "32", "--batch", "8", "--steps", "1000000", **env)
        if wait_for_step(name, 12):
            if by_file:
                open(os.path.join(out, "STOP"), "w").close()
            else:
                p.send_signal(signal.SIGUSR1)
        finish(p, 75, f"run_slurm.sh, {name}", 30)
        check(record(found) == want, f"run_slurm.sh, {name}: scontrol was asked {record(found)!r}, needed {want!r}")


def test_several_ranks():
    if not shutil.which("mpirun"):
        return skip("no mpirun")
    _, err = tiny("ranks-usage", "--btach", "4", want=2, GPUS="2")  # the exit code comes through mpirun
    check("ends with exit code 2" in err, err)
    last = stop("ranks", signal.SIGUSR1, GPUS="2", TOKENS="512000000")
    events = glob.glob(os.path.join(ROOT, "ranks", "events.out.tfevents.*"))
    check(len(events) == 1, f"two ranks and one event file: {events}")
    check(last >= 12, f"stopped at step {last}")


def test_crashes():
    for name, fault in (("killed", "kill@47"), ("stopped-itself", "stop@33")):
        _, err = tiny(name, program=wrapper(name, fault))
        check(starts(name) == 2 and err.count("starting again") == 1, f"{name}: {err}")
        check_same(name, name)
    _, err = tiny("always", want=137, TRIES="2", GDN_FAULT="kill@17")  # each time before a save
    check(starts("always") == 2 and "2 times in a row" in err, f"always: {starts('always')} starts: {err}")


def test_stop_file():
    name = "file"
    p = start("gdn_1.3b_100b", *OPTIONS, **dict(TINY, OUT=os.path.join(ROOT, name), TRAIN=PROGRAM, TOKENS="512000000"))
    if wait_for_step(name, 12):
        open(os.path.join(ROOT, name, "STOP"), "w").close()
    _, err = finish(p, 75, name, 30)
    check(starts(name) == 1 and "starting again" not in err, err)


def test_ends():
    for name, args, env, want, part in (
        ("usage", ["--btach", "4"], {}, 2, "--batch"),
        ("config", ["--v-heads", "3", "--heads", "2"], {}, 3, "--v-heads"),
        ("data", [], dict(DATA="/nowhere/fwe"), 4, "/nowhere/fwe_train_*.bin"),
        ("diverged", ["--max-skips", "2"], dict(GDN_FAULT="nan@3,nan@4"), 78, "diverged"),
    ):
        _, err = tiny(name, *args, want=want, **env)
        check(part in err and err.count("error:") == 1, f"{name}: {err}")
        check(f"ends with exit code {want}" in err and "starting again" not in err, f"{name}: {err}")


def main():
    if not os.access(PROGRAM, os.X_OK):
        print(f"FAILED: {PROGRAM}: no such program; run make first\n0 passed, 1 failed, 0 skipped")
        return 1
    for name, test in list(globals().items()):  # in the order of this file
        if name.startswith("test_"):
            test()
    if not counts["failed"]:
        shutil.rmtree(ROOT, ignore_errors=True)
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**counts))
    return counts["failed"] != 0


if __name__ == "__main__":
    sys.exit(main())
