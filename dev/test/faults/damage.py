"""damage.py: damaged checkpoints and shards, through their readers (damage.c, with sanitizers) and through the whole
program: refused with file, found and needed, or passed over for the checkpoint before; never accepted, never a crash.
"""
from common import *  # noqa: F401,F403

TOOL = os.path.join(BUILD, "damage")


def tool(args):
    p = subprocess.run([TOOL] + args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=600)
    out = p.stdout.decode(errors="replace").strip()
    check(p.returncode == 0, f"exit {p.returncode}: {out[-800:]} {p.stderr.decode(errors='replace')[-800:]}")
    return out.splitlines()[-1]


def test_checkpoint_reader(count, seed):
    out = os.path.join(ROOT, "damage-reader")
    text = os.path.join(ROOT, "damage-text")
    train = text_shards("damage-text", [3000])
    run(SMALL + ["--train", train, "--vocab", "257", "--tokenizer", "bytes", "--out", out, "--steps", "4", "--save-every", "2"])
    said = tool(["checkpoints", out, str(count), str(seed)])
    shutil.rmtree(out)
    shutil.rmtree(text)
    return said


def test_shard_reader(count, seed):
    write = own_shard_writer()
    if not write:
        raise Skip("libxxhash cannot be called from Python")
    shards = text_shards("damage-shards", [9000, 5000, 13000], write_shard=write)
    return tool(["shards", shards, str(count), str(seed)])


def damage_file(path, r):
    """Damages a file in some way; returns the way."""
    with open(path, "rb") as f:
        data = bytearray(f.read())
    kinds = ["bit", "cut", "empty", "longer", "missing", "folder", "zeros"]
    if path.endswith("manifest.json"):
        kinds += 7 * ["digit"]  # of a counter: still good JSON
    kind = r.choice(kinds)
    os.unlink(path)
    if kind == "missing":
        return kind
    if kind == "folder":
        os.mkdir(path)
        return kind
    at = r.randrange(len(data))
    if kind == "bit":
        data[at] ^= 1 << r.randrange(8)
    if kind == "digit":
        at = r.choice([i for i in range(data.index(b'"files"')) if chr(data[i]) in "1234567" and data[i - 1:i] in b" 0123456789"])
        data[at] += 1
    if kind == "cut":
        del data[at:]
    if kind == "empty":
        data = b""
    if kind == "longer":
        data += b"\0"
    if kind == "zeros":
        while not any(data[at:at + 64]):
            at = r.randrange(len(data))
        data[at:at + 64] = bytes(len(data[at:at + 64]))
    with open(path, "wb") as f:
        f.write(data)
    return kind


def test_program_falls_back(count, r, program=None):
    """The newest checkpoint of a run is damaged: `inspect` refuses it, --resume auto says so, takes the one before, and
    ends in the same bits. Both damaged: exit 5."""
    steps = 10
    reference = Reference("damage-whole", SMALL, steps, program=program)
    base, out = os.path.join(ROOT, "damage-base"), os.path.join(ROOT, "damage-run")
    args = SMALL + ["--steps", str(steps), "--save-every", "3", "--keep", "0"]
    run(args + ["--out", base], want=(75,), fault="stop@8", program=program)
    check(sorted(step_folders(base)) == [3, 6, 7], "another set of checkpoints than this test is made for")
    names = sorted(os.listdir(step_dir(base, 7)))
    for i in range(count):
        shutil.copytree(base, out)
        name = names[i % len(names)]
        if i % 9 == 8:  # a file of another step, whole by itself
            kind = "of another step"
            if name == "config.json":
                name = "manifest.json"
            shutil.copy(os.path.join(step_dir(out, 6), name), os.path.join(step_dir(out, 7), name))
        else:
            kind = damage_file(os.path.join(step_dir(out, 7), name), r)
        what = f"{name}: {kind}"
        # a folder without a manifest is a Hugging Face folder; one of another step shows in the hashes of the others
        if name != "manifest.json" or kind not in ("missing", "of another step"):
            _, _, err = run(["inspect", step_dir(out, 7)], want=(5,), what=f"inspect, {what}", program=program)
            check(name in err, f"inspect, {what}: {err}")
        _, text, err = run(args + ["--out", out, "--resume", "auto"], what=what, program=program)
        check("passed over" in err and "step-00000007" in err, f"{what}: {err}")
        check("step-00000006, step 6" in text, f"{what}: went on from another one: {text[:400]}")
        shutil.rmtree(step_dir(out, 7))  # stays for whoever wants to look at it
        reference.check_end(out, what)
        shutil.rmtree(out)
    shutil.copytree(base, out)
    for step in (3, 6, 7):
        os.unlink(os.path.join(step_dir(out, step), "manifest.json"))
    _, _, err = run(args + ["--out", out, "--resume", "auto"], want=(5,), program=program)
    check("none of its 3 checkpoints is whole" in err, err)
    for path in (out, base, reference.out):
        shutil.rmtree(path)
    return f"{count} damaged, all passed over"


def test_program_refuses_shards(count, r, program=None):
    """A shard that is damaged before the start or in the middle of a run: exit 4 with the file's name; never trained on.
    Another set of shards than the checkpoint's: exit 5."""
    write = own_shard_writer()
    if not write:
        raise Skip("libxxhash cannot be called from Python")
    shards = text_shards("damage-data", [5000, 7000], write_shard=write)
    paths = sorted(glob.glob(shards))
    args = SMALL + ["--train", shards, "--vocab", "257", "--steps", "130", "--save-every", "50"]  # more than an epoch
    out = os.path.join(ROOT, "damage-shard-run")
    whole = {p: open(p, "rb").read() for p in paths}
    kinds = {}

    def restore():
        for p in paths:
            if os.path.isdir(p):
                os.rmdir(p)
            with open(p, "wb") as f:
                f.write(whole[p])

    for i in range(count):
        path = paths[i % 2]
        kind = damage_file(path, r)
        kinds[kind] = kinds.get(kind, 0) + 1
        if kind == "missing":  # a set of one shard is whole by itself
            restore()
            run(args + ["--out", out], want=(75,), fault="stop@2", program=program)
            os.unlink(path)
            _, _, err = run(args + ["--out", out, "--resume"], want=(5,), program=program)
            check(err.count("shards:") == 2, err)
        else:
            _, _, err = run(args + ["--out", out], want=(4,), what=f"{path}: {kind}", program=program)
            check(os.path.basename(path) in err, err)
        restore()
        shutil.rmtree(out, ignore_errors=True)
    run(args + ["--out", out], want=(75,), fault="stop@4", program=program)
    os.rename(paths[0], paths[0] + ".x")  # the two in each other's place
    os.rename(paths[1], paths[0])
    os.rename(paths[0] + ".x", paths[1])
    _, _, err = run(args + ["--out", out, "--resume"], want=(5,), program=program)
    check(err.count("shards:") == 2, err)
    shutil.rmtree(out)
    return f"{count} damaged, all refused: {kinds}"


def tests(counter, long):
    seed = random.randrange(1 << 30) if long else 14
    r = random.Random(seed)
    print(f"seed {seed}")
    counter.case("damaged checkpoints, the reader", test_checkpoint_reader, 10000 if long else 1200, seed)
    counter.case("damaged shards, the reader", test_shard_reader, 10000 if long else 800, seed)
    counter.case("damaged checkpoints, the program", test_program_falls_back, 90 if long else 12, r)
    counter.case("damaged shards, the program", test_program_refuses_shards, 60 if long else 8, r)
