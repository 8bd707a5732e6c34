"""Where documents go: the shards of a split, the shuffle on the disk, and the folder they are made in."""

import contextlib
import fcntl
import os
import shutil
import struct

import numpy as np
import xxhash

from shardfile import DataError

BUCKET_BYTES = 256 << 20  # of tokens that the shuffle sorts in memory at a time


class Split:
    """The shards of one split, written into the temporary folder."""

    def __init__(self, folder, name, shard_tokens, make_writer):
        self.folder, self.name, self.shard_tokens, self.make_writer = folder, name, shard_tokens, make_writer
        self.shards, self.writer = [], None
        self.tokens = self.documents = self.text_bytes = 0

    def add(self, tokens, text_bytes):
        if not self.writer:
            self.writer = self.make_writer(os.path.join(self.folder, f"{self.name}_{len(self.shards):06d}.bin"))
        self.writer.add(tokens, text_bytes)
        self.tokens += len(tokens)
        self.documents += 1
        self.text_bytes += text_bytes
        if self.writer.tokens >= self.shard_tokens:
            self.close()

    def close(self):
        if self.writer:
            self.writer.close()
            self.shards.append(self.writer.path)
            self.writer = None


class Shuffle:
    """Orders documents by a random 64-bit key: first into buckets on disk by its high bits, then bucket by bucket."""

    RECORD = struct.Struct("<QQQ")  # key, tokens, bytes of text

    def __init__(self, folder, seed, dtype, buckets):
        self.seed, self.dtype, self.count = seed, dtype, 0
        self.files = [open(os.path.join(folder, f"bucket_{i}"), "w+b") for i in range(buckets)]

    def add(self, tokens, text_bytes):
        key = xxhash.xxh3_64_intdigest(struct.pack("<Q", self.count), self.seed)
        self.count += 1
        f = self.files[key * len(self.files) >> 64]
        f.write(self.RECORD.pack(key, len(tokens), text_bytes))
        f.write(tokens.tobytes())

    def drain(self):
        """(tokens, bytes of text) of each document, in the new order."""
        for f in self.files:
            f.seek(0)
            data, at, found = f.read(), 0, []
            while at < len(data):
                key, length, text_bytes = self.RECORD.unpack_from(data, at)
                found.append((key, at + self.RECORD.size, length, text_bytes))
                at += self.RECORD.size + length * self.dtype.itemsize
            for _, begin, length, text_bytes in sorted(found):
                yield np.frombuffer(data, self.dtype, length, begin), text_bytes
            f.close()
            os.unlink(f.name)


@contextlib.contextmanager
def temporary_folder(out, name):
    """A folder of this run alone in `out`, removed at the end whatever happens. A lock keeps out a second run."""
    path = os.path.join(out, f".{name}.part")
    os.makedirs(path, exist_ok=True)
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{path}: another prepare.py is writing {name} there: wait for it or choose another --name")
        for left in os.listdir(path):  # by a run that was killed
            os.unlink(os.path.join(path, left))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)
