#!/usr/bin/env python3
"""Text to token shards for train_gdn.

Reads .txt, .jsonl, .jsonl.gz, .jsonl.zst and .parquet, tokenizes on all cores, puts a BOS before each document, splits
off a validation set by a hash of each document, and writes NAME_train_000000.bin ..., NAME_val_000000.bin ... and
NAME_manifest.json. Then prints what simple n-gram models reach on the validation set, a yardstick for the trainer.
README.md beside this file has examples.
"""

import argparse
import glob
import hashlib
import json
import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
try:
    import numpy as np
    import tqdm

    import ngram
    import shardfile
    import splits
    import textfiles
    import workers
    from shardfile import DataError
except ImportError as e:
    print(
        f"prepare.py: error: the Python package {e.name} is missing: run scripts/setup.sh test and use .venv/bin/python",
        file=sys.stderr,
    )
    sys.exit(3)

BYTES_VOCAB, BYTES_BOS = 257, 256

# ----------------------------------------------------------------------------
# Options


class OneLineParser(argparse.ArgumentParser):

    def error(self, message):
        print(f"{self.prog}: error: {message} (--help lists the options)", file=sys.stderr)
        sys.exit(2)


def number(kind, low, high, below=False):

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not (low <= value < high if below else low <= value <= high):
            raise argparse.ArgumentTypeError(
                f"'{text}' is not {'a whole' if kind is int else 'a'} number from {low} to "
                f"{'below ' if below else ''}{high}"
            )
        return value

    return parse


def parse_options(argv):
    p = OneLineParser(
        prog="prepare.py",
        description="Turns text into token shards for train_gdn.",
        epilog="Exit codes: 0 done, 2 wrong option, 3 a package is missing, 4 bad data or a failing disk, "
        "6 a worker ran out of memory, 130 stopped.",
        allow_abbrev=False,
    )
    p.add_argument(
        "input", nargs="+", help="files or folders (searched with all their subfolders): " + ", ".join(textfiles.KINDS)
    )
    p.add_argument("--out", required=True, metavar="DIR", help="folder for the shards, made if it is not there")
    p.add_argument("--name", required=True, help="first part of the shards' names")
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", metavar="FILE", help="a SentencePiece model (tokenizer.model), or bytes")
    which.add_argument(
        "--bytes", action="store_true", help="the same as --tokenizer bytes: a token is a byte, 256 is BOS"
    )
    p.add_argument(
        "--val-fraction",
        type=number(float, 0, 1, True),
        default=0.01,
        metavar="P",
        help="share of the documents for validation, chosen by a hash of the document's id, or of its text "
        "where it has no id, so that the same document lands on the same side every time (default 0.01)",
    )
    p.add_argument(
        "--shard-tokens",
        type=number(int, 1, 10**12),
        default=100_000_000,
        metavar="N",
        help="a shard is closed with the document that reaches this many tokens (default 100000000)",
    )
    p.add_argument(
        "--shuffle",
        type=number(int, 0, 2**63 - 1),
        metavar="SEED",
        help="shuffle the training documents with this seed (default: keep the order of the input). Needs "
        "room for a second copy of the tokens on the disk of --out",
    )
    p.add_argument("--text-field", default="text", metavar="NAME", help="field or column of the text (default text)")
    p.add_argument("--id-field", default="id", metavar="NAME", help="field or column of the id (default id)")
    p.add_argument(
        "--separator",
        metavar="TEXT",
        help="what stands between documents in .txt files; \\n and the like "
        "are understood (default: a file is one document)",
    )
    p.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out documents that cannot be read, and count them " "(default: stop at the first one)",
    )
    p.add_argument(
        "--workers",
        type=number(int, 1, 4096),
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that tokenize (default: all cores)",
    )
    p.add_argument("--force", action="store_true", help="replace shards of this name")
    p.add_argument("--no-yardsticks", action="store_true", help="do not compute the n-gram yardsticks")
    p.add_argument(
        "--yardstick-tokens",
        type=number(int, 1000, 10**9),
        default=50_000_000,
        metavar="N",
        help="count n-grams on the first N training tokens (default 50000000; about 25 bytes of memory each)",
    )
    o = p.parse_args(argv)
    if o.tokenizer == "bytes":  # as the trainer calls it
        o.tokenizer, o.bytes = None, True
    textfiles.check_name_and_separator(p, o)
    return o


# ----------------------------------------------------------------------------
# The steps of main


def existing(o):
    return sorted(
        glob.glob(os.path.join(glob.escape(o.out), f"{o.name}_train_[0-9]*.bin"))
        + glob.glob(os.path.join(glob.escape(o.out), f"{o.name}_val_[0-9]*.bin"))
        + glob.glob(os.path.join(glob.escape(o.out), f"{o.name}_manifest.json"))
    )


def load_tokenizer(o):
    """(vocabulary, bos, eos, sha256 of the file)"""
    if o.bytes:
        return BYTES_VOCAB, BYTES_BOS, -1, bytes(32)
    try:
        import sentencepiece
    except ImportError:
        raise DataError("the Python package sentencepiece is missing: run scripts/setup.sh test and use .venv/bin/python", 3)
    with open(o.tokenizer, "rb") as f:
        data = f.read()
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=data)
    except Exception:  # RuntimeError of several kinds
        raise DataError(
            f"{o.tokenizer}: not a SentencePiece model; --tokenizer needs a tokenizer.model, or use --bytes"
        )
    if model.bos_id() < 0:
        raise DataError(
            f"{o.tokenizer}: the model has no BOS, which marks where documents begin: use another tokenizer"
        )
    return model.vocab_size(), model.bos_id(), model.eos_id(), hashlib.sha256(data).digest()


def tokenize(o, files, train, val, vocab, bos):
    """Runs all documents through the workers into the two splits; returns counts."""
    counts = {"empty_documents": 0, "bad_documents": 0}
    columns, limit, text_bytes, began = (o.text_field, o.id_field), int(o.val_fraction * 2**64), 0, time.time()
    sizes = [os.path.getsize(f) for f in files]
    tasks = (
        (task, before + position)
        for path, before in zip(files, np.cumsum([0] + sizes).tolist())
        for task, position in textfiles.read_tasks(path, columns, o.separator)
    )
    with workers.worker_pool(o.workers, (o.tokenizer, vocab, bos, o.skip_bad)) as run, tqdm.tqdm(
        total=sum(sizes), unit="B", unit_scale=True, desc="read", disable=None
    ) as bar:
        for (tokens, lengths, text_sizes, hashes, empty, bad), position in run(tasks):
            at = 0
            for length, size, key in zip(lengths, text_sizes, hashes):
                (val if key < limit else train).add(tokens[at : at + length], size)
                at += length
                text_bytes += size
            counts["empty_documents"] += empty
            counts["bad_documents"] += bad
            bar.update(position - bar.n)
            bar.set_postfix_str(f"text {text_bytes / 1e6:.0f} MB, {text_bytes / 1e6 / (time.time() - began):.1f} MB/s")
    return counts


def check_splits(o, train, val):
    documents = train.documents + val.documents
    if not documents:
        raise DataError("the input holds no document with text")
    if o.val_fraction and not val.documents:
        raise DataError(
            f"the validation set is empty: none of {documents} documents was chosen with --val-fraction "
            f"{o.val_fraction:g}: raise it, use 0 for no validation set, or split .txt files with --separator"
        )
    if not train.documents:
        raise DataError(
            f"the training set is empty: all {documents} documents were chosen for validation: lower "
            "--val-fraction, or split .txt files with --separator"
        )


def publish(o, both, manifest):
    """Moves the finished shards to their names, the manifest last."""
    for path in existing(o):
        os.unlink(path)
    for split in both:
        for path in split.shards:
            os.rename(path, os.path.join(o.out, os.path.basename(path)))
        split.shards = [os.path.join(o.out, os.path.basename(path)) for path in split.shards]
    write_manifest(o, manifest)
    o.published = True


def write_manifest(o, manifest):
    path = os.path.join(o.out, f"{o.name}_manifest.json")
    with open(path + ".part", "w", encoding="utf-8") as f:
        json.dump(manifest, f, indent=1)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())
    os.rename(path + ".part", path)
    handle = os.open(o.out, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def describe(split):
    return {
        "documents": split.documents,
        "tokens": split.tokens,
        "text_bytes": split.text_bytes,
        "shards": [
            {
                "file": os.path.basename(p),
                "tokens": h["tokens"],
                "documents": h["documents"],
                "bytes": os.path.getsize(p),
                "block_table_hash": f"{h['block_table_hash']:016x}",
            }
            for p, h in ((p, shardfile.read_header(p)) for p in split.shards)
        ],
    }


def read_stream(paths, limit=None):
    parts, left = [], limit
    for path in paths:
        parts.append(shardfile.read_tokens(path, left))
        if left is not None:
            left -= len(parts[-1])
            if left <= 0:
                break
    return np.concatenate(parts)


def compute_yardsticks(o, train, val, vocab):
    began = time.time()
    y = ngram.yardsticks(read_stream(train.shards, o.yardstick_tokens), read_stream(val.shards), vocab, val.text_bytes)
    print(
        f"Yardsticks: n-gram models (Witten-Bell) of "
        f"{'all' if y['train_tokens'] == train.tokens else 'the first'} {y['train_tokens']} training tokens on the "
        f"{y['targets']} targets of the validation set (every token but the first, BOS included; "
        f"{y['val_text_bytes']} bytes of text):"
    )
    print(f"  {'':8}  {'nats/token':>10}  {'perplexity':>10}  {'bits/byte':>9}")
    for name in ("unigram", "bigram", "trigram"):
        nats = y[name]["nats_per_token"]
        print(f"  {name:8}  {nats:10.4f}  {np.exp(nats):10.2f}  {y[name]['bits_per_byte']:9.4f}")
    print(f"  bits/byte = nats/token * targets / (ln 2 * bytes); computed in {time.time() - began:.1f} s")
    return y


def manifest_settings(o, tokenizer, sha, vocab, bos, eos):
    """What a manifest says of tokenizer (a path, unused with --bytes) and splits, in this order."""
    return {
        "tokenizer": "bytes" if o.bytes else os.path.basename(tokenizer),
        "tokenizer_sha256": sha.hex(),
        "vocab": vocab,
        "bos": bos,
        "eos": eos,
        "boundary": "BOS before each document",
        "val_fraction": o.val_fraction,
        "shard_tokens": o.shard_tokens,
    }


def prepare(o):
    began = time.time()
    files = textfiles.find_files(o.input)
    vocab, bos, eos, sha = load_tokenizer(o)
    if not o.no_yardsticks and vocab >= 2**21:
        raise DataError(f"a vocabulary of {vocab} is too large for trigram codes: use --no-yardsticks")
    os.makedirs(o.out, exist_ok=True)
    if existing(o) and not o.force:
        raise DataError(f"{existing(o)[0]}: exists already: choose another --name or --out, or replace it with --force")

    def make_writer(path):
        return shardfile.ShardWriter(path, vocab, bos, eos, sha)

    with splits.temporary_folder(o.out, o.name) as part:
        train = splits.Split(part, f"{o.name}_train", o.shard_tokens, make_writer)
        val = splits.Split(part, f"{o.name}_val", o.shard_tokens, make_writer)
        if o.shuffle is None:
            counts = tokenize(o, files, train, val, vocab, bos)
        else:
            unpacked = sum(os.path.getsize(f) * (1 if f.endswith((".txt", ".jsonl")) else 4) for f in files)
            token_bytes = unpacked * (2 if o.bytes else 1)
            shuffle = splits.Shuffle(
                part, o.shuffle, shardfile.token_dtype(vocab), min(max(token_bytes // splits.BUCKET_BYTES, 1), 500)
            )
            counts = tokenize(o, files, shuffle, val, vocab, bos)
            for tokens, text_bytes in shuffle.drain():
                train.add(tokens, text_bytes)
        train.close(), val.close()
        check_splits(o, train, val)
        seconds = time.time() - began
        manifest = {
            "name": o.name,
            **manifest_settings(o, o.tokenizer, sha, vocab, bos, eos),
            "shuffle": o.shuffle,
            "inputs": [{"file": f, "bytes": os.path.getsize(f)} for f in files],
            **counts,
            "train": describe(train),
            "val": describe(val),
        }
        text_bytes = train.text_bytes + val.text_bytes
        print(
            f"{o.name}: {train.documents + val.documents} documents, {text_bytes} bytes of text, "
            f"{train.tokens + val.tokens} tokens ({text_bytes / (train.tokens + val.tokens):.3f} bytes a token) "
            f"in {seconds:.1f} s ({text_bytes / 1e6 / seconds:.1f} MB/s)"
        )
        for split in (train, val):
            print(f"  {split.name}: {split.documents} documents, {split.tokens} tokens, {len(split.shards)} shards")
        if any(counts.values()):
            print(f"  left out: {counts['empty_documents']} empty and {counts['bad_documents']} bad documents")
        publish(o, (train, val), manifest)
    print(
        f"written to {o.out}; train with --train '{o.out}/{o.name}_train_*.bin'"
        + (f" --val '{o.out}/{o.name}_val_*.bin'" if val.documents else "")
    )

    sys.stdout.flush()
    if not o.no_yardsticks and val.documents:  # the shards are safe by now: this may take memory and time
        manifest["yardsticks"] = compute_yardsticks(o, train, val, vocab)
        write_manifest(o, manifest)


def main(argv):
    o = parse_options(argv)
    o.published = False
    for number_of_signal in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number_of_signal, signal.default_int_handler)
    try:
        prepare(o)
        return 0
    except DataError as e:
        text, code = e.text, e.code
    except OSError as e:
        text, code = f"{e.filename or o.out}: {e.strerror or e}", 4
    except MemoryError:
        text, code = "out of memory: fewer --workers or --yardstick-tokens need less", 6
    except KeyboardInterrupt:
        text, code = "stopped" if o.published else "stopped: no shard was written", 130
    if o.published:
        text += "; the shards are complete, only the yardsticks are missing"
    print(f"prepare.py: error: {' '.join(text.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
