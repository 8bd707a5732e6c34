"""A journal: what a stage has finished, line by line, so that a run that was killed goes on where it was.

Each line is 16 hex digits, a space and one JSON value. The digits are the XXH3-64 of the value's text with the digits of
the line before as seed (0 for the first): a changed, missing or moved line breaks the chain. A last line without its
line feed was cut off by a kill and is dropped; any other flaw is damage and ends the run.
"""

import json
import os

import xxhash

from shardfile import DataError


def _digest(text, seed):
    return xxhash.xxh3_64_intdigest(text, seed)


class Journal:
    """entries: the values so far. The first is the settings of the stage, a dict; the others are what the stage adds."""

    def __init__(self, path):
        self.path, self.entries, self.digest, self.file = path, [], 0, None
        try:
            with open(path, "rb") as f:
                data = f.read()
        except FileNotFoundError:
            data = b""
        *lines, rest = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            if not self._take(line):
                raise DataError(
                    f"{path}: damaged: line {number} of {len(lines)} does not match its checksum; start this stage "
                    "again with --force"
                )
        self.size = len(data) - len(rest)
        if len(rest) > 17 and self._take(rest[:-1]):  # a whole line whose line feed was changed is damage too
            raise DataError(f"{path}: damaged: the last byte is {rest[-1]:#04x}, needed a line feed; use --force")

    def _take(self, line):
        try:
            digest = _digest(line[17:], self.digest)
            if line[:17] != b"%016x " % digest:
                return False
            self.entries.append(json.loads(line[17:]))
        except ValueError:
            return False
        self.digest = digest
        return True

    def add(self, *entries):
        """Adds entries; they are on the disk when it returns."""
        text = b""
        for entry in entries:
            value = json.dumps(entry).encode("ascii")
            self.digest = _digest(value, self.digest)
            self.entries.append(entry)
            text += b"%016x %s\n" % (self.digest, value)
        if self.file is None:
            self.file = open(self.path, "ab", buffering=0)
            self.file.truncate(self.size)  # drops what a kill has cut off
        self.file.write(text)
        os.fsync(self.file.fileno())

    def begin(self, settings):
        """The first entry; on a later run the settings must be the same."""
        if not self.entries:
            self.add(settings)
        old = self.entries[0]
        for key in {**old, **settings}:
            if old.get(key) != settings.get(key):
                raise DataError(
                    f"{self.path}: this stage was started with {key} {old.get(key)}, now it is {settings.get(key)}: use "
                    "the same, another --name, or start the stage again with --force"
                )

    def of(self, kind):
        """The entries [kind, ...] without the kind."""
        return [e[1:] for e in self.entries[1:] if e[0] == kind]

    @property
    def done(self):
        """What the stage ended with, or None."""
        return self.entries[-1][1] if len(self.entries) > 1 and self.entries[-1][0] == "done" else None

    def close(self):
        if self.file:
            self.file.close()
            self.file = None
