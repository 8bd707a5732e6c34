"""Stage tokenize: documents to tokens, in segment files in the order of the input.

A segment is a run of blocks, one for each task (textfiles.py) that held a document:
    D x 3 uint64    number of tokens, bytes of text, XXH3-64 of the id (or the text) of each document
    tokens          BOS first, one document after the other
What is in them, block by block, is in the stage's journal:
    ["task", file, number in the file, documents, tokens, bytes of text, empty, bad, bytes of the block, its XXH3-64]
After the task that brings a segment to `segment_bytes`, the next one begins. Data reach the disk before the journal.
"""

import concurrent.futures
import itertools
import os
import threading
import time

import numpy as np
import tqdm
import xxhash

import download
import textfiles
import workers
from shardfile import DataError

SYNC_SECONDS = 2  # how much work a kill may cost
NOTE_SECONDS = 600  # between lines that tell the progress where there is no terminal


def segment_path(folder, number):
    return os.path.join(folder, f"tokens_{number:06d}")


def blocks(journal, segment_bytes):
    """(segment, offset, task entry) of each finished task, in order; the last triple says where the next one goes."""
    segment = offset = 0
    for entry in journal.of("task"):
        yield segment, offset, entry
        offset += entry[7]
        if offset >= segment_bytes:
            segment, offset = segment + 1, 0
    yield segment, offset, None


def check_source(path, size, checksum, stop):
    """DataError unless the file is what fetch has recorded."""
    if not os.path.exists(path):
        raise DataError(f"{path}: is missing; run the stage fetch again")
    if os.path.getsize(path) != size:
        raise DataError(f"{path}: has {os.path.getsize(path)} bytes, needed {size}: it has changed since fetch")
    found = download.hash_file(path, checksum, stop)
    if found != checksum:
        raise DataError(
            f"{path}: damaged: its checksum is {found}, needed {checksum}: remove it and run the stage fetch again"
        )


def _tasks(sources, after, columns, separator, stop):
    """(task, (file, number, bytes read of all files)) from the one after `after`; each file is verified first."""
    done_file, done_number = after or (0, -1)
    before = sum(size for _, size, _ in sources[:done_file])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            checks = {}
            for file in range(done_file, len(sources)):
                for near in range(file, min(file + 2, len(sources))):  # the next one while this one is tokenized
                    if near not in checks:
                        checks[near] = pool.submit(check_source, *sources[near], stop)
                checks.pop(file).result()
                path, size, _ = sources[file]
                first = done_number + 1 if file == done_file else 0
                numbered = enumerate(textfiles.read_tasks(path, columns, separator))
                for number, (task, position) in itertools.islice(numbered, first, None):
                    yield task, (file, number, before + position)
                before += size
        finally:
            stop.set()


def _block(result):
    """The bytes of a block and the counts of the journal's entry."""
    tokens, lengths, sizes, hashes, empty, bad = result
    index = np.array([lengths, sizes, hashes], np.uint64).T
    data = index.tobytes() + tokens.tobytes()
    return data, [
        len(lengths),
        len(tokens),
        sum(sizes),
        empty,
        bad,
        len(data),
        f"{xxhash.xxh3_64_intdigest(data):016x}",
    ]


def tokenize(folder, journal, sources, worker_args, o):
    """Runs or goes on with the stage; sources: [(path, bytes, checksum)]."""
    *finished, (segment, offset, _) = blocks(journal, o.segment_bytes)
    after = tuple(finished[-1][2][:2]) if finished else None
    totals = [sum(e[2][i] for e in finished) for i in range(2, 7)]  # documents, tokens, text bytes, empty, bad
    path = segment_path(folder, segment)
    data = open(path, "ab", buffering=0)
    if os.path.getsize(path) < offset:
        raise DataError(
            f"{path}: has {os.path.getsize(path)} bytes, its journal says {offset}: start the stage again with --force"
        )
    data.truncate(offset)
    pending, synced, began, started, used = [], time.time(), time.time(), list(totals), sum(os.times()[:4])

    def commit():
        nonlocal synced
        os.fdatasync(data.fileno())
        journal.add(*pending)
        pending.clear()
        synced = time.time()

    noted, bar_total = began, sum(size for _, size, _ in sources)
    tasks = _tasks(sources, after, (o.text_field, o.id_field), o.separator, threading.Event())
    try:
        with workers.worker_pool(o.jobs, worker_args) as run, tqdm.tqdm(
            total=bar_total, unit="B", unit_scale=True, desc="tokenize", disable=None
        ) as bar:
            for result, (file, number, position) in run(tasks):
                block, counts = _block(result)
                data.write(block)
                offset += len(block)
                pending.append(["task", file, number] + counts)
                totals = [a + b for a, b in zip(totals, counts)]
                full = offset >= o.segment_bytes
                if full or time.time() - synced >= SYNC_SECONDS:
                    commit()
                if full:
                    data.close()
                    segment, offset = segment + 1, 0
                    data = open(segment_path(folder, segment), "wb", buffering=0)
                if not bar.n:
                    bar.initial = bar.n = position  # what an earlier run has done does not count as speed
                bar.update(position - bar.n)
                seconds = time.time() - began
                mb, tokens = (totals[2] - started[2]) / 1e6, totals[1] - started[1]
                speed = f"text {mb / seconds:.1f} MB/s, {tokens / 1e6 / seconds:.2f}M tokens/s"
                bar.set_postfix_str(speed)
                if bar.disable and time.time() - noted >= NOTE_SECONDS:
                    noted = time.time()
                    print(f"tokenize: {position / 1e9:.2f} of {bar_total / 1e9:.2f} GB, {speed}", flush=True)
        commit()
    finally:
        tasks.close()
        data.close()
    if not offset:  # the last task filled its segment, or there was none
        os.unlink(segment_path(folder, segment))
    if not totals[0]:
        raise DataError("the input holds no document with text")
    journal.add(["done", dict(zip(("documents", "tokens", "text_bytes", "empty", "bad"), totals))])
    mb, seconds, cpu = (totals[2] - started[2]) / 1e6, time.time() - began, sum(os.times()[:4]) - used
    jobs = f"{o.jobs} job{'s' if o.jobs > 1 else ''}"
    print(
        f"tokenize: {totals[0]} documents, {totals[2]} bytes of text, {totals[1]} tokens; {totals[3]} empty and "
        f"{totals[4]} bad ones left out; {mb / seconds:.2f} MB/s with {jobs}, {mb / max(cpu, 0.01):.2f} MB/s of CPU time"
    )


def read_block(path, offset, entry):
    """The bytes of a block, verified."""
    with open(path, "rb") as f:
        f.seek(offset)
        data = f.read(entry[7])
    if len(data) != entry[7] or xxhash.xxh3_64_intdigest(data) != int(entry[8], 16):
        raise DataError(
            f"{path}: damaged: the {entry[7]} bytes at {offset} do not match their checksum in the journal; start the "
            "stage tokenize again with --force"
        )
    return data


def block_documents(data, documents, dtype):
    """(tokens, bytes of text, hash) of each document of a block."""
    index = np.frombuffer(data, np.uint64, 3 * documents).reshape(documents, 3)
    tokens = np.frombuffer(data, dtype, offset=24 * documents)
    ends = np.cumsum(index[:, 0]).tolist()
    for begin, end, (_, size, key) in zip([0] + ends, ends, index.tolist()):
        yield tokens[begin:end], size, key
