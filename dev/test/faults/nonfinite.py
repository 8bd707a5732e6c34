"""nonfinite.py: NaN and Inf in gradients, losses and weights. The update of such a step is left out: weights, moments and
counters stay as they are, bit for bit, and the next step is what it would be had the batch been dropped; after
--max-skips in a row the run ends with 78.
"""
from common import *  # noqa: F401,F403
import variants

STEPS = 10
VALUES = ("NAN", "-NAN", "INFINITY", "-INFINITY")

# GDN_INJECT=STEP:PLACE:VALUE[:RANK]: the value into the first element of the gradient of tensor PLACE, or for -1 into
# the loss, in front of the reduction over ranks
INJECT = ("train.h", 'if (last && fault_is_due("nan", t->step + 1)) {', '''
  long at_step = 0, place = 0, only = -1;
  char value[16] = "";
  if (getenv("GDN_INJECT")) sscanf(getenv("GDN_INJECT"), "%ld:%ld:%15[^:]:%ld", &at_step, &place, value, &only);
  if (last && at_step == t->step + 1 && (only < 0 || only == program_rank)) {
    float bad = strtof(value, NULL);
    if (place < 0) own->loss_sum = bad;
    else m->api->write(m->engine, ARENA_GRAD, m->table.specs[place].offset, 1, &bad);
  }
  if (last && fault_is_due("nan", t->step + 1)) {''')


def tensor_names(out):
    with open(os.path.join(step_dir(out, 1), "model.safetensors"), "rb") as f:
        n, = trainer.struct.unpack("<Q", f.read(8))
        return [k for k in json.loads(f.read(n)) if k != "__metadata__"]


def dropped_batch(args, whole, step, name, program, ranks=1):
    """The run in which the batch of `step` was dropped by hand: the checkpoint before it, its counters set one further."""
    out = os.path.join(ROOT, name)
    shutil.copytree(whole, out)
    for s, folder in step_folders(out).items():
        if s >= step:
            shutil.rmtree(folder)

    def change(m):
        m["samples"] += m["samples"] // m["step"]
        m["tokens"] += m["tokens"] // m["step"]
        m["step"] += 1
        m["skipped"] += 1
        m["trainer"]["skips_in_row"] += 1

    manifest_edit(step_dir(out, step - 1), change)
    os.rename(step_dir(out, step - 1), step_dir(out, step))
    run(args + ["--out", out, "--resume"], program=program, ranks=ranks)
    return out


def test_injected(r, ranks, places, program=None, whole_program=None):
    """A non-finite value at a place, on one rank or all, in one step. whole_program: makes the runs to compare with."""
    if ranks > 1 and not has_ranks():
        raise Skip(f"{ranks} ranks: no mpirun, or a program without MPI")
    built = program or variants.build(f"inject-{ranks}", [INJECT], mpi=ranks > 1)
    base = RANKS if ranks > 1 else SMALL
    args = base + ["--steps", str(STEPS), "--save-every", "1", "--keep", "0"]
    whole = os.path.join(ROOT, f"nan-whole-{ranks}")
    run(args + ["--out", whole], program=whole_program or built, ranks=ranks)
    names = tensor_names(whole)
    step = 5
    dropped = dropped_batch(args, whole, step, f"nan-dropped-{ranks}", whole_program or built, ranks)
    want = {s: state(f) for s, f in step_folders(dropped).items()}
    check(want[step] == state(step_dir(whole, step - 1)), "the run with the dropped batch begins with another state")
    check(want[step + 1] != want[step], "the step after the dropped batch changed nothing")
    cases = [(-1, v) for v in VALUES] + [(i, r.choice(VALUES)) for i in range(len(names))]
    if places and len(cases) > places:
        cases = cases[:2] + r.sample(cases[2:], places - 2)
    out = os.path.join(ROOT, f"nan-{ranks}")
    for n, (place, value) in enumerate(cases):
        rank = n % ranks
        what = f"{value} in {'the loss' if place < 0 else 'the gradient of ' + names[place]} of rank {rank}"
        where = f"{step}:{place}:{value}" + (f":{rank}" if ranks > 1 else "")
        _, _, err = run(args + ["--out", out], program=built, ranks=ranks, what=what, GDN_INJECT=where)
        check(f"step {step}: update skipped" in err, f"{what}: {err[-300:]}")
        for s, folder in step_folders(out).items():
            if s < step:
                check(state(folder) == state(step_dir(whole, s)), f"{what}: step {s} before it differs")
            else:
                check(state(folder) == want[s], f"{what}: step {s} is not that of the run without the batch")
            with open(os.path.join(folder, "manifest.json")) as f:
                m = json.load(f)
            check(m["skipped"] == (s >= step) and m["trainer"]["skips_in_row"] == (s == step), f"{what}: counters at step {s}")
        lines = [e for e in log_lines(out, ("step",)) if e["skipped"]]
        check([e["step"] for e in lines] == [step], f"{what}: skipped in the log: {lines}")
        # only the injected value may be missing from the log; all others are as in the run without the batch
        for a, b in zip(log_lines(out, ("step",)), log_lines(dropped, ("step",))):
            if a["step"] > step:
                check(a == b, f"{what}: the log after it: {a}, needed {b}")
        shutil.rmtree(out)
    for path in (whole, dropped):
        shutil.rmtree(path)
    return f"{len(cases)} places and values"


def test_weights(r, count, program=None):
    """Weights or moments that are not finite, in a checkpoint whose hashes are right: a run does not begin with them, and
    what lies there stays as it is."""
    whole, out = os.path.join(ROOT, "weights-whole"), os.path.join(ROOT, "weights")
    args = SMALL + ["--steps", str(STEPS), "--save-every", "1", "--keep", "0", "--eval-every", "0"]
    run(args + ["--out", whole], want=(75,), fault="stop@4", program=program)
    names = tensor_names(whole)
    if count < len(names):
        names = r.sample(names, count)
    for name in names:
        value = r.choice((float("nan"), float("inf"), float("-inf")))
        name = r.choice(("", "", "exp_avg.", "exp_avg_sq.")) + name
        what = f"{value} in {name}"
        shutil.copytree(whole, out)
        folder = step_dir(out, 3)
        path = os.path.join(folder, "trainer_state.safetensors" if name.startswith("exp_avg") else "model.safetensors")
        with open(path, "r+b") as f:
            n, = trainer.struct.unpack("<Q", f.read(8))
            begin, end = json.loads(f.read(n))[name]["data_offsets"]
            at = r.randrange((end - begin) // 4)
            f.seek(8 + n + begin + 4 * at)
            f.write(trainer.struct.pack("<f", value))
        manifest_edit(folder, lambda m: None)
        kept, before = state(folder), sorted(step_folders(out))
        _, _, err = run(args + ["--out", out, "--resume"], want=(5,), what=what, program=program)
        check(f"tensor {name}: element {at} is " in err, f"{what}: {err[-300:]}")
        check(sorted(step_folders(out)) == before and state(folder) == kept, f"{what}: the checkpoints have changed")
        shutil.rmtree(out)
    shutil.rmtree(whole)
    return f"{len(names)} tensors"


def test_divergence(program=None):
    """--max-skips in a row end the run with 78, fewer do not, over a resume too."""
    out = os.path.join(ROOT, "diverge")
    args = SMALL + ["--steps", "12", "--save-every", "1", "--max-skips", "4"]
    run(args + ["--out", out], fault="nan@3,nan@4,nan@5,nan@7,nan@8,nan@9", program=program)
    shutil.rmtree(out)
    _, _, err = run(args + ["--out", out], want=(78,), fault="nan@3,nan@4,nan@5,nan@6", program=program)
    check("diverged: 4 steps in a row" in err, err)
    shutil.rmtree(out)
    run(args + ["--out", out], want=(75,), fault="nan@3,nan@4,nan@5,stop@6", program=program)
    run(args + ["--out", out, "--resume"], want=(78,), fault="nan@6", program=program)
    run(args + ["--out", out, "--resume"], program=program)  # without the cause it goes on
    shutil.rmtree(out)


def tests(counter, long):
    seed = random.randrange(1 << 30) if long else 15
    r = random.Random(seed)
    print(f"seed {seed}")
    counter.case("injected into gradients and the loss", test_injected, r, 1, 0 if long else 8)
    counter.case("weights that are not finite", test_weights, r, 1000 if long else 6)
    counter.case("the end after --max-skips", test_divergence)
    if long:
        counter.case("injected, 2 ranks", test_injected, r, 2, 12)
        counter.case("injected, 3 ranks", test_injected, r, 3, 12)
