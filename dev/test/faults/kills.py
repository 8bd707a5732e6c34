"""kills.py: kill -9 at random moments. Every checkpoint that can be seen after a kill holds exactly the state of its
step, every start after it goes on by itself (--resume auto), and the end has the same bits and the same log as the run
that was never killed.
"""
from common import *  # noqa: F401,F403
from common import MPIRUN  # noqa: F401

# slow enough that a save takes a good part of the time between two: kills land inside
SLOW = {"delay": "pwrite:60,fdatasync:1200,fsync:1200,rename:1200,open:100,mkdir:1000,unlink:300,close:60"}
GONE = 10  # seconds after which all processes of a job must have ended


def all_gone(pids):
    def runs(pid):
        try:
            return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False
    return not any(runs(pid) for pid in pids)


def kill_job(p, ranks, r):
    """kill -9: of the process; of all ranks and mpirun at once; of one rank, after which mpirun ends the others."""
    if ranks == 1:
        p.kill()
        p.communicate()
        return
    pids = rank_pids(p)
    if len(pids) == ranks and r.random() < 0.4:
        send(pids[r.randrange(ranks)], signal.SIGKILL)
        wait_for(lambda: p.poll() is not None, f"mpirun to end after a rank's death {pids}", GONE)
        check(p.returncode != 0, "mpirun said that all went well")
    else:
        for pid in pids.values():
            send(pid, signal.SIGKILL)
        p.kill()
    p.communicate()
    wait_for(lambda: all_gone(pids.values()), "all ranks to end", GONE)


def kill_chain(reference, out, r, wanted, longest, program=None, slow=SLOW):
    """One run from its beginning to its end, killed again and again. Returns (kills, kills inside a save, starts)."""
    args = reference.args + ["--steps", str(reference.steps), "--out", out, "--resume", "auto"]
    kills = inside = starts = 0
    while kills < wanted:
        every = r.choice(("1", "2", "3"))
        p = start(args + ["--save-every", every, "--keep", r.choice(("1", "2", "3"))], ranks=reference.ranks,
                  program=program, quiet=True, **slow)
        starts += 1
        try:  # ends sooner when the run is over
            if reference.ranks > 1 and r.random() < 0.8:  # starting many ranks takes long: pass over most of that
                lock = os.path.join(out, "run.lock")
                wait_for(lambda: p.poll() is not None or (os.path.exists(lock) and os.path.getsize(lock)), "the lock")
            p.wait(timeout=r.uniform(0.02, longest))
        except subprocess.TimeoutExpired:
            pass
        if p.poll() is not None:
            finish(p, (0,), f"start {starts} of {out}")
            break
        kill_job(p, reference.ranks, r)
        kills += 1
        inside += bool(glob.glob(os.path.join(out, ".tmp-step-*")))
        if os.path.isdir(out):
            reference.check_visible(out, f"after kill {kills}")
    run(args + ["--save-every", "2", "--keep", "3"], ranks=reference.ranks, program=program, what=f"the last start of {out}")
    reference.check_end(out, f"{kills} kills, {inside} inside a save")
    return kills, inside, starts


def kill_test(ranks, wanted, wanted_inside, seed, steps=40, program=None):
    """Chains until there were so many kills, and so many of them inside a save."""
    if ranks > 1 and not has_ranks():
        raise Skip(f"{ranks} ranks: no mpirun, or a program without MPI")
    r = random.Random(seed)
    name = f"kills-{ranks}-{'plant' if program else 'run'}"
    reference = Reference(name + "-whole", RANKS, steps, ranks, program=program)
    kills = inside = chains = 0
    longest = 0.45 if ranks == 1 else 0.8
    while kills < wanted or inside < wanted_inside:
        check(kills < 3 * wanted + 50, f"only {inside} of {kills} kills hit a save")
        out = os.path.join(ROOT, f"{name}-{chains}")
        k, i, _ = kill_chain(reference, out, r, max(wanted - kills, 5), longest, program)
        kills, inside, chains = kills + k, inside + i, chains + 1
        shutil.rmtree(out)
    shutil.rmtree(reference.out)
    return f"{kills} kills, {inside} of them inside a save, {chains} runs, all ended in the same bits"


def tests(counter, long, kills):
    """kills: of the long form."""
    seed = random.randrange(1 << 30) if long else 11
    print(f"seed {seed}")
    if long:
        alone = kills * 6 // 10
        counter.case("kill -9, 1 rank", kill_test, 1, alone, alone // 3, seed)
        counter.case("kill -9, 2 ranks", kill_test, 2, kills * 2 // 10, kills * 2 // 30, seed + 1)
        counter.case("kill -9, 3 ranks", kill_test, 3, kills - alone - kills * 2 // 10, kills * 2 // 30, seed + 2)
    else:
        counter.case("kill -9, 1 rank", kill_test, 1, 24, 6, seed, 24)
        counter.case("kill -9, 2 ranks", kill_test, 2, 3, 0, seed + 1, 12)
