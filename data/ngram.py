"""Yardsticks: the cross-entropy of a validation stream under unigram, bigram and trigram models of a training stream.

A model that reads text must beat these. Witten and Bell's interpolation (method C of Witten and Bell 1991; Chen and
Goodman 1998, section 2.6), from the uniform distribution upwards:

    P0(w)   = 1 / V
    Pn(w|h) = (c(h w) + t(h) P(n-1)(w|h')) / (c(h) + t(h))

h the n-1 tokens before w, h' without the oldest, c(h w) how often the training stream holds h followed by w, c(h) the
sum of that over w, t(h) the number of different w after h. Where c(h) = 0 it is P(n-1).

What is counted: every token of the validation stream but the first, each given the tokens before it in that stream, the
BOS tokens among them and as context across documents: what a trainer's validation counts. (Samples of T+1 tokens leave
out fewer than T at the end of the stream; a model that sees T tokens restarts its context each sample.) The first
target has one token before it, so the trigram model gives its bigram there.
"""

import numpy as np


def _count(codes):
    """Sorted distinct codes and how often each occurs. Sorts `codes` in place."""
    codes.sort()
    first = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
    return codes[first], np.diff(np.append(first, len(codes)))


def _pack(tokens, n, vocab):
    """Codes of all n-grams: digits to the base vocab, the oldest token highest."""
    codes = tokens[: len(tokens) - n + 1].astype(np.int64)
    for k in range(1, n):
        codes *= vocab
        codes += tokens[k : len(tokens) - n + 1 + k]
    return codes


def _lookup(keys, values, codes):
    """values[i] where keys[i] == code, else 0."""
    at = np.minimum(np.searchsorted(keys, codes), len(keys) - 1)
    return np.where(keys[at] == codes, values[at], 0)


def cross_entropies(train, val, vocab, orders=3):
    """Mean nats per target of `val` for each order 1..orders; NaN for one that the training stream is too short for."""
    if vocab**orders >= 2**63:
        raise ValueError(f"vocabulary {vocab} is too large for {orders}-grams")
    targets = len(val) - 1
    prob = np.full(targets, 1.0 / vocab)
    result = []
    for n in range(1, orders + 1):
        if len(train) < n or targets < 1:
            result.append(float("nan"))
            continue
        grams, counts = _count(_pack(train, n, vocab))
        contexts = grams // vocab  # sorted, as the grams are
        first = np.flatnonzero(np.concatenate(([True], contexts[1:] != contexts[:-1])))
        kinds = np.diff(np.append(first, len(contexts)))
        totals = np.add.reduceat(counts, first)
        contexts = contexts[first]
        skip = max(0, n - 2)  # targets with fewer than n-1 tokens before them keep the lower order
        codes = _pack(val[1:] if n == 1 else val, n, vocab)
        total = _lookup(contexts, totals, codes // vocab)
        kind = _lookup(contexts, kinds, codes // vocab)
        lower = prob[skip:]
        seen = total > 0
        prob[skip:] = np.where(
            seen, (_lookup(grams, counts, codes) + kind * lower) / np.where(seen, total + kind, 1), lower
        )
        result.append(float(-np.log(prob).mean()))
    return result


def yardsticks(train, val, vocab, val_text_bytes):
    """A dict for the manifest: nats a token and bits a byte of each order."""
    targets = len(val) - 1
    nats = cross_entropies(train, val, vocab)
    out = {"train_tokens": len(train), "targets": targets, "val_text_bytes": val_text_bytes}
    for name, value in zip(("unigram", "bigram", "trigram"), nats):
        out[name] = {"nats_per_token": value, "bits_per_byte": value * targets / (np.log(2) * val_text_bytes)}
    return out
