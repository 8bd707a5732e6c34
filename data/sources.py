"""Stage fetch: the source files and the tokenizer, listed, downloaded or found, and held against their checksums."""

import concurrent.futures
import os
import sys
import threading
import time
import types

import prepare  # checks the packages
import tqdm

import download
import textfiles
from shardfile import DataError

# name -> repository of a model on the Hub, file, bytes, SHA-256. "32,000 pieces" does not tell tokenizers apart.
TOKENIZERS = {
    "llama2": (
        "TinyLlama/TinyLlama_v1.1",  # an ungated copy of Llama-2's
        "tokenizer.model",
        499723,
        "9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347",
    )
}


def listed_files(run):
    """(commit, [[path, bytes, checksum or ""], ...]): recorded, or looked up."""
    recorded = run.journal("fetch").of("list")
    if recorded and (run.journal("fetch").done or not run.o.inputs):
        return recorded[0]  # what is tokenized may have been removed
    if run.o.inputs:
        files = textfiles.find_files([os.path.abspath(p) for p in run.o.inputs])
        now = [[f, os.path.getsize(f), ""] for f in files]
        if recorded and recorded[0][1] != now:
            raise DataError(f"{run.o.inputs[0]}: the files or their sizes have changed since fetch began: use --force")
        return recorded[0] if recorded else ["", now]
    if run.dataset.files:
        return ["", [[path, size, sha] for path, _, size, sha in run.dataset.files]]
    pattern = run.dataset.configs[run.o.config]
    return list(download.list_files(run.dataset.repo, pattern, run.o.revision, run.o.retries, warner(run)))


def warner(run):
    return lambda text: tqdm.tqdm.write(f"{run.dataset.name}.py: {text}", file=sys.stderr)


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
    warn, have, stop, total = warner(run), dict(j.of("have")), threading.Event(), sum(size for _, size, _ in files)
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
                warn(f"{target}: damaged or of another size; it is loaded again")
                os.unlink(target)
            url = file_url(run, path, commit)
            download.download(url, target, size, checksum, o.retries, stop, bar.update, warn)
            return number, checksum

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
    path = None if run.o.bytes else tokenizer_path(run.o)
    return (path, *prepare.load_tokenizer(types.SimpleNamespace(bytes=run.o.bytes, tokenizer=path)))
