"""plants.py: planted breaks. Each protection is taken out of a copy of the headers, one at a time; the test that guards
it must fail on that build. A test that stays green guards nothing.
"""
from common import *  # noqa: F401,F403
import damage
import disk
import kills
import nonfinite
import signals
import variants

def orders(program, r):
    disk.test_order_of_calls(program)


def log_orders(program, r):
    disk.test_log_is_synced(program)


def short_writes(program, r):
    disk.failing_calls_of(r, ("pwrite",), ["SHORT"], program)


def failed_writes(program, r):
    disk.failing_calls_of(r, ("pwrite",), ["ENOSPC"], program)


def failed_syncs(program, r):
    disk.failing_calls_of(r, ("fdatasync",), ["EIO"], program)


def failed_closes(program, r):
    disk.failing_calls_of(r, ("close",), ["EIO"], program, ".safetensors")


def full_disk(program, r):
    disk.test_disk_stays_full(r, [("ENOSPC", "pwrite")], program)


def slow_copy(program, r):
    disk.test_slow_copy(1, program)


def failed_reads(program, r):
    disk.test_failing_reads(r, 12, program)


def killed(program, r):
    kills.kill_test(1, 25, 5, 3, 24, program)


def damaged(program, r):
    damage.test_program_falls_back(40, r, program)


def damaged_shards(program, r):
    damage.test_program_refuses_shards(16, r, program)


def two_jobs(program, r):
    signals.test_second_job(program)


def stops(program, r):
    signals.test_stops(r, 1, ("USR1",), program)


def second_interrupt(program, r):
    signals.test_second_interrupt(r, 1, program)


def injected(program, r):
    nonfinite.test_injected(r, 1, 3, program, variants.build("inject", [nonfinite.INJECT]))


def diverges(program, r):
    nonfinite.test_divergence(program)


def rank_stops(program, r):
    signals.test_stops_of_ranks(r, 0, 2, program)


RENAME = "  if (checkpoint_publish(p->settings->out, tmp, dir))\n"
# name: (what guards it, patches, whether it is in the quick form)
PLANTS = {
    "files are not synced before the rename": (orders, [
        ("json.h", 'if (io_refused("sync", path)) return -1;', "return 0;")], 1),
    "the temporary folder is not synced before the rename": (orders, [
        ("checkpoint_write.h", "if (io_sync_dir(tmp)) return", "if (0) return")], 0),
    "the run's folder is not synced after the rename": (orders, [
        ("checkpoint_write.h", "  if (io_sync_dir(p->settings->out))\n", "  if (0)\n")], 0),
    "renamed before the manifest is written": (orders, [
        ("checkpoint_write.h", "  Error why = {EXIT_MEMORY, \"\"};\n",
         "  Error why = {EXIT_MEMORY, \"\"};\n  checkpoint_name(dir, p->settings->out, info->step);\n"
         "  if (checkpoint_publish(p->settings->out, tmp, dir)) return 5;\n  tmp = dir;\n"),
        ("checkpoint_write.h", RENAME, "  if (0)\n")], 1),
    "the log is not synced before a save": (log_orders, [
        ("train.h", "  log_sync(&t->log);", "")], 0),
    "written under its final name": (killed, [
        ("checkpoint_plan.h", '"%.3900s/.tmp-step-%08lld-%lld", out, (long long)step, (long long)pid);',
         '"%.3900s/step-%08lld", out, (long long)step + 0 * (long long)pid);'),
        ("checkpoint_write.h", RENAME, "  if (0)\n")], 0),
    "a short write is taken for a whole one": (short_writes, [
        ("json.h", "p += n, size -= (size_t)n, offset += n;\n  }\n  return 0;\n}\n\nstatic inline int io_truncate",
         "break;\n  }\n  return 0;\n}\n\nstatic inline int io_truncate")], 1),
    "a failed write is not looked at": (failed_writes, [
        ("json.h", "    if (n == 0) errno = EIO;\n    if (n <= 0) return -1;", "    if (n <= 0) return 0;")], 0),
    "a failed sync is not looked at": (failed_syncs, [
        ("json.h", "  while (rc < 0 && errno == EINTR);\n  return rc;", "  while (rc < 0 && errno == EINTR);\n  return 0;")], 0),
    "a failed close is not looked at": (failed_closes, [
        ("json.h", 'return io_refused("close", path) ? -1 : rc;', "return rc * 0;")], 0),
    "an update does not wait for the copy of a save": (slow_copy, [
        ("train.h", "    train_wait_copy(t);\n", "")], 1),
    "failed saves go on for ever": (full_disk, [
        ("train.h", "  if (failures < most) return 0;", "  if (failures < most || 1) return 0;")], 0),
    "hashes of files are not compared": (damaged, [
        ("manifest.h", "if (!rc && (!want || strcmp(want, hex)))", "if (0)")], 1),
    "the manifest's own hash is not compared": (damaged, [
        ("manifest.h", "if (!n || memcmp(text + n, tail, MANIFEST_TAIL)) {", "if (0) {")], 0),
    "sizes of files are not compared": (damaged, [
        ("manifest.h", "  if (found != size)\n", "  if (0)\n")], 0),
    "a damaged checkpoint ends the search": (damaged, [
        ("manifest.h", "for (int i = 0; i < list.n && !found; i++) {", "for (int i = 0; i < list.n && !found && !bad; i++) {")],
        0),
    "blocks of shards are not compared": (damaged_shards, [
        ("shards.h", "if (hash != s->block_hash[block])", "if (0)")], 0),
    "what identifies the data is not compared": (damaged_shards, [
        ("train_setup.h", "if (strcmp(info->data, t->train.fingerprint))", "if (0)")], 0),
    "the lock is not taken": (two_jobs, [
        ("runlock.h", "flock(lock->fd, LOCK_EX | LOCK_NB) != 0", "0")], 1),
    "the log is not cut": (killed, [
        ("log.h", "int rc = kept != size ?", "int rc = 0 ?")], 1),
    "what a killed save left is not removed": (killed, [
        ("train_setup.h", "if (first) checkpoint_clean(", "if (0) checkpoint_clean(")], 0),
    "moments are not loaded": (killed, [
        ("train_setup.h", "LOAD_PARAMS | LOAD_MOMENTS, model_write", "LOAD_PARAMS, model_write")], 0),
    "signals are not caught": (stops, [
        ("signals.h", '{SIGUSR1, "SIGUSR1"}, ', "")], 1),
    "an evaluation does not look for a stop": (stops, [
        ("evaluate.h", "if (stop && stop_requested(stop)) ", "if (0) ", 2)], 0),
    "a stop does not save": (stops, [
        ("train.h", "(code == EXIT_STOPPED || code == EXIT_DATA) &&", "(code == EXIT_DATA) &&")], 0),
    "the end does not wait for the save": (stops, [
        ("train.h", "int failed = train_check_saves(t, 1, &wait_err);", "_exit(code);\n  int failed = 0;")], 0),
    "a second INT is as the first": (second_interrupt, [
        ("signals.h", "if (number == SIGINT && stop_signal == SIGINT) {", "if (0) {")], 0),
    "ranks do not tell each other of a stop": (rank_stops, [
        ("train.h", "    if (!sum->code) sum->code = all[r].code;\n", ""),
        ("train.h", "  *sum = all[0];\n", "  *sum = all[c->rank];\n")], 0),
    "updates are not looked at": (injected, [
        nonfinite.INJECT, ("train.h", "s->skipped = !isfinite(s->loss) || !isfinite(s->grad_norm);", "s->skipped = 0;")], 1),
    "only the loss is looked at": (injected, [
        nonfinite.INJECT, ("train.h", "!isfinite(s->loss) || !isfinite(s->grad_norm);", "!isfinite(s->loss);")], 0),
    "a skipped step counts as an update": (injected, [
        nonfinite.INJECT, ("train.h", "return t->step - t->skipped; }", "return t->step; }")], 0),
    "the count of skips is lost by a resume": (diverges, [
        ("train_setup.h", "t->skips_in_row = (int)skips;", "t->skips_in_row = 0 * (int)skips;")], 0),
}


def clear():
    for name in os.listdir(ROOT):
        path = os.path.join(ROOT, name)
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def plant(name):
    guard, patches, _ = PLANTS[name]
    clear()
    program = variants.build("plant", patches, mpi=guard is rank_stops)
    try:
        guard(program, random.Random(5))
    except (Failure, subprocess.SubprocessError, OSError, ValueError, LookupError) as e:
        clear()
        return f"{guard.__name__}: {str(e).splitlines()[0][-110:]}"
    raise Failure(f"{guard.__name__} is green without it")


def guard_holds(guard):
    """The guard is green on a build without a break."""
    patches = [nonfinite.INJECT] if guard is injected else []
    guard(variants.build("whole", patches, mpi=guard is rank_stops), random.Random(5))
    clear()


def tests(counter, long):
    names = [name for name in PLANTS if long or PLANTS[name][2]]
    if not has_ranks():
        names = [name for name in names if PLANTS[name][0] is not rank_stops]
    if long:
        for guard in dict.fromkeys(PLANTS[name][0] for name in names):
            counter.case(f"nothing planted: {guard.__name__}", guard_holds, guard)
    for name in names:
        counter.case(f"planted: {name}", plant, name)
