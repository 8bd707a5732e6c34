#!/usr/bin/env python3
"""llm.c's token shards (version 1: 256 int32, then uint16 tokens) to shards of this project.

    data/import_llmc.py edu_fineweb10B/edu_fineweb_train_*.bin --out out/data --name edu_gpt2_train

train_gdn reads llm.c's shards as they are too, but those have no checksums, no documents and no tokenizer. Here a
document begins at each end-of-text token (llm.c writes it before each document). A document that one file begins and
the next one goes on with is put together. The files must be given in their order.
"""

import hashlib
import os
import re
import signal
import sys
import types

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import prepare  # noqa: E402  checks the packages

import numpy as np  # noqa: E402

import shardfile  # noqa: E402
import splits  # noqa: E402
from shardfile import DataError  # noqa: E402

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
PIECE = 1 << 24  # tokens read at a time


def parse_options(argv):
    p = prepare.OneLineParser(
        prog="import_llmc.py",
        description="Turns llm.c's token shards (version 1) into shards of this project.",
        epilog="Exit codes: 0 done, 2 wrong option, 3 a package is missing, 4 bad data or a failing disk, 130 stopped.",
        allow_abbrev=False,
    )
    number = prepare.number
    p.add_argument("input", nargs="+", metavar="FILE", help="shards in their order")
    p.add_argument("--out", required=True, metavar="DIR", help="folder for the shards, made if it is not there")
    p.add_argument("--name", required=True, help="first part of the shards' names")
    p.add_argument("--vocab", type=number(int, 2, 65536), default=50257, metavar="N", help="(default 50257, GPT-2's)")
    p.add_argument("--eot", type=number(int, 0, 65535), default=50256, metavar="ID", help="before documents (50256)")
    p.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="the file whose SHA-256 goes into the shards (default: the SHA-256 of the word gpt2)",
    )
    p.add_argument("--shard-tokens", type=number(int, 1, 10**12), default=10**8, metavar="N", help="(100000000)")
    p.add_argument("--force", action="store_true", help="replace shards of this name")
    o = p.parse_args(argv)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", o.name):
        p.error(f"--name '{o.name}': use letters, digits, '_', '-' and '.'")
    if o.eot >= o.vocab:
        p.error(f"--eot {o.eot}: is not below --vocab {o.vocab}")
    return o


def check_header(path):
    """The number of tokens; DataError unless it is a whole shard of llm.c."""
    size = os.path.getsize(path)
    head = np.fromfile(path, "<i4", 3)
    if size < HEADER_BYTES or len(head) < 3 or head[0] != MAGIC:
        raise DataError(f"{path}: not a shard of llm.c: needed the magic {MAGIC}, found {head[:1].tolist()}")
    if head[1] != VERSION:
        raise DataError(f"{path}: version {head[1]} of llm.c's format, only version {VERSION} is read")
    if head[2] <= 0 or size != HEADER_BYTES + 2 * int(head[2]):
        raise DataError(
            f"{path}: the header counts {head[2]} tokens, which makes {HEADER_BYTES + 2 * int(head[2])} bytes, but the "
            f"file has {size}"
        )
    return int(head[2])


def documents(paths, vocab, eot):
    """The documents of all files in a row, each with its end-of-text token first."""
    rest = []  # pieces of a document that is not complete
    for path in paths:
        tokens = check_header(path)
        for first in range(0, tokens, PIECE):
            part = np.fromfile(path, "<u2", min(PIECE, tokens - first), offset=HEADER_BYTES + 2 * first)
            if part.max() >= vocab:
                at = first + int(np.argmax(part >= vocab))
                raise DataError(f"{path}: token {at} is {part[at - first]}, not below --vocab {vocab}")
            begin = 0
            for at in np.flatnonzero(part == eot).tolist():
                if rest or at > begin:
                    yield np.concatenate(rest + [part[begin:at]])
                rest, begin = [], at
            rest.append(part[begin:])
    if rest:
        yield np.concatenate(rest)


def convert(o):
    for path in o.input:
        check_header(path)
    if o.tokenizer:
        with open(o.tokenizer, "rb") as f:
            sha = hashlib.sha256(f.read()).digest()
    else:
        sha = hashlib.sha256(b"gpt2").digest()
    os.makedirs(o.out, exist_ok=True)
    if prepare.existing(o) and not o.force:
        raise DataError(f"{prepare.existing(o)[0]}: exists already: choose another --name, or replace it with --force")

    def make_writer(path):
        return shardfile.ShardWriter(path, o.vocab, o.eot, o.eot, sha)

    with splits.temporary_folder(o.out, o.name) as part:
        split = splits.Split(part, f"{o.name}_train", o.shard_tokens, make_writer)
        cut = empty = 0
        for document in documents(o.input, o.vocab, o.eot):
            if document[0] != o.eot:  # the first file begins inside a document
                document, cut = np.concatenate(([o.eot], document)).astype(np.uint16), 1
            if len(document) == 1:
                empty += 1
                continue
            split.add(document, 0)
        split.close()
        if not split.documents:
            raise DataError(f"{o.input[0]}: holds no document")
        none = types.SimpleNamespace(documents=0, tokens=0, text_bytes=0, shards=[])
        manifest = {
            "name": o.name,
            "tokenizer": os.path.basename(o.tokenizer) if o.tokenizer else "gpt2",
            "tokenizer_sha256": sha.hex(),
            "vocab": o.vocab,
            "bos": o.eot,
            "eos": o.eot,
            "boundary": "BOS before each document",
            "inputs": [{"file": f, "bytes": os.path.getsize(f)} for f in o.input],
            "empty_documents": empty,
            "train": prepare.describe(split),
            "val": prepare.describe(none),
        }
        prepare.publish(o, (split, none), manifest)
    print(
        f"{o.name}: {split.documents} documents, {split.tokens} tokens, {len(split.shards)} shards; {empty} empty "
        f"documents left out{'; the first one began before the first file: an end-of-text was put before it' * cut}"
    )


def main(argv):
    o = parse_options(argv)
    for number_of_signal in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number_of_signal, signal.default_int_handler)
    try:
        convert(o)
        return 0
    except DataError as e:
        text, code = e.text, e.code
    except OSError as e:
        text, code = f"{e.filename or o.out}: {e.strerror or e}", 4
    except KeyboardInterrupt:
        text, code = "stopped: no shard was written", 130
    print(f"import_llmc.py: error: {' '.join(text.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
