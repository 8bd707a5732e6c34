"""signals.py: requests to stop, in the first step, inside an evaluation, inside a save, between two of them. Each time a
checkpoint is written, the exit code is 75, and --resume auto ends in the bits of the run that was never stopped. A second
INT ends the program at once and leaves the checkpoint before it whole.
"""
from common import *  # noqa: F401,F403

SIGNALS = {"USR1": signal.SIGUSR1, "TERM": signal.SIGTERM, "INT": signal.SIGINT}
STEPS = 30
# at which moment, with which options and delays, and what shows that it has come
SLOW_SAVE = "fdatasync:150000"


def moments(out):
    def tmp_there():
        return glob.glob(os.path.join(out, ".tmp-step-*"))

    def log_has(text):
        try:
            with open(os.path.join(out, "log.jsonl")) as f:
                return text in f.read()
        except OSError:
            return False

    # name: (options, delay, condition, seconds to wait after it)
    return {
        # an evaluation so long that the signal has to end it
        "in an evaluation": (["--eval-every", "4", "--eval-batches", "100000000", "--save-every", "0"], None,
                             lambda: log_has('"step":4,'), 0.05),
        "in a save": (["--save-every", "1"], SLOW_SAVE, tmp_there, 0.02),
        "in the first save": (["--save-every", "1"], "mkdir:150000", lambda: log_has('"step":1,'), 0.01),
        "in the first step": ([], None, lambda: log_has('"kind":"run"'), 0.03),
        "in a later step": (["--save-every", "7"], "write:15000", lambda: log_has('"step":9,'), 0.0),
    }


def stop_case(reference, where, name, r, ranks=1, to="all", program=None):
    """One stop, then the rest of the run. Returns the step it stopped at."""
    out = os.path.join(ROOT, "stop")
    base = list(reference.args)
    options, delay, condition, pause = moments(out)[where]
    what = f"{name} {where}, {ranks} ranks, to {to}"
    if ranks > 1 and to != "mpirun" and where == "in an evaluation":
        options[3] = "4000"  # ranks that were not asked come to its end
    p = start(base + ["--steps", str(reference.steps), "--out", out] + options, ranks=ranks, delay=delay, program=program)
    wait_for(condition, what, p=p)
    time.sleep(pause + 0.02 * r.random())
    targets = [p.pid]
    if ranks > 1:
        pids = rank_pids(p)
        check(len(pids) == ranks, f"{what}: {len(pids)} ranks run")
        targets = [p.pid] if to == "mpirun" else [pids[int(to)]]
    for pid in targets:
        send(pid, SIGNALS[name])
    _, text, err = finish(p, (75,), what)
    m = re.search(r"stopped by (\S+)(?: to rank \d)? at step (\d+) of", text)
    check(m and m.group(1) == "SIG" + name, f"{what}: {text[-300:]}")
    step = int(m.group(2))
    check(reference.check_visible(out, what)[-1] == step, f"{what}: the checkpoint is not that of step {step}")
    if where == "in an evaluation":
        endless = options[3] != "4000"
        check(step == 4 and not log_lines(out, ("eval",)) or not endless, f"{what}: stopped at step {step}")
    if where == "in the first step":
        check(step in (0, 1), f"{what}: stopped at step {step}")
    run(base + ["--steps", str(reference.steps), "--out", out, "--resume", "auto", "--save-every", "5"], ranks=ranks,
        program=program)
    reference.check_end(out, what)
    shutil.rmtree(out)
    return step


def zero_state(reference, program=None):
    """The state after 0 steps: what a stop in the first step saves."""
    out = os.path.join(ROOT, "zero")
    run(reference.args + ["--steps", str(reference.steps), "--out", out], want=(75,), fault="stop@1", program=program,
        ranks=reference.ranks)
    found = step_folders(out)
    check(list(found) == [0], f"stopped in the first step: {found}")
    reference.state[0] = state(found[0])
    shutil.rmtree(out)


def test_stops(r, rounds, names=("USR1", "TERM", "INT"), program=None):
    reference = Reference("stops-whole", SMALL, STEPS, program=program)
    # in the first step: steps of 2048 rows, about a quarter of a second each
    large = Reference("stops-large", [a if a != "128" else "32768" for a in SMALL], 3, program=program)
    for x in (reference, large):
        zero_state(x, program)
    count = 0
    for _ in range(rounds):
        for name in names:
            for where in moments(""):
                stop_case(large if where == "in the first step" else reference, where, name, r, program=program)
                count += 1
    shutil.rmtree(reference.out)
    shutil.rmtree(large.out)
    return f"{count} stops, each with a checkpoint and exit 75"


def test_stops_of_ranks(r, rounds, ranks, program=None):
    """USR1 to mpirun, and USR1, TERM and INT to one rank."""
    if not has_ranks():
        raise Skip(f"{ranks} ranks: no mpirun, or a program without MPI")
    reference = Reference(f"stops-{ranks}", RANKS, STEPS, ranks, program=program)
    zero_state(reference, program)
    wheres = ("in an evaluation", "in a save", "in a later step")
    cases = [(where, name, to) for to in ["mpirun"] + [str(i) for i in range(ranks)]
             for name in (SIGNALS if to != "mpirun" else ("USR1",)) for where in wheres] * rounds
    cases = cases or [("in a save", "USR1", "mpirun"), ("in a later step", "TERM", "1")]
    for where, name, to in cases:
        stop_case(reference, where, name, r, ranks, to, program)
    shutil.rmtree(reference.out)
    return f"{len(cases)} stops"


def test_mpirun_is_stopped(r, rounds, program=None):
    """TERM or INT to mpirun itself: it kills the ranks within two seconds; the last checkpoint is whole."""
    if not has_ranks():
        raise Skip("no mpirun, or a program without MPI")
    reference = Reference("mpirun-whole", RANKS, STEPS, 2, program=program)
    zero_state(reference, program)
    out = os.path.join(ROOT, "mpirun")
    args = RANKS + ["--steps", str(STEPS), "--out", out]
    for _ in range(rounds):
        for name in ("TERM", "INT"):
            p = start(args + ["--save-every", "2"], ranks=2, delay="fdatasync:100000", program=program)
            wait_for(lambda: len(step_folders(out)) >= 2, "two checkpoints", p=p)
            time.sleep(0.3 * r.random())
            pids = rank_pids(p).values()
            p.send_signal(SIGNALS[name])
            p.communicate(timeout=15)
            check(p.returncode != 0, f"{name} to mpirun: exit 0")
            wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the ranks to end", 5)
            check(reference.check_visible(out, f"{name} to mpirun"), f"{name} to mpirun: no checkpoint")
            run(args + ["--resume", "auto", "--save-every", "2"], ranks=2, program=program)
            reference.check_end(out, f"{name} to mpirun")
            shutil.rmtree(out)
    return f"{2 * rounds} times"


def test_second_interrupt(r, rounds, program=None):
    """A second INT, inside the save that the first one asked for: the end at once; what was whole before still is."""
    reference = Reference("second-whole", SMALL, STEPS, program=program)
    out = os.path.join(ROOT, "second")
    args = SMALL + ["--steps", str(STEPS), "--out", out, "--keep", "0"]
    for i in range(rounds):
        stop = r.randrange(4, 20)
        run(args, want=(75,), fault=f"stop@{stop}", program=program)
        p = start(args + ["--resume", "auto", "--save-every", "5"], delay="fdatasync:2000000", program=program)
        wait_for(lambda: glob.glob(os.path.join(out, ".tmp-step-*")), "a save", p=p)
        p.send_signal(signal.SIGINT)
        time.sleep(0.05 + 0.3 * r.random())
        check(p.poll() is None, "the first INT ended the program inside a save")
        begin = time.time()
        p.send_signal(signal.SIGINT)
        finish(p, (-signal.SIGINT,), "a second INT")
        took = time.time() - begin
        check(took < 4, f"a second INT took {took:.1f} s")
        found = reference.check_visible(out, "a second INT")
        check(stop - 1 in found, f"the checkpoint of step {stop - 1} is gone: {found}")
        run(args + ["--resume", "auto"], program=program)
        reference.check_end(out, "a second INT")
        shutil.rmtree(out)
    shutil.rmtree(reference.out)
    return f"{rounds} times"


def test_second_job(program=None):
    """Two jobs in one folder: the second one is refused and names the first; after kill -9 the folder is free."""
    reference = Reference("job-whole", SMALL, STEPS, program=program)
    out = os.path.join(ROOT, "job")
    args = SMALL + ["--steps", str(STEPS), "--out", out, "--save-every", "2"]
    p = start(args, delay="fdatasync:200000", program=program)
    wait_for(lambda: step_folders(out), "a checkpoint", p=p)
    _, _, err = run(args + ["--resume", "auto"], want=(5,), program=program)
    check("in use by another job" in err and str(p.pid) in err, err)
    p.kill()
    p.communicate()
    text = run(args + ["--resume", "auto"], program=program)[1]
    check("taken over" in text, text[:500])
    reference.check_end(out, "a second job")
    shutil.rmtree(out)


def tests(counter, long):
    seed = random.randrange(1 << 30) if long else 13
    r = random.Random(seed)
    print(f"seed {seed}")
    counter.case("USR1, TERM, INT at five moments", test_stops, r, 10 if long else 1)
    counter.case("a second INT", test_second_interrupt, r, 20 if long else 2)
    counter.case("a second job in the folder", test_second_job)
    if long:
        counter.case("signals to mpirun and to one of 2 ranks", test_stops_of_ranks, r, 1, 2)
        counter.case("signals to mpirun and to one of 3 ranks", test_stops_of_ranks, r, 1, 3)
        counter.case("TERM and INT to mpirun", test_mpirun_is_stopped, r, 5)
    else:
        counter.case("signals to mpirun and to one of 2 ranks", test_stops_of_ranks, r, 0, 2)
