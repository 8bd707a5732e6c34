"""Token shards: write them, read them back. gdn/shard.h describes the format.

As a program it verifies shards and prints their headers: python data/shardfile.py FILE...
"""

import os
import struct
import sys

import numpy as np
import xxhash

HEADER = struct.Struct("<8sIIQIIiiIIQQ32sQQ136s")  # and a 64-bit checksum of these 248 bytes
HEADER_BYTES = 256
BLOCK_BYTES = 256 * 1024
FIELDS = (
    "magic version header_bytes tokens token_bytes vocab bos eos boundary block_bytes documents text_bytes "
    "tokenizer block_table_hash document_table_hash reserved"
).split()


class DataError(Exception):
    """Bad input or a disk that fails: one sentence for the user, and the exit code."""

    def __init__(self, text, code=4):
        super().__init__(text, code)  # both, so that it travels between processes
        self.text, self.code = text, code


class ShardWriter:
    """Writes one shard, document by document, to `path`. Call close() for a complete file."""

    def __init__(self, path, vocab, bos, eos, tokenizer_sha256):
        self.path, self.vocab, self.bos, self.eos, self.sha = path, vocab, bos, eos, tokenizer_sha256
        self.dtype = token_dtype(vocab)
        self.tokens = self.text_bytes = 0
        self.starts, self.hashes, self.pending = [], [], bytearray()
        self.file = open(path, "wb")
        self.file.write(bytes(HEADER_BYTES))

    def add(self, tokens, text_bytes):
        """One document: its tokens (BOS first) and the bytes of its text."""
        self.starts.append(self.tokens)
        self.tokens += len(tokens)
        self.text_bytes += text_bytes
        self.pending += tokens.astype(self.dtype, copy=False).tobytes()
        if len(self.pending) >= 16 * BLOCK_BYTES:
            self._flush(len(self.pending) // BLOCK_BYTES * BLOCK_BYTES)

    def _flush(self, count):
        for i in range(0, count, BLOCK_BYTES):
            self.hashes.append(xxhash.xxh3_64_intdigest(bytes(self.pending[i : min(i + BLOCK_BYTES, count)])))
        self.file.write(self.pending[:count])
        del self.pending[:count]

    def close(self):
        self._flush(len(self.pending))
        padding = bytes(-self.tokens * self.dtype.itemsize % 8)
        block_table = padding + np.array(self.hashes, "<u8").tobytes()
        document_table = np.array(self.starts, "<i8").tobytes()
        header = HEADER.pack(
            b"GDNSHARD",
            1,
            HEADER_BYTES,
            self.tokens,
            self.dtype.itemsize,
            self.vocab,
            self.bos,
            self.eos,
            1,
            BLOCK_BYTES,
            len(self.starts),
            self.text_bytes,
            self.sha,
            xxhash.xxh3_64_intdigest(block_table),
            xxhash.xxh3_64_intdigest(document_table),
            b"",
        )
        self.file.write(block_table + document_table)
        self.file.seek(0)
        self.file.write(header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header)))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


def token_dtype(vocab):
    return np.dtype("<u2" if vocab <= 65536 else "<u4")


def read_header(path):
    """The header's fields as a dict; DataError if it is not a whole and undamaged shard's."""
    with open(path, "rb") as f:
        raw = f.read(HEADER_BYTES)
        size = os.fstat(f.fileno()).st_size
    if len(raw) < HEADER_BYTES or raw[:8] != b"GDNSHARD":
        raise DataError(f"{path}: not a token shard of this project")
    h = dict(zip(FIELDS, HEADER.unpack(raw[:248])))
    if struct.unpack("<Q", raw[248:])[0] != xxhash.xxh3_64_intdigest(raw[:248]) or h["version"] != 1:
        raise DataError(f"{path}: damaged header or another version than 1")
    token_bytes = h["tokens"] * h["token_bytes"]
    h["blocks"] = -(-token_bytes // h["block_bytes"])
    h["tables"] = HEADER_BYTES + token_bytes  # where the padding and the block table begin
    h["starts"] = h["tables"] + -token_bytes % 8 + 8 * h["blocks"]
    if size != h["starts"] + 8 * h["documents"]:
        raise DataError(f"{path}: {h['starts'] + 8 * h['documents']} bytes needed, found {size}")
    return h


def read_tokens(path, count=None):
    """The tokens (or the first `count`), as they lie, not verified."""
    h = read_header(path)
    count = h["tokens"] if count is None else min(count, h["tokens"])
    return np.fromfile(path, f"<u{h['token_bytes']}", count, offset=HEADER_BYTES)


def verify(path):
    """Checks every checksum and id; returns the header."""
    h = read_header(path)
    with open(path, "rb") as f:
        f.seek(h["tables"])
        table = f.read(h["starts"] - h["tables"])
        documents = f.read()
        if (
            xxhash.xxh3_64_intdigest(table) != h["block_table_hash"]
            or xxhash.xxh3_64_intdigest(documents) != h["document_table_hash"]
        ):
            raise DataError(f"{path}: damaged tables")
        hashes = np.frombuffer(table[-8 * h["blocks"] :], "<u8")
        f.seek(HEADER_BYTES)
        left = h["tokens"] * h["token_bytes"]
        for block in range(h["blocks"]):
            piece = f.read(min(h["block_bytes"], left))
            left -= len(piece)
            if xxhash.xxh3_64_intdigest(piece) != hashes[block]:
                raise DataError(f"{path}: damaged: block {block} does not match its checksum")
            if np.frombuffer(piece, f"<u{h['token_bytes']}").max() >= h["vocab"]:
                raise DataError(f"{path}: block {block} holds an id that is not below the vocabulary of {h['vocab']}")
    return h


def main(paths):
    if not paths or paths[0].startswith("-"):
        print("usage: shardfile.py FILE...   verifies token shards and prints their headers")
        return 0 if paths and paths[0] in ("-h", "--help") else 2
    code = 0
    for path in paths:
        try:
            h = verify(path)
            tokenizer = "bytes" if h["tokenizer"] == bytes(32) else "sha256 " + h["tokenizer"].hex()
            print(
                f"{path}: ok, {h['tokens']} tokens of {h['token_bytes']} bytes, {h['documents']} documents, "
                f"{h['text_bytes']} bytes of text, vocabulary {h['vocab']}, BOS {h['bos']}, EOS {h['eos']}, {tokenizer}"
            )
        except (DataError, OSError) as e:
            print(
                f"shardfile.py: error: {e.text if isinstance(e, DataError) else f'{path}: {e.strerror}'}",
                file=sys.stderr,
            )
            code = 4
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
