"""Stage verify: are the shards what the sources, the tokenizer and the options make them?

Every source file is hashed again, every checksum of every shard is tested, BOS must stand where the document table says
and nowhere else, and documents drawn at random from the sources are encoded again, each as a whole, looked up in the
shards of their split, decoded, and compared with their text.
"""

import json
import os
import threading

import numpy as np
import tqdm
import xxhash

import cuts
import shardfile
import textfiles
import tokenstore
import workers
from shardfile import DataError

WHOLE = 1 << 22  # characters of a document that is encoded and decoded at once, at most


def draw_documents(journal, sources, columns, separator, seed, count):
    """[(text, id or None, where)] of random documents that were tokenized, in the order of the input."""
    tasks = journal.of("task")
    ends = np.cumsum([t[2] for t in tasks], dtype=np.int64)
    total = int(ends[-1])
    chosen = np.unique(np.random.default_rng(seed).integers(0, total, min(count, total)))
    wanted = {}  # file -> task -> numbers of documents in it
    for document in chosen.tolist():
        task = int(np.searchsorted(ends, document, "right"))
        first = int(ends[task - 1]) if task else 0
        wanted.setdefault(tasks[task][0], {}).setdefault(tasks[task][1], []).append(document - first)
    found = []
    for file, by_task in wanted.items():
        path, last = sources[file][0], max(by_task)
        for number, (task, _) in enumerate(textfiles.read_tasks(path, columns, separator)):
            if number in by_task:
                found += _pick(task, by_task[number], f"{path} task {number}")
            if number == last:
                break
    return found


def _pick(task, numbers, where):
    """The documents of a task with these numbers, counted without those that the stage tokenize leaves out."""
    result, at = [], 0
    for text, key, error in textfiles.documents(task):
        if not error and text:
            tokens = None
            if at in numbers or len(text) > cuts.LONGEST:
                try:
                    tokens = workers.worker.encode(text, text.encode("utf-8"))
                except ValueError:  # too long
                    continue
            if at in numbers:
                result.append((text, key, f"{where} document {at}", tokens))
            at += 1
            if at > max(numbers):
                break
    return result


class Sample:
    """One document to be looked up: its tokens, from the whole text at once where that fits into memory."""

    def __init__(self, text, key, where, tokens, limit):
        self.text, self.where = text, where
        worker, raw = workers.worker, text.encode("utf-8")
        digest = xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass") if key else raw)
        self.split = "val" if digest < limit else "train"
        self.tokens = tokens
        if worker.model and len(text) < WHOLE:
            whole = np.array([worker.bos] + worker.model.encode(text), worker.dtype)
            if not np.array_equal(whole, tokens):
                raise DataError(
                    f"{where}: parts of the text give other tokens than the whole: cuts.py is wrong here", 70
                )
        self.name = (len(self.tokens), xxhash.xxh3_64_intdigest(self.tokens.tobytes()))

    def decoded_wrong(self, tokens):
        """None, or how the text that these tokens stand for differs."""
        if len(self.text) >= WHOLE:  # too much for one call of SentencePiece; the tokens are the same, that must do
            return None
        worker, ids = workers.worker, tokens[1:].tolist()
        if not worker.model:
            same = bytes(ids) == self.text.encode("utf-8")
        else:
            text = worker.model.decode(ids)
            # U+2581 is SentencePiece's own sign for a space. A model with rules for characters or spaces does not give
            # back the text itself.
            same = text == self.text.replace(cuts.SPACE, " ") or (
                not worker.can_cut and text == worker.model.decode(self.tokens[1:].tolist())
            )
        return None if same else f"the tokens of {self.where} do not decode to its text"


def check_shard(path, recorded, samples, manifest):
    """Tests one shard; returns (numbers of the samples in it, counts of document lengths, counts of ids)."""
    header = shardfile.verify(path)
    for key in ("tokens", "documents"):
        if header[key] != recorded[key]:
            raise DataError(f"{path}: holds {header[key]} {key}, the manifest says {recorded[key]}")
    for key in ("vocab", "bos", "eos"):
        if header[key] != manifest[key]:
            raise DataError(f"{path}: {key} is {header[key]}, the manifest says {manifest[key]}")
    if header["tokenizer"].hex() != manifest["tokenizer_sha256"]:
        raise DataError(f"{path}: made with tokenizer {header['tokenizer'].hex()}, the manifest says another")
    if f"{header['block_table_hash']:016x}" != recorded["block_table_hash"]:
        raise DataError(f"{path}: is another shard than the manifest's: its block table differs")
    n = header["tokens"]
    dtype, piece = np.dtype(f"<u{header['token_bytes']}"), 1 << 22
    starts = np.fromfile(path, "<i8", header["documents"], offset=header["starts"])
    lengths = np.diff(np.append(starts, n))
    ids, bos = np.zeros(header["vocab"], np.int64), []
    names, found = {s.name: (i, s) for i, s in samples}, []
    with open(path, "rb") as f:
        f.seek(shardfile.HEADER_BYTES)
        for first in range(0, n, piece):
            part = np.fromfile(f, dtype, min(piece, n - first))
            ids += np.bincount(part, minlength=header["vocab"])
            bos.append(np.flatnonzero(part == header["bos"]) + first)
        bos = np.concatenate(bos)
        if not np.array_equal(bos, starts):
            raise DataError(f"{path}: {len(bos)} BOS, which are not where its {len(starts)} documents begin")
        for i in np.flatnonzero(np.isin(lengths, [length for length, _ in names])).tolist():
            f.seek(shardfile.HEADER_BYTES + int(starts[i]) * dtype.itemsize)
            document = np.fromfile(f, dtype, int(lengths[i]))
            number, sample = names.get((len(document), xxhash.xxh3_64_intdigest(document.tobytes())), (None, None))
            if sample:
                wrong = sample.decoded_wrong(document)
                if wrong:
                    raise DataError(f"{path}: {wrong}")
                found.append(number)
    return found, np.bincount(np.frexp(lengths)[1], minlength=64).tolist(), ids


def verify(out, journal, manifest, sources, tokens_journal, o):
    """Runs or goes on with the stage; returns the report. sources: [(path, bytes, checksum)], or None to leave out."""
    stop, shards = threading.Event(), [(s, d) for s in ("train", "val") for d in manifest[s]["shards"]]
    samples = []
    if sources is not None:
        verified = {e[0] for e in journal.of("source")}
        with tqdm.tqdm(sources, desc="verify sources", unit="file", disable=None) as bar:
            for path, size, checksum in bar:
                if path not in verified:
                    tokenstore.check_source(path, size, checksum, stop)
                    journal.add(["source", path])
        columns, limit = (o.text_field, o.id_field), int(manifest["val_fraction"] * 2**64)
        drawn = draw_documents(tokens_journal, sources, columns, o.separator, o.seed, o.samples)
        samples = [Sample(*d, limit) for d in drawn]
    missing = [d["file"] for _, d in shards if not os.path.exists(os.path.join(out, d["file"]))]
    if missing:
        raise DataError(f"{os.path.join(out, missing[0])}: is missing; the manifest has {len(shards)} shards")
    tested = {e[0] for e in journal.of("shard")}
    with tqdm.tqdm(shards, desc="verify shards", unit="shard", disable=None) as bar:
        for split, recorded in bar:
            if recorded["file"] not in tested:
                mine = [(i, s) for i, s in enumerate(samples) if s.split == split]
                path = os.path.join(out, recorded["file"])
                found, lengths, ids = check_shard(path, recorded, mine, manifest)
                used = int((ids > 0).sum())
                journal.add(["shard", recorded["file"], found, lengths, used, int(ids.max())])
    entries = journal.of("shard")
    found = {i for e in entries for i in e[1]}
    lost = [s for i, s in enumerate(samples) if i not in found]
    if lost:
        raise DataError(
            f"{lost[0].where}: its {len(lost[0].tokens)} tokens are in no {lost[0].split} shard; {len(lost)} of "
            f"{len(samples)} documents were not found"
        )
    lengths = np.sum([e[2] for e in entries], 0).tolist()
    top = max(i for i, n in enumerate(lengths) if n) + 1
    return {
        "shards": len(shards),
        "sources": len(sources) if sources is not None else 0,
        "documents_compared": len(samples),
        "tokens_of_documents": {f"{1 << i >> 1} to {(1 << i) - 1}": lengths[i] for i in range(1, top)},
        "ids_used_in_a_shard": [min(e[3] for e in entries), max(e[3] for e in entries)],
    }


def write_report(path, report):
    with open(path + ".part", "w", encoding="utf-8") as f:
        json.dump(report, f, indent=1)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())
    os.rename(path + ".part", path)
