"""Text files as tasks for worker processes: what to read, in which pieces, and the documents of a piece.

A task is a tuple that a worker turns into documents with `documents(task)`:
    ("lines", path, number of the first line, bytes)   JSON lines
    ("text", path, offset, bytes)                      one document
    ("rows", path, row group, first row, rows, text column, id column)  parquet, which the worker reads itself
"""

import codecs
import gzip
import io
import itertools
import json
import os
import re
import zlib

from shardfile import DataError

KINDS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
PIECE = 1 << 20  # bytes of JSON lines in a task
ROWS_PIECE = 1 << 26  # bytes of text of a row group in a task, about


def kind_of(path):
    return next((k for k in KINDS if path.lower().endswith(k)), None)


def find_files(inputs):
    """The files of `inputs` (files and folders) in a fixed order: as given, folders sorted, hidden names left out."""
    files = []
    for path in inputs:
        if not os.path.exists(path):
            raise DataError(f"{path}: no such file or folder")
        if not os.path.isdir(path):
            if not kind_of(path):
                raise DataError(f"{path}: cannot tell what it is; needed a name that ends in {', '.join(KINDS)}")
            files.append(path)
            continue
        found = []
        for folder, folders, names in os.walk(path):
            folders[:] = [f for f in folders if not f.startswith(".")]
            found += [os.path.join(folder, n) for n in names if kind_of(n) and not n.startswith(".")]
        if not found:
            raise DataError(f"{path}: the folder has no file that ends in {', '.join(KINDS)}")
        files += sorted(found)
    seen = {}
    for path in files:
        real = os.path.realpath(path)
        if real in seen:
            raise DataError(f"{path}: given twice (also as {seen[real]}): its documents would count twice")
        seen[real] = path
        if os.path.getsize(path) == 0:
            raise DataError(f"{path}: the file is empty")
    return files


def open_lines(path):
    """(decompressed stream, raw file: its position tells the progress)."""
    raw = open(path, "rb")
    if path.lower().endswith(".gz"):
        return gzip.GzipFile(fileobj=raw), raw
    if path.lower().endswith(".zst"):
        try:
            import zstandard
        except ImportError:
            raise DataError(f"{path}: reading .zst needs the package zstandard: pip install zstandard", 3)
        return io.BufferedReader(ZstdFile(raw, zstandard)), raw
    return raw, raw


class ZstdFile(io.RawIOBase):
    """Decompressed bytes of all frames. The package's own reader takes a file that ends inside a frame for whole."""

    def __init__(self, raw, zstandard):
        self.raw, self.zstandard, self.ready, self.frame = raw, zstandard, b"", None

    def readable(self):
        return True

    def readinto(self, out):
        compressed = b""
        while not self.ready:
            compressed = compressed or self.raw.read(1 << 17)
            if not compressed:
                if self.frame:
                    raise EOFError("the file ends inside a compressed frame")
                return 0
            self.frame = self.frame or self.zstandard.ZstdDecompressor().decompressobj()
            self.ready = self.frame.decompress(compressed)
            compressed = self.frame.unused_data if self.frame.eof else b""
            if self.frame.eof:
                self.frame = None
        # What is left of `compressed` is the next frame's.
        n = min(len(out), len(self.ready))
        out[:n], self.ready = self.ready[:n], self.ready[n:]
        if compressed:
            self.raw.seek(-len(compressed), os.SEEK_CUR)
        return n


def read_tasks(path, columns, separator):
    """Yields (task, bytes of the file that have been read so far)."""
    kind, size = kind_of(path), os.path.getsize(path)
    try:
        if kind == ".txt":
            yield from _text_tasks(path, separator)
        elif kind == ".parquet":
            yield from _parquet_tasks(path, columns, size)
        else:
            stream, raw = open_lines(path)
            with raw, stream:
                first = 1
                while lines := stream.readlines(PIECE):
                    yield ("lines", path, first, b"".join(lines)) + columns, raw.tell()
                    first += len(lines)
    except DataError:
        raise
    except OSError as e:  # gzip.BadGzipFile has no strerror
        raise DataError(f"{path}: cannot read: {e.strerror or e}")
    except (EOFError, zlib.error) as e:
        raise DataError(f"{path}: damaged or truncated: {e}")
    except Exception as e:
        if type(e).__name__ != "ZstdError":
            raise
        raise DataError(f"{path}: damaged or truncated: {e}")


def _text_tasks(path, separator):
    with open(path, "rb") as f:
        if separator is None:
            data = f.read()
            yield ("text", path, 0, data), len(data)
            return
        rest, start = b"", 0
        while piece := f.read(PIECE):
            *whole, rest = (rest + piece).split(separator)
            for document in whole:
                yield ("text", path, start, document), f.tell()
                start += len(document) + len(separator)
        yield ("text", path, start, rest), f.tell()


def _parquet_tasks(path, columns, size):
    import pyarrow
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as f:
            names, metadata = f.schema_arrow.names, f.metadata
    except (pyarrow.ArrowException, OSError) as e:
        raise DataError(f"{path}: cannot read as parquet: {_line(e)}")
    if columns[0] not in names:
        raise DataError(f"{path}: no column '{columns[0]}'; it has {', '.join(names)}: choose one with --text-field")
    if columns[1] not in names:
        columns = (columns[0], None)
    groups = metadata.num_row_groups
    for number in range(groups):
        group = metadata.row_group(number)
        rows, text_bytes = group.num_rows, column_bytes(group, columns[0])
        # A large row group is several tasks. Each reads the rows before its own too; that is quick beside tokenizing.
        step = max(1, -(-rows // max(1, -(-text_bytes // ROWS_PIECE))))
        for first in range(0, rows, step):
            done = number + min(first + step, rows) / rows
            yield ("rows", path, number, first, min(step, rows - first)) + columns, int(size * done / groups)


def column_bytes(group, name):
    """Uncompressed size of a column of a row group."""
    columns = (group.column(i) for i in range(group.num_columns))
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == name)


def _line(e):
    return " ".join(str(e).split())


def documents(task):
    """Yields (text, id or None, error or None) of each document of a task; a bad document has an error, no text."""
    kind, path = task[:2]
    if kind == "text":
        try:
            yield task[3].decode("utf-8"), None, None
        except UnicodeDecodeError as e:
            yield None, None, f"{path}: not UTF-8 at byte {task[2] + e.start}"
    elif kind == "lines":
        for number, line in enumerate(task[3].split(b"\n"), task[2]):
            if line.strip():
                yield _json_document(f"{path} line {number}", line, *task[4:])
    else:
        yield from _parquet_documents(*task[1:])


def _json_document(where, line, text_field, id_field):
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        return None, None, f"{where}: not UTF-8 at byte {e.start} of the line"
    except (ValueError, RecursionError) as e:
        return None, None, f"{where}: not JSON: {_line(e)}"
    if not isinstance(record, dict):
        return None, None, f"{where}: needed a JSON object, found {type(record).__name__}"
    text, key = record.get(text_field), record.get(id_field)
    if not isinstance(text, str):
        have = ", ".join(list(record)[:10])
        found = f"is {type(text).__name__}, needed a string" if text_field in record else f"is missing; it has {have}"
        return None, None, f"{where}: the field '{text_field}' {found}: choose one with --text-field"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        return None, None, f"{where}: half a surrogate pair at character {e.start} of the text"
    return text, key if isinstance(key, str) else None, None


def _parquet_documents(path, group, first, rows, text_column, id_column):
    import pyarrow
    import pyarrow.parquet as pq

    number = 0  # of the row in its group
    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as f:
            columns = [c for c in (text_column, id_column) if c]
            for batch in f.iter_batches(64, row_groups=[group], columns=columns, use_threads=False):
                if number >= first + rows:
                    return
                if number + len(batch) <= first:
                    number += len(batch)
                    continue
                keys = batch.column(id_column) if id_column else itertools.repeat(None)
                for text, key in zip(batch.column(text_column), keys):
                    if first <= number < first + rows:
                        yield _row(path, group, number, text_column, text.as_py(), key and key.as_py())
                    number += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: row group {group}: damaged or not UTF-8: {_line(e)}")
    if number < first + rows:
        raise DataError(f"{path}: row group {group}: ends after {number} rows, needed {first + rows}")


def _row(path, group, number, column, text, key):
    if isinstance(text, str):
        return text, key if isinstance(key, str) else None, None
    where = f"{path}: row {number} of row group {group}"
    return None, None, f"{where}: the column '{column}' holds {type(text).__name__}, needed a string"


def decode_separator(text):
    """--separator as typed, with \\n and the like, to bytes."""
    try:
        return codecs.escape_decode(text.encode("utf-8"))[0] or None
    except ValueError:
        return None


def check_name_and_separator(p, o):
    """Ends by p.error() when o.name cannot begin file names; decodes o.separator."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", o.name):
        p.error(f"--name '{o.name}': use letters, digits, '_', '-' and '.'")
    if o.separator is not None:
        text, o.separator = o.separator, decode_separator(o.separator)
        if not o.separator:
            p.error(f"--separator '{text}': is empty or holds an unknown escape")
