#!/usr/bin/env python3
"""Tests of data/fineweb_edu.py and its kin: text in, shards out, whatever is killed, broken or damaged on the way.

python dev/test/test_fineweb.py                 the quick form
python dev/test/test_fineweb.py --kills 30      kill -9 that often in each stage
python dev/test/test_fineweb.py --sample FILE --tokenizer FILE
                                                also a sample of real text (.jsonl.gz) with a real tokenizer
python dev/test/test_fineweb.py --memory MB     also two jobs on a generated parquet file of so many MB, and a document
                                                of 100 MB, and what they take
"""

import argparse
import contextlib
import glob
import gzip
import hashlib
import http.server
import io
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DATA = os.path.join(ROOT, "data")
sys.path.insert(0, DATA)
import numpy as np  # noqa: E402
import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402
import sentencepiece  # noqa: E402

import cuts  # noqa: E402
import download  # noqa: E402
import fineweb_edu  # noqa: E402
import import_llmc  # noqa: E402
import options  # noqa: E402
import pipeline  # noqa: E402
import prepare  # noqa: E402
import shardfile  # noqa: E402
import sources  # noqa: E402
import tinyshakespeare  # noqa: E402
from journal import Journal  # noqa: E402

counts = {"passed": 0, "failed": 0, "skipped": 0}
COMMIT, OTHER_COMMIT = "ab" * 20, "cd" * 20


def check(ok, what):
    counts["passed" if ok else "failed"] += 1
    if not ok:
        print(f"FAILED: {what}")


def call(function, *args):
    """(exit code, stdout, stderr) of a main function, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = function(*args)
        except SystemExit as e:
            code = e.code
    return code, out.getvalue(), err.getvalue()


def run(*args, dataset=fineweb_edu.DATASET):
    return call(pipeline.main, dataset, list(map(str, args)))


def expect_ok(what, *args, **kw):
    code, out, err = run(*args, **kw)
    check(code == 0, f"{what}: exit code {code}: {err}")
    return out


def expect_error(what, code, parts, *args, dataset=fineweb_edu.DATASET):
    got, _, err = run(*args, dataset=dataset)
    check(got == code, f"{what}: exit code {got}, needed {code}: {err}")
    last = err.strip().split("\n")[-1]
    check(last.startswith(f"{dataset.name}.py: error: "), f"{what}: not one line: {err!r}")
    for part in parts:
        check(part in last, f"{what}: no '{part}' in: {last}")


def flip(path, at=None, mask=1):
    """Changes one byte; `at` may be a fraction of the file."""
    size = os.path.getsize(path)
    at = size // 2 if at is None else int(at * size) if isinstance(at, float) else at
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ mask]))


def results(out):
    """What a run has made: the hash of each shard and of the manifest."""
    found = {}
    for path in sorted(glob.glob(f"{out}/*.bin") + glob.glob(f"{out}/*_manifest.json")):
        with open(path, "rb") as f:
            found[os.path.basename(path)] = hashlib.sha256(f.read()).hexdigest()
    return found


def split_documents(pattern):
    """[tokens of a document] of all shards."""
    found = []
    for path in sorted(glob.glob(pattern)):
        header, tokens = shardfile.verify(path), shardfile.read_tokens(path)
        starts = np.fromfile(path, "<i8", header["documents"], offset=header["starts"])
        found += [tuple(d.tolist()) for d in np.split(tokens, starts[1:])]
    return found


# ----------------------------------------------------------------------------
# Text


def make_texts(n, seed, longest=60):
    rng = random.Random(seed)
    words = "the a of delta rule gate state key value naïve 日本 🙂 \n \t is was \u2581 . , in \n\n x\u2581y".split(" ")
    join = lambda: rng.choice([" ", " ", " ", "  ", "\n", ""])  # noqa: E731
    return ["".join(rng.choice(words) + join() for _ in range(rng.randrange(1, longest))) for _ in range(n)]


def make_model(path, **options):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(t.replace("\n", " ") for t in make_texts(400, 7)),
        model_writer=out,
        vocab_size=340,
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    with open(path, "wb") as f:
        f.write(out.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


PLAIN = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}


def write_parquet(path, texts, ids, rows=50, **kw):
    """FineWeb-Edu's columns."""
    n = len(texts)
    columns = {
        "text": texts,
        "id": ids,
        "dump": ["CC-MAIN-2024-10"] * n,
        "url": [f"https://example.org/{i}" for i in ids],
        "file_path": ["s3://commoncrawl/x.warc.gz"] * n,
        "language": ["en"] * n,
        "language_score": [0.95] * n,
        "token_count": [len(t) // 4 for t in texts],
        "score": [3.25] * n,
        "int_score": [3] * n,
    }
    os.makedirs(os.path.dirname(path), exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows, **kw)


# ----------------------------------------------------------------------------
# Parts


def test_cuts(tmp):
    """Parts give the tokens of the whole, and models that do not allow it are told apart."""
    model = make_model(f"{tmp}/plain.model", **PLAIN)
    with open(f"{tmp}/plain.model", "rb") as f:
        proto = f.read()
    check(cuts.can_cut(proto), "cuts: a plain BPE model can be cut")
    others = {
        "unigram": {**PLAIN, "model_type": "unigram"},
        "rules for characters": {**PLAIN, "normalization_rule_name": "nmt_nfkc"},
        "spaces removed": {**PLAIN, "remove_extra_whitespaces": True},
        "no space before the text": {**PLAIN, "add_dummy_prefix": False},
        "space at the end of a piece": {**PLAIN, "treat_whitespace_as_suffix": True},
        "pieces across spaces": {**PLAIN, "split_by_whitespace": False},
        "line feed in a piece": {**PLAIN, "user_defined_symbols": ["a\nb"]},
    }
    for what, kw in others.items():
        make_model(f"{tmp}/other.model", **kw)
        with open(f"{tmp}/other.model", "rb") as f:
            check(not cuts.can_cut(f.read()), f"cuts: {what} must not be cut")
    texts = make_texts(400, 11) + [" ", "  ", "a ", " a", "\n", "a\n", "\n\n\n", "a \nb \n c", "x " * 50, " " * 40]
    wrong = parts_made = 0
    for text in texts:
        whole = model.encode(text)
        for size in (1, 2, 7, 30):
            parts = list(cuts.cut(text, size))
            ids = model.encode([part for part, _ in parts])
            for part_ids, (_, drop) in zip(ids, parts):
                wrong += drop and part_ids.pop(0) != model.piece_to_id(cuts.SPACE)
            wrong += sum(ids, []) != whole
            parts_made += len(parts)
    check(wrong == 0, f"cuts: {wrong} texts give other tokens in parts")
    check(parts_made > 10 * len(texts), f"cuts: only {parts_made} parts of {len(texts)} texts")
    try:
        list(cuts.cut("x" * (cuts.LONGEST + 1)))
        check(False, "cuts: a part without limit")
    except ValueError as e:
        check("without a space" in str(e), f"cuts: {e}")


def test_journal(tmp):
    """Cut off anywhere, the journal is a beginning of itself; with any bit changed, it is refused."""
    path, entries = f"{tmp}/j.journal", [{"a": 1}, ["task", 0, 0, "x\u00e9"], ["task", 0, 1, "y"], ["done", {"n": 2}]]
    j = Journal(path)
    j.add(*entries[:1]), j.add(*entries[1:])
    j.close()
    with open(path, "rb") as f:
        data = f.read()
    check(Journal(path).entries == entries and Journal(path).done == {"n": 2}, "journal: read back")
    wrong = 0
    for size in range(len(data) + 1):
        with open(path, "wb") as f:
            f.write(data[:size])
        j = Journal(path)
        n = len(j.entries)
        wrong += j.entries != entries[:n] or n != data[:size].count(b"\n")
        if n < len(entries):
            j.add(*entries[n:])
            j.close()
            with open(path, "rb") as f:
                wrong += f.read() != data
    check(wrong == 0, f"journal: {wrong} of {len(data)} cuts")
    accepted = 0
    for at in range(len(data)):
        for bit in (1, 32, 128):
            with open(path, "wb") as f:
                f.write(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            try:
                Journal(path)
                accepted += 1
            except shardfile.DataError as e:
                accepted += "damaged" not in e.text or path not in e.text
    check(accepted == 0, f"journal: {accepted} changed bits were accepted")
    lines = data.split(b"\n")
    for kept in (lines[:1] + lines[2:], lines[:1] + lines[2:3] + lines[1:2] + lines[3:]):
        with open(path, "wb") as f:
            f.write(b"\n".join(kept))
        try:
            Journal(path)
            check(False, "journal: a line is missing or moved, not noticed")
        except shardfile.DataError:
            check(True, "")
    with open(path, "wb") as f:
        f.write(lines[0] + b"\n")
    try:
        Journal(path).begin({"a": 2})
        check(False, "journal: other settings accepted")
    except shardfile.DataError as e:
        check("a 1, now it is 2" in e.text, f"journal: {e.text}")


# ----------------------------------------------------------------------------
# Whole runs


class Set:
    """A generated dataset and the options of its runs: several segments, buckets, shards."""

    def __init__(self, tmp):
        self.model_path = f"{tmp}/plain.model"
        self.model = sentencepiece.SentencePieceProcessor(model_file=self.model_path)
        self.texts = make_texts(600, 5) + [""] + make_texts(3, 6, 3000)
        self.ids = [f"<urn:uuid:{i:08x}>" for i in range(len(self.texts))]
        self.folder = f"{tmp}/parquet"
        for i in range(3):
            part = slice(i * 210, min((i + 1) * 210, len(self.texts)))
            write_parquet(f"{self.folder}/{i:03d}_00000.parquet", self.texts[part], self.ids[part])
        self.sizes = ["--shard-tokens", 9000, "--bucket-bytes", 9000, "--segment-bytes", 20000]
        self.options = self.sizes + ["--val-fraction", 0.1, "--seed", 5, "--jobs", 1, "--keep-free", 0]
        self.options += ["--tokenizer", self.model_path, "--name", "e"]

    def args(self, stage, out, source=None):
        return [stage, "--from", source or self.folder, "--out", out] + self.options


def test_run(tmp, s):
    """Token for token what SentencePiece gives document by document, in the order of prepare.py --shuffle."""
    out = expect_ok("run", *s.args("all", f"{tmp}/whole"))
    check("verify: ok" in out and "1 empty" not in out.split("verify")[1], f"run: {out}")
    need = sorted(tuple([1] + s.model.encode(t)) for t in s.texts if t)
    train, val = (split_documents(f"{tmp}/whole/e_{k}_*.bin") for k in ("train", "val"))
    check(sorted(train + val) == need, "run: other documents than SentencePiece's")
    check(len(glob.glob(f"{tmp}/whole/e_train_*.bin")) > 3 and 30 < len(val) < 100, "run: shards")
    journal = Journal(f"{tmp}/whole/e.work/shuffle.journal")
    check(journal.entries[0]["buckets"] > 5 and len(journal.of("scattered")) > 3, "run: buckets and segments")
    left = os.listdir(f"{tmp}/whole/e.work")
    check(sorted(left) == ["fetch.journal", "shuffle.journal", "tokenize.journal"], f"run: left {left}")
    code, _, err = call(
        prepare.main,
        [s.folder, "--out", f"{tmp}/prepared", "--name", "e", "--tokenizer", s.model_path, "--shuffle", "5"]
        + ["--val-fraction", "0.1", "--shard-tokens", "9000", "--workers", "1", "--no-yardsticks"],
    )
    a, b = results(f"{tmp}/whole"), results(f"{tmp}/prepared")
    manifests = a.pop("e_manifest.json"), b.pop("e_manifest.json", None)
    check(code == 0 and a == b and manifests[1], f"run: other shards than prepare.py's: {err}")
    with open(f"{tmp}/whole/e_verify.json") as f:
        report = json.load(f)
    check(report["documents_compared"] > 80 and report["sources"] == 3, f"run: {report}")
    check(sum(report["tokens_of_documents"].values()) == len(need), f"run: {report}")
    # Again: nothing to do but verify. Two jobs, other inputs with the same documents: the same shards.
    expect_ok("again", *s.args("all", f"{tmp}/whole"))
    check(results(f"{tmp}/whole")["e_manifest.json"] == manifests[0], "again: other results")
    lines = "".join(json.dumps({"text": t, "id": i}) + "\n" for t, i in zip(s.texts, s.ids)).encode()
    import zstandard

    for name, content in (
        ("a.jsonl", lines),
        ("a.jsonl.gz", gzip.compress(lines)),
        ("a.jsonl.zst", zstandard.compress(lines)),
    ):
        with open(f"{tmp}/{name}", "wb") as f:
            f.write(content)
        two = name == "a.jsonl.gz"
        expect_ok(name, *s.args("all", f"{tmp}/{name}.out", f"{tmp}/{name}"), *(["--jobs", 2] if two else []))
        c = results(f"{tmp}/{name}.out")
        del c["e_manifest.json"]
        check(c == a, f"{name}: other shards")
    shutil.move(s.folder, f"{tmp}/away")  # sources that are gone
    missing = ["000_00000.parquet", "is missing"]
    expect_error("gone", 4, missing, *s.args("verify", f"{tmp}/whole"))
    expect_ok("gone", *s.args("verify", f"{tmp}/whole"), "--shards-only")
    shutil.move(f"{tmp}/away", s.folder)
    # Another seed needs the tokens; the same seed gives the same again.
    expect_ok("keep", *s.args("all", f"{tmp}/keep"), "--keep-tokens")
    expect_error("seed", 4, ["--seed 5", "6", "--force"], *s.args("shuffle", f"{tmp}/keep"), "--seed", 6)
    expect_ok("seed", *s.args("shuffle", f"{tmp}/keep"), "--seed", 6, "--force", "--keep-tokens")
    check(results(f"{tmp}/keep") != results(f"{tmp}/whole"), "seed: changes nothing")
    expect_ok("seed", *s.args("shuffle", f"{tmp}/keep"), "--force", "--keep-tokens")
    expect_ok("seed", *s.args("verify", f"{tmp}/keep"))
    expect_ok("shards only", *s.args("verify", f"{tmp}/keep"), "--shards-only")
    check(results(f"{tmp}/keep") == results(f"{tmp}/whole"), "keep: other results")
    # Bytes, text files.
    with open(f"{tmp}/plays.txt", "w") as f:
        f.write("\n\n".join(f"Speaker {i}:\nspeech {i * i}" for i in range(200)))
    args = ["--from", f"{tmp}/plays.txt", "--out", f"{tmp}/plays", "--bytes", "--separator", "\\n\\n", "--jobs", 1]
    expect_ok("text", "all", *args, "--val-fraction", 0.1)
    found = split_documents(f"{tmp}/plays/plays_*_0*.bin")
    need = sorted(tuple([256] + list(f"Speaker {i}:\nspeech {i * i}".encode())) for i in range(200))
    check(sorted(found) == need, "text: other documents")


def test_errors(tmp, s):
    out = ["--out", f"{tmp}/bad", "--tokenizer", s.model_path]
    expect_error("no fetch", 4, ["fetch is not done"], "tokenize", *out)
    expect_error("no shards", 4, ["e_manifest.json", "shuffle"], *s.args("verify", f"{tmp}/bad"))
    expect_error("no such file", 4, ["nothing.parquet"], "fetch", "--from", f"{tmp}/nothing.parquet", *out)
    expect_error("stage", 2, ["'pack'"], "pack", *out)
    expect_error("name", 2, ["--name"], "all", *out, "--name", "a/b")
    expect_error("jobs", 2, ["--jobs"], "all", *out, "--jobs", 0)
    expect_error("tokenizer", 4, ["SentencePiece"], *s.args("all", f"{tmp}/bad1"), "--tokenizer", f"{tmp}/plays.txt")
    expect_ok("tokens", *s.args("fetch", f"{tmp}/bad2")), expect_ok("tokens", *s.args("tokenize", f"{tmp}/bad2"))
    make_model(f"{tmp}/other.model", **{**PLAIN, "user_defined_symbols": ["qq"]})
    parts = ["tokenized with tokenizer"]
    expect_error("another tokenizer", 4, parts, *s.args("shuffle", f"{tmp}/bad2"), "--tokenizer", f"{tmp}/other.model")
    with pipeline.locked(f"{tmp}/bad2/e.work"):
        expect_error("two at once", 4, ["another run"], *s.args("shuffle", f"{tmp}/bad2"))
    # A disk that is too small: with the numbers, before anything is written.
    free = shutil.disk_usage(tmp).free / 1e9
    args = s.args("all", f"{tmp}/disk") + ["--keep-free", free - 20e-6]
    expect_error("disk", 3, ["not enough room", "GB needed (tokenize 0.000 GB", "--keep-free", "--out"], *args)
    check(not glob.glob(f"{tmp}/disk/e.work/*"), "disk: something was written")
    text = expect_ok("dry run", *s.args("all", f"{tmp}/dry"), "--dry-run")
    check("tokenize  to do" in text and "measured" in text and not os.path.exists(f"{tmp}/dry"), f"dry run: {text}")
    # A disk that fills up on the way (no file may grow beyond 15 kB): one line, and later it goes on.
    whole = results(f"{tmp}/whole")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (15000, 15000))  # noqa: E731
    p = subprocess.run(**subprocess_args(s.args("all", f"{tmp}/full")), preexec_fn=limit)
    err = p.stderr.decode()
    check(
        p.returncode == 4 and "File too large" in err and "go on" in err and err.count("\n") == 1, f"full disk: {err}"
    )
    expect_ok("after a full disk", *s.args("all", f"{tmp}/full"))
    check(results(f"{tmp}/full") == whole, "after a full disk: other results")
    # Bad documents.
    long = "x" * (cuts.LONGEST + 1)
    with open(f"{tmp}/b.jsonl", "w") as f:
        f.write("".join(json.dumps({"text": t, "id": str(i)}) + "\n" for i, t in enumerate(["good one", long, ""] * 2)))
        f.write("no json\n")
    args = s.args("all", f"{tmp}/long", f"{tmp}/b.jsonl") + ["--val-fraction", 0]
    expect_error("long", 4, ["b.jsonl", "xxx", "without a space", "--skip-bad"], *args)
    expect_error("other wish", 4, ["--skip-bad False", "--force"], *args, "--skip-bad")
    text = expect_ok("skip bad", *args, "--skip-bad", "--force")
    check("2 empty and 3 bad ones left out" in text, f"skip bad: {text}")


# ----------------------------------------------------------------------------
# Kills and damage


class Crash(BaseException):
    pass


def test_crashes(tmp, s, whole, stride):
    """A stop at every single step (or each stride-th) that reaches the disk; then a run that goes on."""
    names = [(os, "fsync"), (os, "fdatasync"), (os, "rename"), (os, "unlink"), (os, "truncate")]
    originals, left = [getattr(m, n) for m, n in names], [0]

    def step(original):
        def stepped(*args, **kw):
            left[0] -= 1
            if left[0] == 0:
                raise Crash()
            return original(*args, **kw)

        return stepped

    def crashing(stage, out, at):
        left[0] = at
        for (module, name), original in zip(names, originals):
            setattr(module, name, step(original))
        try:
            return call(pipeline.main, fineweb_edu.DATASET, list(map(str, s.args(stage, out))))[0]
        except Crash:
            return None
        finally:
            for (module, name), original in zip(names, originals):
                setattr(module, name, original)

    wrong = steps = 0
    base = f"{tmp}/crash_base"
    for stage in options.STAGES[:3]:
        os.makedirs(base, exist_ok=True)
        at = random.Random(stage).randrange(1, stride + 1)
        while True:
            out = f"{tmp}/crash"
            shutil.copytree(base, out)
            if crashing(stage, out, at) == 0:
                shutil.rmtree(out)
                break
            steps += 1
            code = crashing(stage, out, at // 2 + 1)  # a second one while it goes on
            code, _, err = run(*s.args(stage, out))
            if stage != "shuffle":  # on to the end from here for some
                if at % 5 == 1:
                    code = code or run(*s.args("all", out))[0]
            if code or (glob.glob(f"{out}/*.json") and results(out) != whole):
                wrong += 1
                print(f"FAILED: crashes: {stage} at step {at}: {code} {err}")
            shutil.rmtree(out)
            at += stride
        expect_ok(f"crashes: {stage}", *s.args(stage, base))
    check(wrong == 0 and steps * stride > 60, f"crashes: {wrong} of {steps} steps")
    check(results(base) == whole, "crashes: other results without one")
    shutil.rmtree(base)


def subprocess_args(args, env=None):
    command = [sys.executable, os.path.join(DATA, "fineweb_edu.py"), *map(str, args)]
    return {
        "args": command,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.PIPE,
        "env": {**os.environ, **(env or {})},
    }


def kill_at_random(what, stage, args, out, work, kills, rng, env=None):
    """Undisturbed for its time, then killed with -9 at random moments of the work, each time going on; the results."""
    base = f"{out}.base"
    shutil.copytree(out, base) if os.path.exists(out) else os.makedirs(base)

    def start():
        """The process, when its stage has begun to work."""
        p = subprocess.Popen(**subprocess_args(args, env))
        log, size = f"{out}/{work}/{stage}.journal", None
        limit = time.time() + 60
        while p.poll() is None and time.time() < limit:
            now = os.path.getsize(log) if os.path.exists(log) else 0
            size = now if size is None else size
            if now != size or (now and stage != "verify" and time.time() > limit - 59):
                break
            time.sleep(0.002)
        return p

    p = start()
    began = time.time()
    err = p.communicate()[1]
    duration = time.time() - began
    check(p.returncode == 0, f"{what}: undisturbed: {err}")
    undisturbed = results(out)
    hit = wrong = 0
    while hit < kills:
        shutil.rmtree(out)
        shutil.copytree(base, out)
        for _ in range(3):  # up to three in a row into one run
            p = start()
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(rng.uniform(0, duration))
            if p.poll() is not None:
                break
            p.kill()
            hit += 1
            p.communicate()
            if hit >= kills:
                break
        p = subprocess.Popen(**subprocess_args(args, env))
        err = p.communicate()[1]
        if p.returncode or results(out) != undisturbed:
            wrong += 1
            print(f"FAILED: {what}: after {hit} kills: {p.returncode}: {err.decode()}")
    check(wrong == 0, f"{what}: {wrong} times other results or an error")
    shutil.rmtree(base)
    print(f"{what}: {hit} kills, {duration:.2f} s of work undisturbed")


def test_kills(tmp, s, server, kills, whole):
    """kill -9 in each stage, at random moments; results bit for bit as without."""
    rng = random.Random(17)
    big = f"{tmp}/kill_source"  # about a second of work a stage
    texts = make_texts(6000 if kills > 5 else 2000, 23, 300)
    ids = [str(i) for i in range(len(texts))]
    n = len(texts) // 3
    for i in range(3):
        write_parquet(f"{big}/{i}.parquet", texts[i * n : (i + 1) * n], ids[i * n : (i + 1) * n], 100)
    sizes = ["--shard-tokens", 60000, "--bucket-bytes", 60000, "--segment-bytes", 200000, "--val-fraction", 0.05]
    rest = sizes + ["--jobs", 2, "--tokenizer", s.model_path, "--keep-free", 0, "--name", "e"]
    out = f"{tmp}/kill"
    for stage in ("tokenize", "shuffle", "verify"):
        args = lambda stage: [stage, "--from", big, "--out", out] + rest  # noqa: E731
        if stage == "tokenize":
            expect_ok("kills: fetch", *args("fetch"))
        kill_at_random(f"kill -9 in {stage}", stage, args(stage), out, "e.work", kills, rng)
    shutil.rmtree(out)
    server.slow = 0.002
    args = ["all", "--out", out] + rest
    kill_at_random("kill -9 in fetch", "fetch", args, out, "e.work", kills, rng, {"HF_ENDPOINT": server.url})
    server.slow = 0
    shutil.rmtree(out)


def test_damage(tmp, s, whole):
    """One changed byte, wherever it is, is found, and the message names the file."""
    base = f"{tmp}/damage_base"
    source = f"{tmp}/damage_source"
    shutil.copytree(s.folder, source)

    def at(stage, out):
        return s.args(stage, out, source)

    expect_ok("damage", *at("fetch", base))
    rng = random.Random(3)
    victim = f"{source}/001_00000.parquet"
    for _ in range(3):
        where = rng.randrange(os.path.getsize(victim))
        flip(victim, where, 1 << rng.randrange(8))
        shutil.copytree(base, f"{tmp}/damage")
        expect_error(f"parquet byte {where}", 4, [victim, "damaged", "checksum"], *at("tokenize", f"{tmp}/damage"))
        shutil.rmtree(f"{tmp}/damage")
        shutil.copy(f"{s.folder}/001_00000.parquet", victim)
    with open(victim, "ab") as f:
        f.write(b"x")
    shutil.copytree(base, f"{tmp}/damage")
    expect_error("parquet longer", 4, [victim, "has changed"], *at("tokenize", f"{tmp}/damage"))
    shutil.rmtree(f"{tmp}/damage")
    shutil.copy(f"{s.folder}/001_00000.parquet", victim)
    expect_ok("damage", *at("tokenize", base))

    def damaged(what, pattern, parts, stage, where=None, code=4):
        out = f"{tmp}/damage"
        shutil.copytree(base, out)
        path = sorted(glob.glob(f"{out}/{pattern}"))[0]
        flip(path, where)
        expect_error(what, code, [path] + parts, *at(stage, out))
        shutil.rmtree(out)

    for where in (0.1, 0.5, 0.9):
        damaged("tokens", "e.work/tokens_000001", ["damaged"], "shuffle", where)
        damaged("journal", "e.work/tokenize.journal", ["damaged", "line"], "shuffle", where)
        damaged("journal of fetch", "e.work/fetch.journal", ["damaged", "line"], "shuffle", where)
    # A bucket: the run is stopped between the passes.
    original, pieces = pipeline.buckets.write_shards, f"{tmp}/damage"

    def crash(*args):
        raise Crash()

    pipeline.buckets.write_shards = crash
    shutil.copytree(base, pieces)
    with contextlib.suppress(Crash):
        run(*at("shuffle", pieces))
    pipeline.buckets.write_shards = original
    for pattern in ("bucket_0003", "bucket_val"):
        flip(f"{pieces}/e.work/{pattern}")
        expect_error(pattern, 4, [pattern, "damaged"], *at("shuffle", pieces))
        flip(f"{pieces}/e.work/{pattern}")
    expect_ok("damage undone", *at("shuffle", pieces))
    sums = results(pieces)
    check(
        {k: v for k, v in sums.items() if k.endswith(".bin")} == {k: v for k, v in whole.items() if k.endswith(".bin")},
        "damage undone: other shards",
    )
    shutil.rmtree(pieces)
    expect_ok("damage", *at("shuffle", base))
    for where in (9, 100, 300, 0.5, 0.97, 0.9999):
        damaged(f"shard at {where}", "e_train_000001.bin", [], "verify", where)
    damaged("manifest", "e_manifest.json", [], "verify", 0)
    out = f"{tmp}/damage"
    shutil.copytree(base, out)
    os.rename(f"{out}/e_train_000001.bin", f"{out}/other")
    os.rename(f"{out}/e_train_000000.bin", f"{out}/e_train_000001.bin")
    os.rename(f"{out}/other", f"{out}/e_train_000000.bin")
    expect_error("shards swapped", 4, ["e_train_000000.bin", "manifest"], *at("verify", out))
    shutil.rmtree(out)
    flip(victim)
    expect_error("parquet, when it is verified", 4, [victim, "damaged"], *at("verify", base))
    flip(victim)
    # What no checksum of the shard can tell: well-formed shards of other documents.
    docs = split_documents(f"{base}/e_train_000001.bin")
    header = shardfile.read_header(f"{base}/e_train_000001.bin")
    w = shardfile.ShardWriter(f"{tmp}/forged.bin", header["vocab"], header["bos"], header["eos"], header["tokenizer"])
    for d in docs:
        w.add(np.array([d[0]] + [t ^ 1 for t in d[1:]]) % header["vocab"], len(d))
    w.close()
    os.rename(f"{tmp}/forged.bin", f"{base}/e_train_000001.bin")
    expect_error("forged", 4, ["e_train_000001.bin"], *at("verify", base))
    with open(f"{base}/e_manifest.json") as f:
        manifest = json.load(f)
    for shard in manifest["train"]["shards"]:
        if shard["file"] == "e_train_000001.bin":
            head = shardfile.read_header(f"{base}/e_train_000001.bin")
            shard["block_table_hash"] = f"{head['block_table_hash']:016x}"
    with open(f"{base}/e_manifest.json", "w") as f:
        json.dump(manifest, f)
    expect_error("forged with its manifest", 4, ["document", "no train shard"], *at("verify", base))


# ----------------------------------------------------------------------------
# The Hub


class Server(http.server.ThreadingHTTPServer):
    """The few calls of the Hub that fetch makes. faults: path -> what goes wrong, one request after the other."""

    daemon_threads = True

    def __init__(self, repo, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repo, self.files, self.commit, self.faults, self.log, self.slow = repo, files, COMMIT, {}, [], 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # a client that was killed


class Handler(http.server.BaseHTTPRequestHandler):

    def log_message(self, *args):
        pass

    def send(self, body, kind="application/json", status=200, **headers):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        s, path = self.server, urllib.parse.urlsplit(self.path)
        s.log.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        repo, query = s.repo, urllib.parse.parse_qs(path.query)
        name = urllib.parse.unquote(path.path)
        pending = s.faults.get(name, [])
        fault = pending.pop(0) if pending else None
        if fault in ("500", "503", "429"):
            return self.send(b"busy", "text/plain", int(fault), Retry_After="0")
        if fault == "html":
            return self.send(b"<!DOCTYPE html><html>Please sign in</html>", "text/html; charset=utf-8")
        if name == f"/api/datasets/{repo}/revision/main":
            return self.send(json.dumps({"id": repo, "sha": s.commit, "siblings": []}).encode())
        tree = f"/api/datasets/{repo}/tree/{s.commit}/"
        if name.startswith(tree):
            paths = [p for p in sorted(s.files) if p.startswith(name[len(tree) :])]
            page = int(query.get("cursor", ["0"])[0])  # two a page
            more = {}
            if page + 2 < len(paths):
                more["Link"] = f'<{s.url}{path.path}?recursive=True&expand=False&cursor={page + 2}>; rel="next"'
            return self.send(json.dumps([self.describe(p) for p in paths[page : page + 2]]).encode(), **more)
        match = re.fullmatch(rf"/datasets/{repo}/resolve/({COMMIT}|{OTHER_COMMIT})/(.*)", name)
        if match and match[1] == s.commit and match[2] in s.files:
            self.send_response(302)
            self.send_header("Location", f"{s.url.replace('127.0.0.1', 'localhost')}/store/{match[2]}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if name.startswith("/store/") and name[7:] in s.files:
            return self.send_file(s.files[name[7:]], fault)
        self.send(b'{"error": "not found"}', status=404, X_Error_Code="RevisionNotFound")

    def describe(self, path):
        data = self.server.files[path]
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry = {"type": "file", "path": path, "size": len(data), "oid": blob}
        if not path.endswith(".small.parquet"):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def send_file(self, data, fault):
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        begin = int(begin[1]) if begin and fault != "no range" else 0
        body, size = data[begin:], len(data)
        if fault == "flip":
            body = body[:10] + bytes([body[10] ^ 4]) + body[11:]
        if fault == "html of the same size":
            body = b"<html>".ljust(len(body))
        if begin:
            self.send_response(206)
            shift = 5 if fault == "wrong range" else 0
            self.send_header("Content-Range", f"bytes {begin + shift}-{size - 1}/{size}")
        else:
            self.send_response(200)
        extra = {"longer": 7, "shorter": -7}.get(fault, 0)
        if fault not in ("no length", "too much"):
            self.send_header("Content-Length", str(len(body) + extra))
        self.send_header("Content-Type", "application/octet-stream")
        self.end_headers()
        if fault == "too much":
            body += b"more"
        if fault and fault.startswith("break"):
            body = body[: len(body) * int(fault[5:]) // 100]
        for at in range(0, len(body), 4096):
            self.wfile.write(body[at : at + 4096])
            if self.server.slow:
                time.sleep(self.server.slow)
        if fault == "stall":
            self.wfile.flush()
            time.sleep(3)
        self.close_connection = True


def test_fetch(tmp, s, server, whole):
    """Whatever the network does: the files of the recorded commit, whole, or one line that says why not."""
    args = s.options + ["--retries", 2]
    names = [n for n in sorted(server.files) if n.endswith(".parquet")]
    original = dict(server.files)

    def fetch(what, faults, code=0, parts=(), out=None, stage="fetch", more=()):
        server.faults = {k: list(v) for k, v in faults.items()}
        server.log = []
        folder = out or f"{tmp}/f"
        command = [stage, "--out", folder] + args + list(more)
        got, text, err = run(*command)
        check(got == code, f"fetch, {what}: exit code {got}, needed {code}: {err}")
        for part in parts:
            check(part in err, f"fetch, {what}: no '{part}' in: {err}")
        good = all(
            open(p, "rb").read() == original[n] for n in names if os.path.exists(p := f"{folder}/e.work/source/{n}")
        )
        check(good, f"fetch, {what}: a file is wrong")
        have = [n for n in names if os.path.exists(f"{folder}/e.work/source/{n}")]
        check(code or len(have) == len(names), f"fetch, {what}: only {have}")
        if not out:
            shutil.rmtree(folder, ignore_errors=True)
        return err

    text = expect_ok("dry run of the Hub", "all", "--out", f"{tmp}/dry", *args, "--dry-run")
    check("3 files" in text and "assumed" in text and not os.path.exists(f"{tmp}/dry"), f"dry run of the Hub: {text}")
    store = f"/store/{names[1]}"
    api = f"/api/datasets/{server.repo}/revision/main"
    tree = f"/api/datasets/{server.repo}/tree/{COMMIT}/sample/10BT"
    os.environ["HF_TOKEN"] = "hf_secret"
    fetch("nothing wrong", {}, out=f"{tmp}/fetched")
    sent = {p.split("/")[1]: a for p, _, a in server.log}
    check(sent["datasets"] == "Bearer hf_secret" and sent["store"] is None, f"fetch: the token goes to {sent}")
    del os.environ["HF_TOKEN"]
    expect_ok("fetched", "all", "--out", f"{tmp}/fetched", *args)
    same = lambda d: {k: v for k, v in d.items() if k.endswith(".bin")}  # noqa: E731
    check(same(results(f"{tmp}/fetched")) == same(whole), "fetch: other shards than from the local files")
    with open(f"{tmp}/fetched/e_manifest.json") as f:
        check(json.load(f)["dataset"]["commit"] == COMMIT, "fetch: the commit in the manifest")
    fetch("broken connections", {store: ["break10", "break50", "break90", "break0", "500"]}, parts=["connection"])
    ranges = [r for p, r, _ in server.log if p == store and r]
    check(len(ranges) >= 4, f"fetch: gone on with {ranges}")
    fetch("broken connections that get nowhere", {store: ["break0"] * 9}, 4, [names[1], "after 0 of"])
    fetch("broken in the middle, then dead", {store: ["break50"] + ["500"] * 9}, 4, [names[1], "500", "are kept"])
    fetch("longer", {store: ["longer"]}, parts=["offers", "needed"])
    fetch("always shorter", {store: ["shorter"] * 9}, 4, [names[1], "offers", "needed"])
    fetch("no length", {store: ["no length"]})
    fetch("too much", {store: ["too much"]}, parts=["more than the"])
    fetch("no ranges", {store: ["break50", "no range"]})
    fetch("wrong range", {store: ["break50", "wrong range"]}, parts=["needed bytes from"])
    fetch("HTML page", {store: ["html"] * 9}, 4, [names[1], "text/html", "needed"])
    fetch("HTML page once", {store: ["html"]}, parts=["text/html"])
    fetch("HTML of the same size", {store: ["html of the same size"]}, parts=["looks like an HTML page"])
    fetch("one wrong bit", {store: ["flip"]}, parts=[names[1], "damaged", "trying again"])
    fetch("always wrong bits", {store: ["flip"] * 9}, 4, [names[1], "damaged: its checksum is"])
    fetch("busy", {store: ["429", "503"]}, parts=["429", "503"])
    fetch("API busy", {api: ["500", "html"], tree: ["503"]})
    fetch("API is an HTML page", {api: ["html"] * 99}, 4, ["cannot list"])
    timeout, download.TIMEOUT = download.TIMEOUT, 0.3
    server.files["sample/10BT/zz.parquet"] = server.files[names[0]]
    fetch("a stall", {"/store/sample/10BT/zz.parquet": ["stall"]})
    fetch("a stall in the middle", {store: ["break50"]}, parts=["connection"])
    download.TIMEOUT = timeout
    del server.files["sample/10BT/zz.parquet"]
    # A download that was damaged on the disk while the run was stopped, and one that grew too long.
    out = f"{tmp}/g"
    for change in (lambda p: flip(p), lambda p: open(p, "ab").write(bytes(10**6))):
        fetch("stopped", {store: ["break50"] + ["500"] * 9}, 4, out=out)
        part = f"{out}/e.work/source/{names[1]}.part"
        check(os.path.getsize(part) > 0, "fetch: nothing kept")
        change(part)
        fetch("damaged download", {}, out=out)
        shutil.rmtree(out)
    # The branch moves on between two runs: still the recorded commit; when that is gone, it is said.
    fetch("stopped", {store: ["500"] * 9}, 4, out=out)
    old = dict(server.files)
    moved = {**old, names[0]: old[names[0]] + b"new"}
    fetch("before the change", {store: ["500"] * 9}, 4, out=out)
    server.commit = OTHER_COMMIT
    fetch("the commit is gone", {}, 4, [COMMIT, "404"], out=out)
    server.files = moved
    fetch("other files there", {}, 4, [COMMIT, "404"], out=out)
    server.commit, server.files = COMMIT, old
    fetch("the commit is back", {}, out=out)
    with open(f"{out}/e.work/fetch.journal") as f:
        check(COMMIT in f.read(), "fetch: the commit in the journal")
    expect_error("another revision", 4, ["--revision main", "v2"], "fetch", "--out", out, *args, "--revision", "v2")
    # A file that is damaged later is named by tokenize; removed, it is fetched again.
    victim = f"{out}/e.work/source/{names[2]}"
    flip(victim)
    expect_error("damaged later", 4, [victim, "damaged", "fetch again"], "tokenize", "--out", out, *args)
    os.unlink(victim)
    fetch("again", {}, out=out)
    expect_ok("all after that", "all", "--out", out, *args)
    check(same(results(out)) == same(whole), "fetch: other shards after damage")
    shutil.rmtree(out)
    expect_error("no such revision", 4, ["v3"], "fetch", "--out", out, *args, "--revision", "v3")
    config = ["--config", "sample-100BT"]
    expect_error("nothing there", 4, ["no file sample/100BT"], "fetch", "--out", out, *args, *config)
    # Tokenizers by name, and a dataset of fixed addresses.
    with open(s.model_path, "rb") as f:
        model = f.read()
    server.files["tok"] = model
    table, url = dict(sources.TOKENIZERS), download.hub_url
    sources.TOKENIZERS["llama2"] = ("A/b", "tok", len(model), hashlib.sha256(model).hexdigest())
    download.hub_url = lambda repo, path, *_: f"{server.url}/store/{path}" if repo == "A/b" else url(repo, path, *_)
    plays = b"\n\n".join(b"Speaker %d:\nspeech" % i for i in range(100))
    server.files["plays"] = plays
    entry = ("input.txt", f"{server.url}/store/plays", len(plays), hashlib.sha256(plays).hexdigest())
    dataset = pipeline.dataclasses.replace(tinyshakespeare.DATASET, files=(entry,))
    expect_ok("fixed", "all", "--out", out, "--jobs", 1, dataset=dataset)
    check(len(split_documents(f"{out}/tinyshakespeare_*_0*.bin")) == 100, "fixed: documents")
    check(open(f"{out}/llama2-tokenizer.model", "rb").read() == model, "fixed: the tokenizer")
    flip(f"{out}/llama2-tokenizer.model")
    expect_error("tokenizer", 4, ["llama2-tokenizer.model", "damaged"], "verify", "--out", out, dataset=dataset)
    download.hub_url, sources.TOKENIZERS = url, table
    del server.files["plays"], server.files["tok"]
    shutil.rmtree(out)


# ----------------------------------------------------------------------------


def test_import(tmp):
    """llm.c's shards: the same documents, also where one goes on in the next file."""
    rng = np.random.default_rng(2)
    documents = [np.append(50256, rng.integers(0, 50256, rng.integers(1, 400))).astype("<u2") for _ in range(300)]
    stream = np.concatenate(documents)

    def write(name, tokens, version=1, magic=20240520, count=None):
        head = np.zeros(256, "<i4")
        head[:3] = magic, version, len(tokens) if count is None else count
        with open(f"{tmp}/{name}", "wb") as f:
            f.write(head.tobytes() + tokens.tobytes())
        return f"{tmp}/{name}"

    paths = [write(f"llmc_{i}.bin", p) for i, p in enumerate(np.array_split(stream, 7))]
    args = ["--out", f"{tmp}/llmc", "--name", "g", "--shard-tokens", "5000"]
    code, out, err = call(import_llmc.main, paths + args)
    found = split_documents(f"{tmp}/llmc/g_train_*.bin")
    check(code == 0 and found == [tuple(d.tolist()) for d in documents], f"import: other documents: {err}")
    check(len(glob.glob(f"{tmp}/llmc/*.bin")) > 5, "import: shards")
    code, out, err = call(import_llmc.main, paths[1:] + args + ["--force"])
    check(code == 0 and "was put before it" in out, f"import: {out} {err}")
    tokens = np.concatenate([shardfile.read_tokens(p) for p in sorted(glob.glob(f"{tmp}/llmc/g_train_*.bin"))])
    check(np.array_equal(tokens[1:], stream[-len(tokens) + 1 :]), "import: from the middle")
    for what, path, part in (
        ("version", write("x.bin", stream, version=2), "version 2"),
        ("magic", write("x2.bin", stream, magic=1), "magic"),
        ("cut", write("x3.bin", stream, count=len(stream) + 1), "the header counts"),
        ("id", write("x4.bin", np.append(stream, np.uint16(50257))), f"token {len(stream)} is 50257"),
    ):
        code, _, err = call(import_llmc.main, [path, "--out", f"{tmp}/llmc", "--name", what])
        check(code == 4 and part in err and path in err and err.count("\n") == 1, f"import, {what}: {code} {err}")


def test_sample(tmp, sample, tokenizer, jobs):
    """Real text: the .jsonl.gz and parquet made from it, token for token and document by document."""
    records = [json.loads(line) for line in gzip.open(sample, "rt", encoding="utf-8")]
    texts, ids = [r["text"] for r in records], [r["id"] for r in records]
    for i in range(3):
        write_parquet(f"{tmp}/sample/{i}.parquet", texts[i::3], ids[i::3], 200, compression="snappy")
    model = sentencepiece.SentencePieceProcessor(model_file=tokenizer)
    need = sorted(tuple([model.bos_id()] + model.encode(t)) for t in texts)
    for name, source in (("jsonl", sample), ("parquet", f"{tmp}/sample")):
        began, used = time.time(), os.times()
        p = subprocess.Popen(
            [sys.executable, f"{DATA}/fineweb_edu.py", "all", "--from", source, "--out", f"{tmp}/real", "--name", name]
            + ["--tokenizer", tokenizer, "--jobs", str(jobs), "--shard-tokens", "3000000", "--val-fraction", "0.02"],
            stdout=subprocess.PIPE,
            text=True,
        )
        out = p.communicate()[0]
        cpu = sum(os.times()[2:4]) - sum(used[2:4])
        print(out.strip().replace("\n", "\n  "))
        print(f"  {name}: {time.time() - began:.1f} s, {cpu:.1f} s of CPU time for all stages")
        found = split_documents(f"{tmp}/real/{name}_train_*.bin") + split_documents(f"{tmp}/real/{name}_val_*.bin")
        check(p.returncode == 0 and sorted(found) == need, f"sample, {name}: other documents")


def peak_memory(pids):
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/smaps_rollup") as f:
                total += next(int(line.split()[1]) for line in f if line.startswith("Pss:"))
    return total / 1024


def test_memory(tmp, tokenizer, megabytes):
    """Two jobs on a large parquet file with FineWeb-Edu's row groups of 1000, then a document of 100 MB."""
    texts = make_texts(2000, 31, 1400)
    rng, path = random.Random(1), f"{tmp}/large/large.parquet"
    os.makedirs(f"{tmp}/large")
    writer = size = 0
    while size < megabytes * 1e6:
        group = [rng.choice(texts) + str(rng.random()) for _ in range(1000)]
        table = pyarrow.table({"text": group, "id": [str(rng.random()) for _ in group], "score": [3.0] * 1000})
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema, compression="none")
        writer.write_table(table)
        size = os.path.getsize(path)
    writer.close()
    with open(f"{tmp}/huge.jsonl", "w", encoding="utf-8") as f:
        for text in ("a short one", " ".join(texts * 40)[:100_000_000], "another"):
            f.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    for what, source in (("parquet", path), ("a document of 100 MB", f"{tmp}/huge.jsonl")):
        began, peak = time.time(), {}
        for stage in options.STAGES:
            p = subprocess.Popen(
                [sys.executable, f"{DATA}/fineweb_edu.py", stage, "--from", source, "--out", f"{tmp}/m", "--name"]
                + [what.split()[0], "--tokenizer", tokenizer, "--jobs", "2", "--keep-free", "0", "--val-fraction", "0"],
                stdout=subprocess.DEVNULL if stage != "tokenize" else None,
                stderr=subprocess.PIPE,
            )
            while p.poll() is None:
                with open(f"/proc/{p.pid}/task/{p.pid}/children") as f:
                    peak[stage] = max(peak.get(stage, 0), peak_memory([p.pid] + f.read().split()))
                time.sleep(0.1)
            check(p.returncode == 0, f"memory, {what}, {stage}: {p.stderr.read()}")
        print(
            f"memory: {what}, {os.path.getsize(source) / 1e6:.0f} MB, {time.time() - began:.0f} s: "
            + ", ".join(f"{k} {v:.0f} MB" for k, v in peak.items())
        )
        check(max(peak.values()) < 1500, f"memory: {what}: {peak}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kills", type=int, default=1)
    p.add_argument("--sample")
    p.add_argument("--tokenizer")
    p.add_argument("--memory", type=int, default=0)
    p.add_argument("--only", default="")
    o = p.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        began = time.time()

        def test(function, *args):
            if o.only and o.only not in function.__name__ and function not in (test_cuts, test_run):
                return
            start = time.time()
            function(*args)
            print(f"{function.__name__}: {time.time() - start:.1f} s")

        test(test_cuts, tmp)
        s = Set(tmp)
        files = {}
        for path in sorted(glob.glob(f"{s.folder}/*")):
            with open(path, "rb") as f:
                files[f"sample/10BT/{os.path.basename(path)}"] = f.read()
        files["sample/10BT/.gitkeep"] = b"no parquet"
        files = dict(files)
        server = Server("HuggingFaceFW/fineweb-edu", files)
        os.environ["HF_ENDPOINT"], os.environ["HF_HUB_DISABLE_TELEMETRY"] = server.url, "1"
        download.WAIT_FIRST = 0.01
        test(test_journal, tmp)
        test(test_run, tmp, s)
        whole = results(f"{tmp}/whole")
        test(test_errors, tmp, s)
        test(test_crashes, tmp, s, whole, 1 if o.kills > 5 else 7)
        test(test_damage, tmp, s, whole)
        test(test_fetch, tmp, s, server, whole)
        test(test_kills, tmp, s, server, o.kills, whole)
        test(test_import, tmp)
        if o.sample:
            test(test_sample, tmp, o.sample, o.tokenizer, 2)
        if o.memory:
            test(test_memory, tmp, o.tokenizer or s.model_path, o.memory)
        print(f"{time.time() - began:.1f} s")
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**counts))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
