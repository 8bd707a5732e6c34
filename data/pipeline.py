"""A dataset to token shards in stages that can be killed at any moment and go on: fetch, tokenize, shuffle, verify.

fineweb_edu.py and the like say which dataset (Dataset below) and call main. What each stage has done stands in
OUT/NAME.work/STAGE.journal (journal.py); README.md beside this file describes the files and the options.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import glob
import json
import os
import re
import signal
import sys
import threading
import time
import types

import prepare  # checks the packages
import tqdm

import buckets
import download
import forecast
import shardfile
import splits
import textfiles
import tokenstore
import verify
import workers
from journal import Journal
from shardfile import DataError

STAGES = ("fetch", "tokenize", "shuffle", "verify")
# name -> repository of a model on the Hub, file, bytes, SHA-256. "32,000 pieces" does not tell tokenizers apart.
TOKENIZERS = {
    "llama2": (
        "TinyLlama/TinyLlama_v1.1",  # an ungated copy of Llama-2's
        "tokenizer.model",
        499723,
        "9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347",
    )
}


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
# Options


def parse_options(dataset, argv):
    number = prepare.number
    p = prepare.OneLineParser(
        prog=f"{dataset.name}.py",
        description=f"{dataset.about} Stages: fetch, tokenize, shuffle, verify; all runs the four. Run the same command "
        "again after a stop, a kill or an error: it goes on where it was.",
        epilog="Exit codes: 0 done, 2 wrong option, 3 a package or room on the disk is missing, 4 bad data, a failing "
        "disk or network, 6 out of memory, 70 internal, 130 stopped.",
        allow_abbrev=False,
    )
    default_config = next(iter(dataset.configs), None)
    add = p.add_argument
    add("stage", choices=STAGES + ("all",))
    if len(dataset.configs) > 1:
        sizes = ", ".join(dataset.configs)
        add(
            "--config",
            choices=list(dataset.configs),
            default=default_config,
            help=f"{sizes} (default {default_config})",
        )
    add(
        "--from",
        dest="inputs",
        nargs="+",
        metavar="PATH",
        help="take these files and folders instead of downloading: " + ", ".join(textfiles.KINDS),
    )
    add("--out", required=True, metavar="DIR", help="folder for everything, made if it is not there")
    add("--name", help="first part of the shards' names (default: the dataset and its config)")
    add("--tokenizer", default="llama2", metavar="FILE", help="a SentencePiece model, or llama2: downloaded (default)")
    add("--bytes", action="store_true", help="no tokenizer: a token is a byte, 256 is BOS")
    add("--jobs", type=number(int, 1, 4096), default=len(os.sched_getaffinity(0)), metavar="N", help="(all cores)")
    add("--dry-run", action="store_true", help="say what is done, what is to do, the disk and the hours; write nothing")
    add("--force", action="store_true", help="start the stage and those after it again; whole downloads are kept")
    g = p.add_argument_group("what the shards hold")
    add = g.add_argument
    add(
        "--val-fraction",
        type=number(float, 0, 1, True),
        default=dataset.val_fraction,
        metavar="P",
        help=f"share of the documents for validation, by a hash of id or text (default {dataset.val_fraction:g})",
    )
    add(
        "--shard-tokens",
        type=number(int, 1, 10**12),
        default=10**9,
        metavar="N",
        help="of a shard (default 1000000000)",
    )
    add("--seed", type=number(int, 0, 2**63 - 1), default=dataset.seed, metavar="N", help="of the shuffle (default 1)")
    add("--text-field", default="text", metavar="NAME", help="field or column of the text (default text)")
    add("--id-field", default="id", metavar="NAME", help="field or column of the id (default id)")
    add("--separator", default=dataset.separator, metavar="TEXT", help="what stands between documents in .txt files")
    add("--skip-bad", action="store_true", help="leave out documents that cannot be read, and count them")
    g = p.add_argument_group("fetch")
    add = g.add_argument
    add("--revision", default="main", help="branch, tag or commit; its commit is recorded at the first fetch (main)")
    add("--downloads", type=number(int, 1, 64), default=4, metavar="N", help="at a time (default 4)")
    add("--retries", type=number(int, 0, 1000), default=10, metavar="N", help="without a new byte (default 10)")
    g = p.add_argument_group("disk, memory, checks")
    add = g.add_argument
    add("--keep-tokens", action="store_true", help="keep the tokens that shuffle has used, for another --seed")
    add("--keep-free", type=number(float, 0, 10**9), default=1, metavar="GB", help="room to leave on the disk (1)")
    add("--bucket-bytes", type=number(int, 1, 2**40), default=splits.BUCKET_BYTES, metavar="N", help="sorted in memory")
    add("--segment-bytes", type=number(int, 1, 2**50), default=4 << 30, metavar="N", help="of tokens in a file")
    add("--samples", type=number(int, 1, 10**6), default=100, metavar="N", help="documents that verify compares (100)")
    add("--shards-only", action="store_true", help="verify without the sources, which may be gone")
    o = p.parse_args(argv)
    o.config = getattr(o, "config", default_config)
    if not o.name:
        o.name = dataset.name + ("_" + o.config.removeprefix("sample-") if len(dataset.configs) > 1 else "")
        o.name = os.path.basename(os.path.abspath(o.inputs[0])).split(".")[0] if o.inputs else o.name
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", o.name):
        p.error(f"--name '{o.name}': use letters, digits, '_', '-' and '.'")
    if o.separator is not None:
        text, o.separator = o.separator, textfiles.decode_separator(o.separator)
        if not o.separator:
            p.error(f"--separator '{text}': is empty or holds an unknown escape")
    return o


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

    def sources(self):
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


def listed_files(run):
    """(commit, [[path, bytes, checksum or ""], ...]): recorded, or looked up."""
    recorded = run.journal("fetch").of("list")
    if run.o.inputs:
        files = textfiles.find_files([os.path.abspath(p) for p in run.o.inputs])
        now = [[f, os.path.getsize(f), ""] for f in files]
        if recorded and not run.journal("fetch").done and recorded[0][1] != now:
            raise DataError(f"{run.o.inputs[0]}: the files or their sizes have changed since fetch began: use --force")
        return recorded[0] if recorded else ["", now]
    if recorded:
        return recorded[0]
    if run.dataset.files:
        return ["", [[path, size, sha] for path, _, size, sha in run.dataset.files]]
    pattern = run.dataset.configs[run.o.config]
    return list(download.list_files(run.dataset.repo, pattern, run.o.revision, run.o.retries))


def file_url(run, path, commit):
    for name, url, _, _ in run.dataset.files:
        if name == path:
            return url
    return download.hub_url(run.dataset.repo, path, commit)


def fetch(run):
    o, j, began = run.o, run.journal("fetch"), time.time()
    if o.inputs:
        settings = {"--from": [os.path.abspath(p) for p in o.inputs]}
    else:
        settings = {"dataset": run.dataset.repo or run.dataset.name, "--config": o.config, "--revision": o.revision}
    j.begin(settings)
    commit, files = run.listing = run.listing or listed_files(run)
    if not j.of("list"):
        j.add(["list", commit, files])
    fetch_tokenizer(run)
    have, stop, total = dict(j.of("have")), threading.Event(), sum(size for _, size, _ in files)
    if j.done and (o.inputs or (o.stage == "all" and run.journal("tokenize").done)):
        return  # what is tokenized may have been removed
    if not o.inputs:  # a file that has been removed, perhaps because it was damaged, is loaded again
        whole = lambda path, size: os.path.exists(path) and os.path.getsize(path) == size  # noqa: E731
        have = {i: c for i, c in have.items() if whole(run.source_path(files[i][0]), files[i][1])}
    if j.done and len(have) == len(files):
        return

    with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="fetch", disable=None) as bar:

        def one(number):
            path, size, checksum = files[number]
            target = run.source_path(path)
            if o.inputs:
                return number, download.hash_file(target, "0" * 64, stop, bar.update)
            if os.path.exists(target):  # renamed, but a kill came before the journal; or an earlier fetch's
                if os.path.getsize(target) == size and download.hash_file(target, checksum, stop) == checksum:
                    bar.update(size)
                    return number, checksum
                bar.write(f"{target}: damaged or of another size; it is loaded again", file=sys.stderr)
                os.unlink(target)
            url = file_url(run, path, commit)
            download.download(url, target, size, checksum, o.retries, stop, bar.update, warn)
            return number, checksum

        def warn(text):
            bar.write(f"{run.dataset.name}.py: {text}", file=sys.stderr)

        bar.update(sum(files[i][1] for i in have))
        with concurrent.futures.ThreadPoolExecutor(o.jobs if o.inputs else o.downloads) as pool:
            try:
                jobs = [pool.submit(one, i) for i in range(len(files)) if i not in have]
                for job in concurrent.futures.as_completed(jobs):
                    result = job.result()
                    if not j.done:
                        j.add(["have", *result])
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
    if not j.done:
        j.add(["done", {"files": len(files), "bytes": total}])
    seconds = time.time() - began
    at = f" at commit {commit}" if commit else ""
    print(f"fetch: {len(files)} files, {total} bytes, verified{at} ({total / 1e6 / seconds:.1f} MB/s)")


def tokenizer_path(o):
    return os.path.join(o.out, f"{o.tokenizer}-tokenizer.model") if o.tokenizer in TOKENIZERS else o.tokenizer


def have_tokenizer(o):
    """Whether the tokenizer's file is there; one that is given by name must have its hash."""
    path = tokenizer_path(o)
    if o.tokenizer not in TOKENIZERS:
        return True  # loading it says what is wrong
    if not os.path.exists(path):
        return False
    checksum = TOKENIZERS[o.tokenizer][3]
    found = download.hash_file(path, checksum)
    if found != checksum:
        raise DataError(f"{path}: damaged: its SHA-256 is {found}, needed {checksum}: remove it")
    return True


def fetch_tokenizer(run):
    """Downloads a tokenizer that is given by name; its hash is part of this program."""
    o = run.o
    if o.bytes or have_tokenizer(o):
        return
    repo, file, size, checksum = TOKENIZERS[o.tokenizer]
    url = download.hub_url(repo, file, "main", "model")
    nothing = lambda *_: None  # noqa: E731
    try:
        download.download(url, tokenizer_path(o), size, checksum, o.retries, threading.Event(), nothing, nothing)
    except DataError as e:
        raise DataError(f"{e.text}; --tokenizer FILE takes one that is on this machine", e.code)


def load_tokenizer(run):
    """(options for prepare's functions, vocabulary, bos, eos, sha256)"""
    fetch_tokenizer(run)
    options = types.SimpleNamespace(bytes=run.o.bytes, tokenizer=None if run.o.bytes else tokenizer_path(run.o))
    return (options.tokenizer, *prepare.load_tokenizer(options))


def tokenize(run):
    o, fetched = run.o, run.finished("fetch")
    path, vocab, bos, _, sha = load_tokenizer(run)
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
    tokenstore.tokenize(run.folder, j, run.sources(), (path, vocab, bos, o.skip_bad), o)


def shuffle(run):
    o, tokens = run.o, run.finished("tokenize")
    _, vocab, bos, eos, sha = load_tokenizer(run)
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
        "tokenizer": "bytes" if o.bytes else os.path.basename(tokenizer_path(o)),
        "tokenizer_sha256": sha.hex(),
        "vocab": vocab,
        "bos": bos,
        "eos": eos,
        "boundary": "BOS before each document",
        "val_fraction": o.val_fraction,
        "shard_tokens": o.shard_tokens,
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
    sources = tokens = None
    if not o.shards_only:
        for stage in STAGES[:3]:
            run.finished(stage)
        sources, tokens = run.sources(), run.journal("tokenize")
    worker_path, vocab, bos, _, sha = load_tokenizer(run)
    if sha.hex() != manifest["tokenizer_sha256"]:
        raise DataError(f"{worker_path}: SHA-256 {sha.hex()}, the shards need {manifest['tokenizer_sha256']}")
    settings = {"manifest": download.hash_file(path, "0" * 64), "--samples": o.samples, "--shards-only": o.shards_only}
    if j.entries and j.entries[0] != settings:
        run.restart(["verify"])  # another set or other wishes: nothing that was tested counts
        j = run.journal("verify")
    j.begin(settings)
    workers.worker_start(worker_path, vocab, bos, o.skip_bad)
    report = verify.verify(o.out, j, manifest, sources, tokens, o)
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
    stages = STAGES if o.stage == "all" else (o.stage,)
    if o.bytes:
        tokenizer = (None, prepare.BYTES_VOCAB)
    elif not have_tokenizer(o):
        tokenizer = (None, 32000)  # is fetched later
    else:  # what is wrong with it is said before hours of work
        options = types.SimpleNamespace(bytes=False, tokenizer=tokenizer_path(o))
        tokenizer = (options.tokenizer, prepare.load_tokenizer(options)[0])
    if o.dry_run:
        print(forecast.table(run, stages, listed_files(run)[1], *tokenizer))
        return
    os.makedirs(o.out, exist_ok=True)
    with locked(run.folder):
        if o.force:
            run.restart(STAGES[STAGES.index(stages[0]) :])
        if "fetch" in stages or run.journal("fetch").of("list"):
            run.listing = listed_files(run)
        forecast.check_disk(run, stages, run.listing[1] if run.listing else [], *tokenizer)
        for stage in stages:
            {"fetch": fetch, "tokenize": tokenize, "shuffle": shuffle, "verify": verify_stage}[stage](run)
            sys.stdout.flush()


def main(dataset, argv):
    o = parse_options(dataset, argv)
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
