"""disk.py: failing calls, full and read-only and vanished folders. The program goes on or ends with its code and a
reason; nothing it leaves visible is wrong; once the trouble is over, --resume auto ends in the same bits.
"""
from common import *  # noqa: F401,F403

STEPS = 8
WRITING = ("open", "write", "pwrite", "fsync", "fdatasync", "ftruncate", "rename", "close", "mkdir", "unlink", "rmdir",
           "mmap", "flock")
READING = ("open", "pread", "close")
SAID = re.compile(r"error: |warning: ")
MANY = re.compile(r"[3-9] saves in a row failed")  # the writer may have begun another one before it is looked at


def saving(out, resume=False):
    """A run with a save at every second step; the first two go again when the third is there."""
    return SMALL + ["--steps", str(STEPS), "--save-every", "2", "--keep", "2", "--out", out] + \
        (["--resume", "auto"] if resume else [])


def count_calls(args, ops, what, match=None, program=None):
    """How often a run makes each call, on files whose path holds `match`."""
    trace = os.path.join(ROOT, "count.trace")
    run(args, trace=trace, what=what, program=program)
    calls = [op for op, _, paths in trace_lines(trace) if not match or match in paths[0]]
    os.unlink(trace)
    return {op: calls.count(op) for op in ops}


def check_after(reference, out, what, code, err, program=None):
    """After a run in which a call failed: what is visible is right, and the next start ends in the same bits."""
    check(code in (0, 5), f"{what}: exit {code}: {err[-600:]}")
    if code == 5:
        errors = [line for line in err.splitlines() if ": error: " in line]
        check(len(errors) == 1, f"{what}: needed one line that says why, found {err!r}")
    if os.path.isdir(out):
        reference.check_visible(out, what)
    run(saving(out, True), what=f"resume after {what}", program=program)
    reference.check_end(out, what)
    if os.path.isdir(out):
        shutil.rmtree(out)


def failing_calls(reference, r, most, errnos, program=None, ops=WRITING, match=None):
    """Each call of a run fails in turn, once. most: of one kind that are tried (None: all). match: on files whose path
    holds it, and then each failure has to be said. Returns a count by call."""
    out = os.path.join(ROOT, "failing")
    counts = count_calls(saving(out), ops, "a run to be counted", match, program)
    shutil.rmtree(out)
    tried = {}
    for op in ops:
        numbers = list(range(1, counts[op] + 1))
        if most is not None and len(numbers) > most:
            numbers = sorted(r.sample(numbers, most))
        kinds = errnos + (["SHORT"] if op in ("write", "pwrite") and ops is WRITING else [])
        tried[op] = 0
        for n in numbers:
            for kind in ([r.choice(kinds)] if most is not None else kinds):
                what = f"{op} {n} of {counts[op]} fails with {kind}"
                code, _, err = finish(start(saving(out), faults=f"{op}:{n}:{kind}", match=match, program=program), (0, 5), what)
                # a short write is no failure, nor is an old file that cannot be removed at once
                if kind != "SHORT" and op not in ("unlink", "rmdir"):
                    check(SAID.search(err) or not match and op in ("open", "close"), f"{what}: nothing was said")
                check_after(reference, out, what, code, err, program)
                tried[op] += 1
    return tried


def test_failing_calls(r, most, errnos, program=None):
    reference = Reference("failing-whole", SMALL, STEPS, program=program)
    tried = failing_calls(reference, r, most, errnos, program)
    for op in ("open", "close"):
        tried[op] += failing_calls(reference, r, most, errnos, program, (op,), ".safetensors")[op]
    return ", ".join(f"{op} {n}" for op, n in tried.items())


def failing_calls_of(r, ops, kinds, program, match=None):
    """test_failing_calls for some calls and kinds of errors alone."""
    reference = Reference("some-whole", SMALL, STEPS, program=program)
    failing_calls(reference, r, 12, kinds, program, ops, match)
    shutil.rmtree(reference.out)


def test_failing_reads(r, most, program=None):
    """The calls of a start that goes on from a checkpoint fail in turn: it falls back to the one before, or ends with 5."""
    reference = Reference("reads-whole", SMALL, STEPS, program=program)
    base, out = os.path.join(ROOT, "reads-base"), os.path.join(ROOT, "reads")
    run(saving(base), want=(75,), fault="stop@6", program=program)
    shutil.copytree(base, out)
    counts, tried = count_calls(saving(out, True), READING, "a resume to be counted", None, program), {}
    for op in READING:
        numbers = list(range(1, counts[op] + 1))
        if len(numbers) > most:
            numbers = sorted(r.sample(numbers, most))
        tried[op] = len(numbers)
        for n in numbers:
            shutil.rmtree(out)
            shutil.copytree(base, out)
            what = f"{op} {n} of {counts[op]} of a resume fails"
            code, _, err = finish(start(saving(out, True), faults=f"{op}:{n}:EIO", program=program), (0, 5), what)
            check_after(reference, out, what, code, err, program)
            shutil.copytree(base, out)
    return ", ".join(f"{op} {n}" for op, n in tried.items())


def test_memory_runs_out(r, count, program=None):
    """An allocation fails: the run ends with 6 and says what it was for, or a save fails; the next start goes on."""
    reference = Reference("memory-whole", SMALL, STEPS, program=program)
    out, ends = os.path.join(ROOT, "memory"), {0: 0, 5: 0, 6: 0}
    for i in range(count):
        n = 1 + int(1500 * (i + r.random()) / count)  # spread over the start and the steps
        what = f"allocation {n} fails"
        code, _, err = finish(start(saving(out), faults=f"malloc:{n}:ENOMEM", program=program), (0, 5, 6), what)
        if code:
            errors = [line for line in err.splitlines() if ": error: " in line]
            check(len(errors) == 1, f"{what}: needed one line that says why, found {err!r}")
        ends[code] += 1
        check_after(reference, out, what, 0, err, program)
    check(ends[6], f"no allocation was hit: {ends}")
    return f"{count} allocations, " + ", ".join(f"{n} ended with {code}" for code, n in ends.items())


def test_disk_stays_full(r, kinds, program=None):
    """From some call on nothing can be written any more: three saves fail, the run ends with 5; with room it goes on."""
    reference = Reference("full-whole", SMALL, 40, program=program)
    ends = 0
    for kind, op in kinds:
        out = os.path.join(ROOT, "full")
        args = SMALL + ["--steps", "40", "--save-every", "2", "--keep", "0", "--out", out]
        n = r.randrange(*{"pwrite": (130, 400), "fdatasync": (8, 60), "mkdir": (3, 15)}[op])  # of the second save or later
        what = f"{op} fails with {kind} from call {n} on"
        code, _, err = finish(start(args, faults=f"{op}:{n}:{kind}:+", match="/.tmp-", program=program), (5,), what)
        check(MANY.search(err), f"{what}: {err[-500:]}")
        before = reference.check_visible(out, what)
        check(before and max(before) < 40, f"{what}: visible: {before}")
        run(args + ["--resume", "auto"], program=program)
        reference.check_end(out, what)
        shutil.rmtree(out)
        ends += 1
    return f"{ends} ways"


def test_order_of_calls(program=None):
    """Before a checkpoint becomes visible all its files and its folder are on the disk, and so is the log up to its
    step; after that its name is."""
    out, trace = os.path.join(ROOT, "order"), os.path.join(ROOT, "order.trace")
    run(saving(out), trace=trace, program=program)
    dirty, seen, published, named = set(), {}, [], set()
    for op, _, paths in trace_lines(trace):
        path = paths[0]
        if op in ("pwrite", "write", "ftruncate"):
            dirty.add(path)
            names = seen.setdefault(os.path.dirname(path), set())
            if os.path.basename(path) not in names:  # a new name: its folder has to be synced after it
                dirty.add(os.path.dirname(path))
            names.add(os.path.basename(path))
        elif op == "mkdir":
            dirty.add(path)
        elif op in ("fsync", "fdatasync"):
            dirty.discard(path)
            if path == out:
                named |= set(published)
        elif op == "rename" and "/.tmp-step-" in path:
            dirty.discard(out)
            left = [p for p in dirty if p == path or p.startswith(path + "/")]
            check(not left, f"renamed to {os.path.basename(paths[1])} before these were synced: {left}")
            need = {"config.json", "manifest.json", "model.safetensors", "trainer_state.safetensors"}
            check(seen[path] == need, f"renamed with the files {sorted(seen[path])}, needed {sorted(need)}")
            check(len(published) == len(named), "the folder was not synced after the last rename")
            published.append(paths[1])
    check(len(published) == STEPS // 2, f"{len(published)} renames")
    check(len(named) == len(published), "the folder was not synced after the last rename")
    shutil.rmtree(out)
    return f"{len(published)} checkpoints"


def test_log_is_synced(program=None):
    """What the log says up to a checkpoint's step is on the disk before the checkpoint can be seen."""
    out, trace = os.path.join(ROOT, "log-order"), os.path.join(ROOT, "log-order.trace")
    run(saving(out), trace=trace, program=program)
    log, written, synced, checked = os.path.join(out, "log.jsonl"), 0, 0, 0
    for op, _, paths in trace_lines(trace):
        if paths[0] == log and op == "write":
            written += 1
        elif paths[0] == log and op in ("fsync", "fdatasync"):
            synced = written
        elif op == "rename" and "/.tmp-step-" in paths[0]:
            step = int(paths[1][-8:])
            check(synced >= step, f"step {step} became visible when {synced} lines of the log were on the disk")
            checked += 1
    check(checked == STEPS // 2, f"{checked} checkpoints")
    shutil.rmtree(out)
    return f"{checked} checkpoints"


# ----------------------------------------------------------------------------
# real file systems


class Mount:
    def __init__(self, name, *how):
        self.path = os.path.join(ROOT, name)
        os.makedirs(self.path, exist_ok=True)
        p = subprocess.run(["mount", *how, self.path], stderr=subprocess.PIPE)
        if p.returncode:
            raise Skip(f"nothing can be mounted here: {p.stderr.decode().strip()}")

    def __enter__(self):
        return self.path

    def __exit__(self, *_):
        subprocess.run(["umount", "-l", self.path])


def test_small_disk(program=None):
    """16 MB: a disk that other files fill up while the run goes on; one that runs out of inodes inside a save."""
    reference = Reference("small-whole", SMALL, 60, program=program)
    with Mount("small", "-t", "tmpfs", "-o", "size=16m", "none") as disk:
        out, ballast = os.path.join(disk, "run"), os.path.join(disk, "ballast")
        with open(ballast, "wb") as f:
            f.write(bytes(13 << 20))
        args = SMALL + ["--steps", "60", "--save-every", "1", "--keep", "0", "--out", out]
        _, _, err = run(args, want=(5,), program=program)
        check("are free" in err and MANY.search(err), f"a full disk: {err[-400:]}")
        before = reference.check_visible(out, "a full disk")
        check(10 < len(before) < 60, f"visible: {before}")
        os.unlink(ballast)
        run(args + ["--resume", "auto"], program=program)
        reference.check_end(out, "a full disk")
    with Mount("small", "-t", "tmpfs", "-o", "size=16m,nr_inodes=400", "none") as disk:
        out = os.path.join(disk, "run")
        ballast = [os.path.join(disk, str(i)) for i in range(340)]
        for path in ballast:
            open(path, "w").close()
        args = SMALL + ["--steps", "60", "--save-every", "1", "--keep", "0", "--out", out]
        _, _, err = run(args, want=(5,), program=program)
        check("No space left" in err and MANY.search(err), f"no inodes: {err[-400:]}")
        before = reference.check_visible(out, "no inodes")
        check(5 < len(before) < 60, f"visible: {before}")
        for path in ballast:
            os.unlink(path)
        run(args + ["--resume", "auto"], program=program)
        reference.check_end(out, "no inodes")
    return "no room, no inodes"


def test_read_only_folder(program=None):
    """From the start; and from the middle of a run on."""
    reference = Reference("ro-whole", SMALL, 60, program=program)
    out, other = os.path.join(ROOT, "ro"), os.path.join(ROOT, "ro-view")
    args = SMALL + ["--steps", "60", "--save-every", "1", "--keep", "2", "--out", out]
    os.makedirs(out)
    with Mount("ro-view", "--bind", out):
        subprocess.run(["mount", "-o", "remount,bind,ro", other], check=True)
        _, _, err = run(args[:-1] + [other], want=(5,), program=program)
        check("Read-only" in err and other in err, err)
        p = start(args, delay="rename:50000", program=program)
        wait_for(lambda: len(step_folders(out)) >= 2, "two checkpoints", p=p)
        with Mount("ro", "--bind", other):  # from here on the folder's name leads to the view that nobody can write to
            _, _, err = finish(p, (5,), "a folder that becomes read-only")
            check("Read-only" in err and MANY.search(err), err[-500:])
            run(args + ["--resume", "auto"], want=(5,), program=program)
    before = reference.check_visible(out, "a folder that becomes read-only")
    check(before, "no checkpoint is left")
    run(args + ["--resume", "auto"], program=program)
    reference.check_end(out, "a folder that becomes read-only")
    shutil.rmtree(out)
    return f"refused at the start; stopped at step {before[-1]} and went on"


def test_folder_removed(program=None):
    """In the middle of a run: it ends with 5 and says why; what another name still holds is whole."""
    out, moved = os.path.join(ROOT, "gone"), os.path.join(ROOT, "gone-moved")
    args = SMALL + ["--steps", "1000000", "--save-every", "2", "--out", out]
    for how in ("removed", "moved away", "replaced by a file"):
        p = start(args, program=program)
        wait_for(lambda: len(step_folders(out)) >= 2, "two checkpoints", p=p)
        os.rename(out, moved)
        if how == "removed":
            shutil.rmtree(moved)
        if how == "replaced by a file":
            open(out, "w").close()
        _, _, err = finish(p, (5,), f"the folder is {how}")
        check(MANY.search(err) and out in err, f"{how}: {err[-400:]}")
        if how == "replaced by a file":
            os.unlink(out)
        if how != "removed":
            small = {s: d for s, d in step_folders(moved).items()}
            check(small, "no checkpoint is left in the moved folder")
            for folder in small.values():
                run(["inspect", folder], program=program)
            shutil.rmtree(moved)
    return "removed, moved away, replaced by a file"


def test_slow_copy(ranks=1, program=None):
    """The copy for a save goes on while the next step's gradients are computed: its update waits, and the save holds
    the state from before it."""
    if ranks > 1 and not has_ranks():
        raise Skip(f"{ranks} ranks: no mpirun, or a program without MPI")
    reference = Reference(f"copy-{ranks}-whole", RANKS, 6, ranks, program=program)
    out = os.path.join(ROOT, f"copy-{ranks}")
    args = RANKS + ["--steps", "6", "--save-every", "2", "--keep", "0", "--out", out]
    run(args, ranks=ranks, program=program, fault=f"slow-copy@2,slow-copy@4:{ranks - 1}")
    reference.check_end(out, "copies that take a second")
    check(sorted(step_folders(out)) == [2, 4, 6], f"checkpoints {sorted(step_folders(out))}")
    with open(os.path.join(out, "log.jsonl")) as f:
        ms = {e["step"]: e["ms"] for e in map(json.loads, f) if e["kind"] == "step"}
    check(all(ms[s] >= 900 for s in (3, 5)), f"the updates after steps 2 and 4 did not wait: {ms}")


def tests(counter, long):
    seed = random.randrange(1 << 30) if long else 12
    r = random.Random(seed)
    print(f"seed {seed}")
    counter.case("order of calls before a checkpoint becomes visible", test_order_of_calls)
    counter.case("the log before a checkpoint becomes visible", test_log_is_synced)
    counter.case("each call of a run fails in turn", test_failing_calls, r, None if long else 4, ["EIO", "ENOSPC"])
    counter.case("each call of a resume fails in turn", test_failing_reads, r, 1000 if long else 4)
    counter.case("memory runs out", test_memory_runs_out, r, 300 if long else 10)
    kinds = [("ENOSPC", "pwrite"), ("EIO", "fdatasync"), ("EROFS", "mkdir")]
    counter.case("a slow copy, 1 rank", test_slow_copy)
    counter.case("a slow copy, 2 ranks", test_slow_copy, 2)
    counter.case("a disk that stays full", test_disk_stays_full, r, kinds * (10 if long else 1))
    counter.case("a 16 MB disk", test_small_disk)
    counter.case("a read-only folder", test_read_only_folder)
    counter.case("a folder that goes away", test_folder_removed)
