"""Stage shuffle: segments to shards in a random order, in two passes with bounded memory.

Pass 1 sends each document to a bucket by the high bits of a random 64-bit key (XXH3-64 of its number among the training
documents, with the seed); those of the validation set go to a file of their own, in the order of the input. Pass 2
reads one bucket at a time, sorts it by the key and writes shards. The order is that of `prepare.py --shuffle SEED`.

The journal, so that a killed run goes on, and every byte is verified when it is read again:
    ["scattered", segment, training documents so far, [[bytes, XXH3-64] that each file got, validation last]]
    ["shard", split, file name, header's XXH3-64, documents, tokens, bytes of text, bucket and document that come next]
A segment is removed when it is scattered (unless --keep-tokens), a bucket when all its documents lie in whole shards.
"""

import os
import resource
import struct

import numpy as np
import tqdm
import xxhash

import shardfile
import splits
import tokenstore
from shardfile import DataError

RECORD = splits.Shuffle.RECORD  # key, tokens, bytes of text; then the tokens


def bucket_count(token_bytes, bucket_bytes):
    """Each one's share of the tokens is about bucket_bytes, as far as the files that may be open at once allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16), hard))
        soft = min(hard, 1 << 16)
    return max(1, min(-(-token_bytes // bucket_bytes), soft - 100, 4000))


class Scatter:
    """The buckets, and what has been written to each since the last entry of the journal."""

    def __init__(self, paths, sizes):
        self.files = []
        for path, size in zip(paths, sizes):
            f = open(path, "ab", buffering=1 << 17)
            self.files.append(f)
            if os.path.getsize(path) < size:
                raise DataError(
                    f"{path}: has {os.path.getsize(path)} bytes, its journal says {size}: use --force on this stage"
                )
            f.truncate(size)
        self.clear()

    def clear(self):
        self.sizes, self.hashes = [0] * len(self.files), [xxhash.xxh3_64() for _ in self.files]

    def add(self, number, record):
        self.files[number].write(record)
        self.sizes[number] += len(record)
        self.hashes[number].update(record)

    def sync(self):
        for f, size in zip(self.files, self.sizes):
            if size:
                f.flush()
                os.fdatasync(f.fileno())
        result = [[size, h.hexdigest()] for size, h in zip(self.sizes, self.hashes)]
        self.clear()
        return result

    def close(self):
        for f in self.files:
            f.close()


def bucket_path(folder, number, count):
    return os.path.join(folder, f"bucket_{number:04d}" if number < count else "bucket_val")


def _remove(path):
    if os.path.exists(path):
        os.unlink(path)


def scatter(folder, journal, tokens_journal, segment_bytes, dtype, o):
    """Pass 1. Returns the pieces of each file: [[bytes, checksum], ...], validation last."""
    settings = journal.entries[0]
    count, limit = settings["buckets"], int(settings["--val-fraction"] * 2**64)
    segments = {}
    for segment, offset, entry in tokenstore.blocks(tokens_journal, segment_bytes):
        if entry:
            segments.setdefault(segment, []).append((offset, entry))
    entries = journal.of("scattered")
    pieces = [[e[2][i] for e in entries if e[2][i][0]] for i in range(count + 1)]
    documents = entries[-1][1] if entries else 0
    for segment, _, _ in entries:
        if not o.keep_tokens:
            _remove(tokenstore.segment_path(folder, segment))
    todo = sorted(set(segments) - {e[0] for e in entries})
    if not todo:  # pass 2 may have begun: buckets are on their way out
        return pieces
    out = Scatter([bucket_path(folder, i, count) for i in range(count + 1)], [sum(n for n, _ in p) for p in pieces])
    left = sum(entry[7] for segment in todo for _, entry in segments[segment])
    with tqdm.tqdm(total=left, unit="B", unit_scale=True, desc="shuffle 1/2", disable=None) as bar:
        for segment in todo:
            path = tokenstore.segment_path(folder, segment)
            for offset, entry in segments[segment]:
                data = tokenstore.read_block(path, offset, entry)
                for tokens, text_bytes, key in tokenstore.block_documents(data, entry[2], dtype):
                    where, order = count, 0
                    if key >= limit:
                        order = xxhash.xxh3_64_intdigest(struct.pack("<Q", documents), settings["--seed"])
                        where = order * count >> 64
                        documents += 1
                    out.add(where, RECORD.pack(order, len(tokens), text_bytes) + tokens.tobytes())
                bar.update(entry[7])
            written = out.sync()
            journal.add(["scattered", segment, documents, written])
            for piece, new in zip(pieces, written):
                if new[0]:
                    piece.append(new)
            if not o.keep_tokens:
                _remove(path)
    out.close()
    return pieces


def bucket_records(path, pieces, dtype):
    """(key, tokens, bytes of text) of each document of a file, in the order written; verified piece by piece."""
    if not pieces:
        return
    with open(path, "rb") as f:
        for number, (size, checksum) in enumerate(pieces):
            data = f.read(size)
            if len(data) != size or xxhash.xxh3_64_hexdigest(data) != checksum:
                raise DataError(
                    f"{path}: damaged: piece {number} of {len(pieces)} ({size} bytes) does not match its checksum in "
                    "the journal; start the stage shuffle again with --force"
                )
            at = 0
            while at < size:
                key, length, text_bytes = RECORD.unpack_from(data, at)
                yield key, np.frombuffer(data, dtype, length, at + RECORD.size), text_bytes
                at += RECORD.size + length * dtype.itemsize


def write_shards(folder, journal, split_name, name, files, dtype, make_writer, o, bar):
    """Pass 2 for one split; files: [(path, pieces, sorted or not)]. Returns the names of its shards."""
    split = splits.Split(folder, f"{name}_{split_name}", journal.entries[0]["--shard-tokens"], make_writer)
    begin = (0, 0)
    for kind, shard, _, documents, tokens, text_bytes, bucket, document in journal.of("shard"):
        if kind == split_name:
            split.shards.append(os.path.join(folder, shard))
            begin = (bucket, document)

    def record(bucket, document):
        header = shardfile.read_header(split.shards[-1])
        with open(split.shards[-1], "rb") as f:
            checksum = f.read(shardfile.HEADER_BYTES)[248:][::-1].hex()
        counts = [header[key] for key in ("documents", "tokens", "text_bytes")]
        journal.add(["shard", split_name, os.path.basename(split.shards[-1]), checksum, *counts, bucket, document])

    for number, (path, pieces, is_sorted) in enumerate(files):
        if number < begin[0]:
            _remove(path)
            continue
        records = bucket_records(path, pieces, dtype)
        if is_sorted:
            records = sorted(records, key=lambda r: r[0])
        for document, (_, tokens, text_bytes) in enumerate(records):
            if (number, document) < begin:
                continue
            split.add(tokens, text_bytes)
            bar.update(len(tokens))
            if not split.writer:  # that closed a shard
                record(number, document + 1)
                for old, _, _ in files[:number]:
                    _remove(old)
        del records
    if split.writer:
        split.close()
        record(len(files), 0)
    for path, _, _ in files:
        _remove(path)
    return [os.path.basename(path) for path in split.shards]
