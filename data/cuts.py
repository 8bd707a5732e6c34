"""Where a text can be cut so that SentencePiece gives the same tokens for the parts as for the whole.

SentencePiece's BPE merges neighbours again and again, the best score first. A place that no piece of the vocabulary
spans is never merged over, whatever stands left and right of it, so both sides can be encoded alone. Two such places:
    before a space that does not follow a space      where no piece has a space after another character
    before a line feed                               where no piece has a line feed beside another character
SentencePiece puts a space (U+2581) before each text that it is given. At the first kind of place it stands in for the
space itself, which is left out; at the second its token is dropped from the result.

Parts of a thousand characters are encoded faster than whole documents, and in bounded memory: SentencePiece takes about
43 bytes a character of what it is given at once.
"""

import re

PART = 1000  # characters, at least: a part ends at the first place after them
LONGEST = 1 << 22  # characters without a place to cut, at most
LONGEST_WHOLE = 1 << 24  # characters of a document, at most, where the model allows no cuts
SPACE = "\u2581"
PLACE = re.compile(f"(?<![ {SPACE}]) |\n")


def _fields(data):
    """(number, value) of each field of a protocol-buffer message; value: bytes or int."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7)
        if size is None:
            size = varint()
        yield key >> 3, data[at : at + size]
        at += size


def can_cut(model):
    """Whether both kinds of places are safe with this model (the bytes of a tokenizer.model)."""
    trainer, normalizer, pieces = {}, {}, []
    for number, value in _fields(model):
        if number == 1:
            piece = dict(_fields(value))
            pieces.append((piece.get(1, b"").decode("utf-8"), piece.get(3, 1)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    bpe = trainer.get(3, 1) == 2 and trainer.get(35, 0) and not trainer.get(24, 0)  # byte fallback: no unknown runs
    # No rules for characters, a space put before the text, no spaces removed, spaces as U+2581.
    plain = not normalizer.get(2) and normalizer.get(3, 1) and not normalizer.get(4, 1) and normalizer.get(5, 1)
    texts = [text for text, kind in pieces if kind not in (2, 3, 6)]  # but unknown, control, byte
    spans = any(SPACE in text.lstrip(SPACE) or ("\n" in text and len(text) > 1) for text in texts)
    return bool(bpe and plain and SPACE in texts and not spans)


def cut(text, size=PART):
    """Yields (part, whether its first token is to be dropped); ValueError if a part is too long."""
    begin, drop = 0, False
    while begin < len(text):
        place = PLACE.search(text, begin + size) if len(text) - begin > size else None
        at = place.start() if place and place.start() + 1 < len(text) else len(text)
        if at - begin > LONGEST:
            raise ValueError(f"holds {at - begin} characters without a space or a line feed, more than {LONGEST}")
        yield text[begin:at], drop
        drop = text[at : at + 1] == "\n"
        begin = at if drop else at + 1
