"""A dataset to token shards in stages that can be killed at any moment and go on: fetch, tokenize, shuffle, verify.

fineweb_edu.py and the like say which dataset (Dataset below) and call main. What each stage has done stands in
OUT/NAME.work/STAGE.journal (journal.py); README.md beside this file describes the files and the options.
"""

import contextlib
import dataclasses
import fcntl
import glob
import json
import os
import signal
import sys
import time
import types

import prepare  # checks the packages
import tqdm

import buckets
import download
import forecast
import options
import shardfile
import sources
import tokenstore
import verify
import workers
from journal import Journal
from shardfile import DataError


@dataclasses.dataclass
class Dataset:
    """Where the text comes from: `repo` with `configs` (name -> pattern of paths), or fixed `files`."""

    name: str
    about: str
    configs: dict
    repo: str = ""
    files: tuple = ()  # (path, url, bytes, sha256)
    val_fraction: float = 0.001
    separator: str = None
    seed: int = 1


# ----------------------------------------------------------------------------
# One run


class Run:
    """What the stages share: the options, the folder, the journals."""

    def __init__(self, dataset, o):
        self.dataset, self.o = dataset, o
        self.folder = os.path.join(o.out, f"{o.name}.work")
        self.journals, self.listing = {}, None

    def journal(self, stage):
        if stage not in self.journals:
            self.journals[stage] = Journal(os.path.join(self.folder, f"{stage}.journal"))
        return self.journals[stage]

    def finished(self, stage):
        """The journal of a stage that must be done before."""
        j = self.journal(stage)
        if not j.done:
            raise DataError(f"{self.folder}: the stage {stage} is not done: run it first, or the stage all")
        return j

    def source_files(self):
        """[(path, bytes, checksum)] of the fetched files."""
        files, sums = self.journal("fetch").of("list")[0][1], dict(self.journal("fetch").of("have"))
        return [(self.source_path(p), size, sums[i]) for i, (p, size, _) in enumerate(files)]

    def source_path(self, path):
        return path if self.o.inputs else os.path.join(self.folder, "source", path)

    def restart(self, stages):
        """--force: forgets these stages and removes what they made; whole downloads stay."""
        for stage in stages:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.folder, f"{stage}.journal"))
            self.journals.pop(stage, None)
        made = {"tokenize": ["tokens_*"], "shuffle": ["bucket_*", f"{glob.escape(self.o.name)}_*.bin"]}
        for stage in stages:
            for pattern in made.get(stage, ()):
                for path in glob.glob(os.path.join(glob.escape(self.folder), pattern)):
                    os.unlink(path)
        if "shuffle" in stages:
            for path in prepare.existing(self.o):
                os.unlink(path)


@contextlib.contextmanager
def locked(folder):
    """A second run in the same folder is kept out."""
    os.makedirs(folder, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another run is at work there: wait for it or choose another --name")
        yield
    finally:
        os.close(handle)


# ----------------------------------------------------------------------------
# Stages


def tokenize(run):
    o, fetched = run.o, run.finished("fetch")
    path, vocab, bos, _, sha = sources.load_tokenizer(run)
    j = run.journal("tokenize")
    j.begin(
        {
            "tokenizer": sha.hex(),
            "--text-field": o.text_field,
            "--id-field": o.id_field,
            "--separator": o.separator and o.separator.decode("latin-1"),
            "--skip-bad": o.skip_bad,
            "segment_bytes": j.entries[0]["segment_bytes"] if j.entries else o.segment_bytes,
            "fetch": f"{fetched.digest:016x}",
        }
    )
    if j.done:
        return
    o.segment_bytes = j.entries[0]["segment_bytes"]
    tokenstore.tokenize(run.folder, j, run.source_files(), (path, vocab, bos, o.skip_bad), o)


def shuffle(run):
    o, tokens = run.o, run.finished("tokenize")
    _, vocab, bos, eos, sha = sources.load_tokenizer(run)
    dtype, j, began = shardfile.token_dtype(vocab), run.journal("shuffle"), time.time()
    used = tokens.entries[0]["tokenizer"]
    if used != sha.hex():
        raise DataError(f"{run.folder}: tokenized with tokenizer {used}, now it is {sha.hex()}: use the same")
    if not j.entries and prepare.existing(o):
        raise DataError(
            f"{prepare.existing(o)[0]}: exists already: choose another --name or --out, or replace it with --force"
        )
    count = (
        j.entries[0]["buckets"]
        if j.entries
        else buckets.bucket_count(tokens.done["tokens"] * dtype.itemsize, o.bucket_bytes)
    )
    buckets.bucket_count(1, 1)  # more open files, also on a second run
    j.begin(
        {
            "tokenizer": sha.hex(),
            "--seed": o.seed,
            "--val-fraction": o.val_fraction,
            "--shard-tokens": o.shard_tokens,
            "buckets": count,
            "tokenize": f"{tokens.digest:016x}",
        }
    )
    if j.done:
        return
    pieces = buckets.scatter(run.folder, j, tokens, tokens.entries[0]["segment_bytes"], dtype, o)
    paths = [buckets.bucket_path(run.folder, i, count) for i in range(count + 1)]

    def make_writer(path):
        return shardfile.ShardWriter(path, vocab, bos, eos, sha)

    shards = {}
    with tqdm.tqdm(total=tokens.done["tokens"], unit="token", unit_scale=True, desc="shuffle 2/2", disable=None) as bar:
        for name, files in (
            ("train", [(p, e, True) for p, e in zip(paths[:-1], pieces[:-1])]),
            ("val", [(paths[-1], pieces[-1], False)]),
        ):
            shards[name] = buckets.write_shards(run.folder, j, name, o.name, files, dtype, make_writer, o, bar)
    manifest = publish(run, shards, vocab, bos, eos, sha)
    j.add(["done", {"shards": sum(map(len, shards.values()))}])
    both = [manifest[s] for s in ("train", "val")]
    print(
        f"shuffle: {both[0]['documents']} documents, {both[0]['tokens']} tokens in {len(shards['train'])} train shards, "
        f"{both[1]['documents']} documents, {both[1]['tokens']} tokens in {len(shards['val'])} val shards "
        f"({time.time() - began:.0f} s)\n"
        f"written to {o.out}; train with --train '{o.out}/{o.name}_train_*.bin'"
        + (f" --val '{o.out}/{o.name}_val_*.bin'" if shards["val"] else "")
    )


def publish(run, shards, vocab, bos, eos, sha):
    """Moves the shards to their names and writes the manifest. Nothing changes when it is done twice."""
    o, fetched, tokens = run.o, run.journal("fetch"), run.journal("tokenize")
    checksums = {e[1]: e[2] for e in run.journal("shuffle").of("shard")}
    described = {}
    for split, names in shards.items():
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.rename(os.path.join(run.folder, name), os.path.join(o.out, name))
            path = os.path.join(o.out, name)
            shardfile.read_header(path)
            with open(path, "rb") as f:
                if f.read(shardfile.HEADER_BYTES)[248:][::-1].hex() != checksums[name]:
                    raise DataError(f"{path}: is another shard than the one that was made: use --force on shuffle")
        made = types.SimpleNamespace(shards=[os.path.join(o.out, n) for n in names])
        headers = [shardfile.read_header(p) for p in made.shards]
        for key in ("documents", "tokens", "text_bytes"):
            setattr(made, key, sum(h[key] for h in headers))
        described[split] = prepare.describe(made)
    commit, files = fetched.of("list")[0]
    sums = dict(fetched.of("have"))
    manifest = {
        "name": o.name,
        "dataset": {**fetched.entries[0], "commit": commit},
        "sources": [{"file": p, "bytes": size, "checksum": sums[i]} for i, (p, size, _) in enumerate(files)],
        **prepare.manifest_settings(o, sources.tokenizer_path(o), sha, vocab, bos, eos),
        "shuffle": o.seed,
        "empty_documents": tokens.done["empty"],
        "bad_documents": tokens.done["bad"],
        **described,
    }
    prepare.write_manifest(o, manifest)
    return manifest


def verify_stage(run):
    o = run.o
    path = os.path.join(o.out, f"{o.name}_manifest.json")
    try:
        with open(path, encoding="utf-8") as f:
            manifest = json.load(f)
    except FileNotFoundError:
        raise DataError(f"{path}: is missing: run the stage shuffle first")
    except ValueError as e:
        raise DataError(f"{path}: damaged: not JSON: {e}")
    j = run.journal("verify")
    files = tokens = None
    if not o.shards_only:
        for stage in options.STAGES[:3]:
            run.finished(stage)
        files, tokens = run.source_files(), run.journal("tokenize")
        used = tokens.entries[0]  # the documents are what tokenize has made of the sources
        o.text_field, o.id_field, o.skip_bad = used["--text-field"], used["--id-field"], used["--skip-bad"]
        o.separator = used["--separator"] and used["--separator"].encode("latin-1")
    worker_path, vocab, bos, _, sha = sources.load_tokenizer(run)
    if sha.hex() != manifest["tokenizer_sha256"]:
        raise DataError(f"{worker_path}: SHA-256 {sha.hex()}, the shards need {manifest['tokenizer_sha256']}")
    settings = {"manifest": download.hash_file(path, "0" * 64), "--samples": o.samples, "--shards-only": o.shards_only}
    if j.entries and j.entries[0] != settings:
        run.restart(["verify"])  # another set or other wishes: nothing that was tested counts
        j = run.journal("verify")
    j.begin(settings)
    workers.worker_start(worker_path, vocab, bos, o.skip_bad)
    report = verify.verify(o.out, j, manifest, files, tokens, o)
    verify.write_report(os.path.join(o.out, f"{o.name}_verify.json"), report)
    j.close()
    run.restart(["verify"])  # the next time everything is tested again
    print(
        f"verify: ok: {report['shards']} shards, {report['sources']} source files, {report['documents_compared']} "
        "documents found, decoded and compared"
    )


# ----------------------------------------------------------------------------
# main


def run_stages(dataset, o):
    run = Run(dataset, o)
    stages = options.STAGES if o.stage == "all" else (o.stage,)
    if o.bytes:
        tokenizer = (None, prepare.BYTES_VOCAB)
    elif not sources.have_tokenizer(o):
        tokenizer = (None, 32000)  # is fetched later
    else:  # what is wrong with it is said before hours of work
        path = sources.tokenizer_path(o)
        tokenizer = (path, prepare.load_tokenizer(types.SimpleNamespace(bytes=False, tokenizer=path))[0])
    if o.dry_run:
        print(forecast.table(run, stages, sources.listed_files(run)[1], *tokenizer))
        return
    os.makedirs(o.out, exist_ok=True)
    with locked(run.folder):
        if o.force:
            run.restart(options.STAGES[options.STAGES.index(stages[0]) :])
        if "fetch" in stages or run.journal("fetch").of("list"):
            run.listing = sources.listed_files(run)
        forecast.check_disk(run, stages, run.listing[1] if run.listing else [], *tokenizer)
        for stage in stages:
            {"fetch": sources.fetch, "tokenize": tokenize, "shuffle": shuffle, "verify": verify_stage}[stage](run)
            sys.stdout.flush()


def main(dataset, argv):
    o = options.parse_options(dataset, argv)
    for number_of_signal in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number_of_signal, signal.default_int_handler)
    try:
        run_stages(dataset, o)
        return 0
    except DataError as e:
        text, code = e.text, e.code
    except OSError as e:
        text, code = f"{e.filename or o.out}: {e.strerror or e}; run the same command again to go on", 4
    except MemoryError:
        text, code = "out of memory: fewer --jobs or smaller --bucket-bytes need less", 6
    except (KeyboardInterrupt, download.Stopped):
        text, code = "stopped; run the same command again to go on", 130
    print(f"{dataset.name}.py: error: {' '.join(text.split())}", file=sys.stderr)
    return code
