"""Before a stage begins: how much disk and how many hours it will take, and a stop where the disk is too small."""

import contextlib
import os
import shutil
import time

import shardfile
import textfiles
import workers
from shardfile import DataError

# Assumptions where there is no text at hand yet. FineWeb-Edu's parquet files unpack to about 1.7 times their size;
# Llama-2's tokenizer makes a token of about 4.2 bytes of English.
UNPACKED = {".txt": 1.0, ".jsonl": 1.0, ".jsonl.gz": 3.5, ".jsonl.zst": 4.0, ".parquet": 1.7}
TOKENS_PER_BYTE = 1 / 4.2
ENCODE_SPEED = 2.5e6  # bytes of text a second and core
DOWNLOAD_SPEED, DISK_SPEED, HASH_SPEED = 50e6, 150e6, 500e6  # bytes a second


def _text_bytes(run, files):
    total = 0
    for path, size, _ in files:
        path, kind = run.source_path(path), textfiles.kind_of(path)
        if kind == ".parquet" and os.path.exists(path):
            import pyarrow
            import pyarrow.parquet as pq

            with contextlib.suppress(pyarrow.ArrowException, OSError):  # a damaged file: its stage will say so
                metadata = pq.read_metadata(path)
                groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
                total += sum(textfiles.column_bytes(g, run.o.text_field) for g in groups)
                continue
        total += size * UNPACKED.get(kind, 1.0)
    return int(total)


def _measure(run, files, tokenizer, vocab):
    """(tokens a byte, bytes a second, True) of the first half MB of text, or the assumptions and False."""
    o = run.o
    assumed = (1.0, 50e6, False) if o.bytes else (TOKENS_PER_BYTE, ENCODE_SPEED, False)
    path = next((p for p in (run.source_path(f) for f, _, _ in files) if os.path.exists(p)), None)
    if not path or (not o.bytes and not tokenizer):
        return assumed
    worker = workers.Worker(tokenizer, vocab, 0, True)
    tokens = text_bytes = 0
    with contextlib.suppress(DataError, ValueError):  # its stage will say so
        began = time.process_time()
        for task, _ in textfiles.read_tasks(path, (o.text_field, o.id_field), o.separator):
            for text, _, _ in textfiles.documents(task):
                raw = (text or "")[:500_000].encode("utf-8")
                tokens += len(worker.encode(raw.decode("utf-8"), raw)) if raw else 0
                text_bytes += len(raw)
                if text_bytes > 500_000:
                    break
            if text_bytes > 500_000:
                break
        if text_bytes > 1000:
            return tokens / text_bytes, text_bytes / max(time.process_time() - began, 1e-3), True
    return assumed


def forecast(run, files, tokenizer, vocab):
    """tokenizer: its file, or None: bytes, or not there yet.

    Returns {stage: [bytes of disk still needed, hours still needed, what]} and a note on where the numbers come from.
    """
    o, result, width = run.o, {}, shardfile.token_dtype(vocab).itemsize
    done = {s: run.journal(s).done for s in ("fetch", "tokenize", "shuffle")}
    size = sum(s for _, s, _ in files)
    left = 0
    if not done["fetch"]:
        have = set() if not o.inputs else {i for i, _ in run.journal("fetch").of("have")}
        for i, (path, bytes_, _) in enumerate(files):
            path = run.source_path(path)
            if o.inputs:
                left += 0 if i in have else bytes_
            elif not os.path.exists(path):
                part = path + ".part"
                left += bytes_ - (min(os.path.getsize(part), bytes_) if os.path.exists(part) else 0)
    speed = HASH_SPEED * o.jobs if o.inputs else DOWNLOAD_SPEED
    what = f"{len(files)} files, {size / 1e9:.2f} GB"
    result["fetch"] = [0 if o.inputs else left, left / speed / 3600, what]

    note = ""
    written = sum(e[7] for e in run.journal("tokenize").of("task"))
    if done["tokenize"]:
        tokens, text_bytes, rest = done["tokenize"]["tokens"], done["tokenize"]["text_bytes"], 0
        token_bytes = written
        result["tokenize"] = [0, 0.0, f"{tokens} tokens"]
    else:
        text_bytes = _text_bytes(run, files)
        per_byte, speed, measured = _measure(run, files, tokenizer, vocab)
        tokens = int(text_bytes * per_byte)
        token_bytes = int(tokens * width * 1.03)  # and the index, and some room
        rest = max(0, token_bytes - written)
        hours = rest / max(token_bytes, 1) * text_bytes / speed / o.jobs / 3600
        what = f"{text_bytes / 1e9:.2f} GB of text, {tokens / 1e9:.3f}e9 tokens"
        result["tokenize"] = [rest, hours, what]
        note = (
            f"tokenize: {'measured' if measured else 'assumed'}: {speed / 1e6:.1f} MB/s of text a core, "
            f"{per_byte:.3f} tokens a byte; {o.jobs} jobs"
        )

    moving = min(token_bytes, o.segment_bytes) + min(token_bytes, o.shard_tokens * width + o.bucket_bytes)
    room = token_bytes + moving if o.keep_tokens else moving
    result["shuffle"] = [0, 0.0, ""] if done["shuffle"] else [room, 4 * token_bytes / DISK_SPEED / 3600, ""]
    result["verify"] = [0, (size / HASH_SPEED + token_bytes / DISK_SPEED) / 3600, f"{o.samples} documents compared"]
    return result, note


def _free(folder):
    while not os.path.isdir(folder):
        folder = os.path.dirname(os.path.abspath(folder))
    return shutil.disk_usage(folder).free


def check_disk(run, stages, files, *tokenizer):
    """DataError when the disk has no room for what these stages will write."""
    result, _ = forecast(run, files, *tokenizer)
    need = sum(result[s][0] for s in stages)
    free, keep = _free(run.o.out), int(run.o.keep_free * 1e9)
    if need > free - keep:
        parts = ", ".join(f"{s} {result[s][0] / 1e9:.3f} GB" for s in stages if result[s][0])
        raise DataError(
            f"{run.o.out}: not enough room on the disk: {need / 1e9:.3f} GB needed ({parts}), {free / 1e9:.3f} GB free, "
            f"of which --keep-free leaves {keep / 1e9:.3f}: take another disk with --out",
            3,
        )


def table(run, stages, files, *tokenizer):
    """The text of --dry-run."""
    result, note = forecast(run, files, *tokenizer)
    lines = [f"{'stage':<10}{'state':<8}{'disk GB':>10}{'hours':>9}  what"]
    for s in stages:
        disk, hours, what = result[s]
        j = run.journal(s)
        state = "done" if j.done else "begun" if j.entries else "to do"
        lines.append(f"{s:<10}{state:<8}{disk / 1e9:>10.3f}{hours:>9.2f}  {what}")
    need, hours = (sum(result[s][k] for s in stages) for k in (0, 1))
    free = _free(run.o.out) / 1e9
    lines.append(f"{'all':<18}{need / 1e9:>10.3f}{hours:>9.2f}  {free:.3f} GB free on the disk of {run.o.out}")
    assumed = (
        f"assumed: download {DOWNLOAD_SPEED / 1e6:.0f} MB/s, hashing {HASH_SPEED / 1e6:.0f} MB/s, disk "
        f"{DISK_SPEED / 1e6:.0f} MB/s"
    )
    return "\n".join(lines + [note] * bool(note) + [assumed])
