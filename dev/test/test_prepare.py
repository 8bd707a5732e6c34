#!/usr/bin/env python3
"""Tests of data/prepare.py: every kind of input, read back by the trainer's own reader (test_shards --dump).

python dev/test/test_prepare.py [--reader build/data/test_shards]      without --reader it is compiled
"""

import gzip
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "data"))
import numpy as np  # noqa: E402
import sentencepiece  # noqa: E402

import ngram  # noqa: E402
import shardfile  # noqa: E402
import splits  # noqa: E402

counts = {"passed": 0, "failed": 0, "skipped": 0}


def check(ok, what):
    counts["passed" if ok else "failed"] += 1
    if not ok:
        print(f"FAILED: {what}")


def run(*args):
    p = subprocess.run(
        [sys.executable, os.path.join(ROOT, "data", "prepare.py"), "--workers", "1", *map(str, args)],
        capture_output=True,
        text=True,
    )
    return p.returncode, p.stdout, p.stderr


def expect_ok(what, *args):
    code, out, err = run(*args)
    check(code == 0, f"{what}: exit code {code}: {err}")
    return out


def expect_error(what, code, parts, *args):
    got, _, err = run(*args)
    check(got == code, f"{what}: exit code {got}, needed {code}: {err}")
    check(err.startswith("prepare.py: error: ") and err.count("\n") == 1, f"{what}: not one line: {err!r}")
    for part in parts:
        check(part in err, f"{what}: no '{part}' in: {err}")


def dump(reader, pattern):
    """The set as the trainer reads it: fields, document starts, tokens."""
    p = subprocess.run([reader, "--dump", pattern], capture_output=True, text=True)
    if p.returncode:
        check(False, f"{pattern}: the trainer's reader refuses it: {p.stderr}")
        return {}, [], []
    head, tokenizer, documents, tokens = p.stdout.split("\n")[:4]
    words = head.split()
    fields = dict(zip(words[::2], map(int, words[1::2])))
    fields["tokenizer"] = tokenizer.split()[1]
    return fields, list(map(int, documents.split()[1:])), list(map(int, tokens.split()[1:]))


def byte_stream(texts):
    return [t for text in texts for t in [256] + list(text.encode())]


def split_documents(tokens, starts):
    return [tuple(tokens[a:b]) for a, b in zip(starts, starts[1:] + [len(tokens)])]


def make_texts(n, seed=1):
    rng = random.Random(seed)
    words = "the a of delta rule gate state key value naïve 日本 🙂 \n \t is was . , in".split(" ")
    return ["".join(rng.choice(words) + " " for _ in range(rng.randrange(1, 60))) for _ in range(n)]


def write(path, data):
    mode, kw = ("wb", {}) if isinstance(data, bytes) else ("w", {"encoding": "utf-8"})
    with open(path, mode, **kw) as f:
        f.write(data)
    return path


def json_lines(texts, ids=None):
    return "".join(json.dumps({"text": t, **({"id": ids[i]} if ids else {})}) + "\n" for i, t in enumerate(texts))


def make_model(path):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_texts(400, 7)),
        model_writer=out,
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    write(path, out.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


# ----------------------------------------------------------------------------


def test_kinds(tmp, reader):
    texts = make_texts(40)
    lines = json_lines(texts).encode()
    folder = os.path.join(tmp, "mixed", "deep")
    os.makedirs(folder)
    inputs = {
        "jsonl": write(f"{tmp}/a.jsonl", lines),
        "jsonl.gz": write(f"{tmp}/a.jsonl.gz", gzip.compress(lines)),
        "no last newline": write(f"{tmp}/b.jsonl", lines[:-1]),
    }
    try:
        import zstandard

        compress = zstandard.ZstdCompressor().compress
        cut = lines.index(b"\n", 500) - 10  # two frames, and the seam inside a line
        inputs["jsonl.zst"] = write(f"{tmp}/a.jsonl.zst", compress(lines[:cut]) + compress(lines[cut:]))
    except ImportError:
        counts["skipped"] += 1
    try:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(
            pyarrow.table({"n": list(range(40)), "text": texts}), f"{tmp}/a.parquet", row_group_size=7
        )
        inputs["parquet"] = f"{tmp}/a.parquet"
    except ImportError:
        counts["skipped"] += 1
    separated = "<|end of text|>\n".join(texts)
    inputs["txt"] = write(f"{tmp}/a.txt", separated)
    for kind, path in inputs.items():
        more = ["--separator", "<|end of text|>\\n"] if kind == "txt" else []
        expect_ok(
            kind,
            path,
            "--out",
            f"{tmp}/out",
            "--name",
            "k",
            "--bytes",
            "--val-fraction",
            0,
            "--force",
            "--shard-tokens",
            1000,
            "--no-yardsticks",
            "--workers",
            2 if kind == "jsonl" else 1,
            *more,
        )
        fields, starts, tokens = dump(reader, f"{tmp}/out/k_train_*.bin")
        check(tokens == byte_stream(texts), f"{kind}: other tokens")
        check(starts == [i for i, t in enumerate(tokens) if t == 256], f"{kind}: document starts")
        check(
            fields.get("shards", 0) > 3
            and fields["vocab"] == 257
            and fields["bos"] == 256
            and fields["width"] == 2
            and fields["boundary"] == 1
            and fields["text_bytes"] == sum(len(t.encode()) for t in texts)
            and fields["tokenizer"] == "00" * 32,
            f"{kind}: header {fields}",
        )
        for i in range(fields.get("shards", 0)):
            one = dump(reader, f"{tmp}/out/k_train_{i:06d}.bin")[2]
            check(one[:1] == [256], f"{kind}: shard {i} does not begin with a document")
    # A folder, and whole .txt files as documents.
    for i in range(3):
        write(f"{folder}/{i}.txt", texts[i])
    write(f"{folder}/.hidden.txt", "hidden")
    write(f"{folder}/notes.md", "no text of ours")
    write(f"{tmp}/mixed/z.jsonl", json_lines(texts[3:5]))
    expect_ok("folder", f"{tmp}/mixed", "--out", f"{tmp}/out", "--name", "f", "--bytes", "--val-fraction", 0)
    check(dump(reader, f"{tmp}/out/f_train_*.bin")[2] == byte_stream(texts[:5]), "folder: other tokens")
    expect_error(
        "exists already",
        4,
        ["f_manifest.json", "--force"],
        f"{tmp}/mixed",
        "--out",
        f"{tmp}/out",
        "--name",
        "f",
        "--bytes",
    )
    check(not [n for n in os.listdir(f"{tmp}/out") if "part" in n], "leftovers")


def test_model(tmp, reader, model_path, model):
    texts = make_texts(60, 3)
    path = write(f"{tmp}/m.jsonl", json_lines(texts, [f"id{i}" for i in range(60)]))
    out = expect_ok(
        "model", path, "--out", f"{tmp}/out", "--name", "m", "--tokenizer", model_path, "--val-fraction", 0.2
    )
    check("trigram" in out and "bits/byte" in out, "model: no yardsticks printed")
    fields, starts, train = dump(reader, f"{tmp}/out/m_train_*.bin")
    _, val_starts, val = dump(reader, f"{tmp}/out/m_val_*.bin")
    both = split_documents(train, starts) + split_documents(val, val_starts)
    check(sorted(both) == sorted(tuple([1] + model.encode(t)) for t in texts), "model: other documents")
    check(
        len(val_starts) + len(starts) == 60 and 3 <= len(val_starts) <= 24, f"model: {len(val_starts)} for validation"
    )
    import hashlib

    with open(model_path, "rb") as f:
        check(fields["tokenizer"] == hashlib.sha256(f.read()).hexdigest(), "model: hash of the tokenizer")
    check(fields["vocab"] == 340 and fields["bos"] == 1 and fields["eos"] == 2, f"model: header {fields}")
    with open(f"{tmp}/out/m_manifest.json") as f:
        manifest = json.load(f)
    check(
        manifest["train"]["tokens"] == len(train)
        and manifest["val"]["documents"] == len(val_starts)
        and manifest["yardsticks"]["targets"] == len(val) - 1,
        "model: manifest",
    )
    expected = ngram.cross_entropies(np.array(train), np.array(val), 340)
    found = [manifest["yardsticks"][k]["nats_per_token"] for k in ("unigram", "bigram", "trigram")]
    check(np.allclose(expected, found, rtol=1e-12), "model: yardsticks in the manifest")
    # The split depends on the id alone: other texts, order and company change nothing.
    path = write(
        f"{tmp}/m2.jsonl", json_lines([f"{i}!" for i in range(80)][::-1], [f"id{i}" for i in range(80)][::-1])
    )
    expect_ok(
        "split", path, "--out", f"{tmp}/out", "--name", "m2", "--bytes", "--val-fraction", 0.2, "--no-yardsticks"
    )
    _, s, t = dump(reader, f"{tmp}/out/m2_val_*.bin")
    chosen = {int(bytes(d[1:-1]).decode()) for d in split_documents(t, s)}
    first = {
        i for i, text in enumerate(texts) if tuple([1] + model.encode(text)) in set(split_documents(val, val_starts))
    }
    check({i for i in chosen if i < 60} == first, "split: other documents for validation than before")


def test_shuffle(tmp, reader):
    texts = [f"document {i} " + "x" * (i % 50) for i in range(500)]
    path = write(f"{tmp}/s.jsonl", json_lines(texts))
    orders = {}
    for name, seed, workers in (("s1", 5, 1), ("s2", 5, 2), ("s3", 6, 1)):
        expect_ok(
            "shuffle",
            path,
            "--out",
            f"{tmp}/out",
            "--name",
            name,
            "--bytes",
            "--val-fraction",
            0,
            "--shuffle",
            seed,
            "--workers",
            workers,
            "--no-yardsticks",
            "--shard-tokens",
            3000,
        )
        _, starts, tokens = dump(reader, f"{tmp}/out/{name}_train_*.bin")
        orders[name] = [int(bytes(d[1:]).decode().split()[1]) for d in split_documents(tokens, starts)]
        check(sorted(orders[name]) == list(range(500)), f"shuffle {name}: documents lost or doubled")
    check(orders["s1"] == orders["s2"], "shuffle: depends on the number of workers")
    check(orders["s1"] != orders["s3"] and orders["s1"] != sorted(orders["s1"]), "shuffle: seeds alike or no shuffle")
    results = []  # the number of buckets changes nothing
    for buckets in (1, 7, 500):
        os.makedirs(f"{tmp}/buckets", exist_ok=True)
        s = splits.Shuffle(f"{tmp}/buckets", 5, np.dtype("<u2"), buckets)
        for i in range(500):
            s.add(np.full(i % 5 + 1, i, "<u2"), i)
        results.append([(t.tolist(), b) for t, b in s.drain()])
        check(not os.listdir(f"{tmp}/buckets"), "shuffle: buckets left")
    check(results[0] == results[1] == results[2], "shuffle: depends on the number of buckets")
    check([b for _, b in results[0]] == orders["s1"], "shuffle: other order than the program's")


def test_wide(tmp, reader):
    rng = np.random.default_rng(1)
    w = shardfile.ShardWriter(f"{tmp}/wide.bin", 70000, 69999, -1, b"\x05" * 32)
    stream = []
    for _ in range(300):  # several blocks, none full at a document's end
        tokens = np.append(69999, rng.integers(0, 69999, rng.integers(1, 9000))).astype(np.uint32)
        w.add(tokens, 3)
        stream += tokens.tolist()
    w.close()
    fields, starts, tokens = dump(reader, f"{tmp}/wide.bin")
    check(tokens == stream and len(starts) == 300, "wide: other tokens")
    check(fields.get("width") == 4 and fields.get("text_bytes") == 900, f"wide: header {fields}")
    check(shardfile.read_tokens(f"{tmp}/wide.bin").tolist() == stream, "wide: read by Python")
    check(shardfile.verify(f"{tmp}/wide.bin")["tokens"] == len(stream), "wide: verified")
    with open(f"{tmp}/wide.bin", "r+b") as f:
        f.seek(700001)
        byte = f.read(1)
        f.seek(700001)
        f.write(bytes([byte[0] ^ 1]))
    try:
        shardfile.verify(f"{tmp}/wide.bin")
        check(False, "wide: damage not noticed")
    except shardfile.DataError as e:
        check("block 2" in e.text, f"wide: {e.text}")


def test_errors(tmp, model_path):
    out = ["--out", f"{tmp}/bad", "--name", "b", "--bytes"]
    good = json_lines(make_texts(5)).encode()
    j = f"{tmp}/e.jsonl"
    cases = [
        ("not JSON", good + b'{"text": "x"\n', [j, "line 6", "not JSON"]),
        ("not an object", good + b'[1]\n', [j, "line 6", "list"]),
        ("no text", good + b'\n{"txt": "x", "id": "y"}\n', [j, "line 7", "missing", "txt, id", "--text-field"]),
        ("text a number", good + b'{"text": 5}\n', [j, "line 6", "int"]),
        ("not UTF-8", good + b'{"text": "\xff"}\n', [j, "line 6", "UTF-8"]),
        ("half a surrogate", good + b'{"text": "a\\ud800"}\n', [j, "line 6", "surrogate"]),
        ("deep", b"[" * 100000 + b"\n", [j, "line 1", "not JSON"]),
        ("empty", b"", [j, "empty"]),
        ("no document", b'\n{"text": ""}\n', ["no document with text"]),
    ]
    for what, data, parts in cases:
        expect_error(what, 4, parts, write(j, data), *out)
    write(j, good + b'{"text": "x"\n\xff\n{"text": ""}\n' + good)
    text = expect_ok("--skip-bad", j, *out[:2], "--name", "skip", "--bytes", "--skip-bad", "--val-fraction", 0)
    check("10 documents" in text and "1 empty and 2 bad" in text, f"--skip-bad: {text}")
    write(j, good)
    t = write(f"{tmp}/e.txt", b"good \xe2\x82 text")
    expect_error("txt not UTF-8", 4, [t, "byte 5"], t, *out)
    t = write(f"{tmp}/e.txt", "one document")
    expect_error(
        "no validation document",
        4,
        ["validation set is empty", "--val-fraction", "--separator"],
        t,
        *out,
        "--val-fraction",
        1e-9,
    )
    expect_error("no training document", 4, ["training set is empty"], t, *out, "--val-fraction", 0.9999999999)
    write(j, good + b"[]\n")
    expect_error("an error in a worker process", 4, [j, "line 6"], j, *out, "--workers", 2)
    write(j, good)
    z = write(f"{tmp}/e.jsonl.gz", gzip.compress(good * 50)[:-20])
    expect_error("cut gzip", 4, [z], z, *out)
    z = write(f"{tmp}/e.jsonl.gz", good)
    expect_error("no gzip", 4, [z], z, *out)
    try:
        import zstandard

        z = write(f"{tmp}/e.jsonl.zst", zstandard.ZstdCompressor().compress(good * 50)[:-20])
        expect_error("cut zstd", 4, [z, "truncated"], z, *out)
        z = write(f"{tmp}/e.jsonl.zst", good)
        expect_error("no zstd", 4, [z], z, *out)
    except ImportError:
        counts["skipped"] += 1
    try:
        import pyarrow
        import pyarrow.parquet

        p = write(f"{tmp}/e.parquet", good)
        expect_error("no parquet", 4, [p], p, *out)
        pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), p)
        expect_error("parquet without the column", 4, [p, "'text'", "body, n", "--text-field"], p, *out)
        expect_error("column of numbers", 4, [p, "row 0", "int"], p, *out, "--text-field", "n")
    except ImportError:
        counts["skipped"] += 1
    os.makedirs(f"{tmp}/none/sub")
    write(f"{tmp}/none/sub/x.md", "x")
    expect_error("folder without usable files", 4, [f"{tmp}/none", ".jsonl.gz"], f"{tmp}/none", *out)
    expect_error("no such file", 4, ["missing.jsonl"], f"{tmp}/missing.jsonl", *out)
    expect_error("unknown kind", 4, ["x.md"], f"{tmp}/none/sub/x.md", *out)
    expect_error("given twice", 4, [j, "twice"], j, f"{tmp}/../{os.path.basename(tmp)}/e.jsonl", *out)
    expect_error("bad tokenizer", 4, [j, "SentencePiece"], j, *out[:4], "--tokenizer", j)
    expect_error("no tokenizer file", 4, ["no.model"], j, *out[:4], "--tokenizer", f"{tmp}/no.model")
    expect_error("out is a file", 4, [j], j, "--out", j, "--name", "b", "--bytes")
    for what, args in (
        ("no tokenizer", [j, *out[:4]]),
        ("both", [j, *out, "--tokenizer", model_path]),
        ("fraction", [j, *out, "--val-fraction", "1"]),
        ("NaN", [j, *out, "--val-fraction", "nan"]),
        ("unknown option", [j, *out, "--vall-fraction", "1"]),
        ("name", [j, *out, "--name", "a/b"]),
        ("tokens", [j, *out, "--shard-tokens", "1e6"]),
        ("separator", [j, *out, "--separator", "\\x"]),
    ):
        expect_error(what, 2, [], *args)
    left = [n for n in os.listdir(f"{tmp}/bad") if not n.startswith("skip_")]
    check(not left, f"errors left {left}")


def test_stop(tmp, reader):
    path = write(f"{tmp}/long.jsonl", json_lines(["some words of text. " * 100] * 10000))
    command = [
        sys.executable,
        os.path.join(ROOT, "data", "prepare.py"),
        path,
        "--name",
        "s",
        "--bytes",
        "--val-fraction",
        "0",
        "--workers",
        "2",
        "--out",
    ]

    def start(out, **kw):
        """A run that has begun to write and is stopped, so that it is still at it."""
        p = subprocess.Popen(
            command + [f"{tmp}/{out}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw
        )
        limit = time.time() + 60
        while (
            not os.path.exists(f"{tmp}/{out}/.s.part/s_train_000000.bin") and p.poll() is None and time.time() < limit
        ):
            time.sleep(0.005)
        p.send_signal(signal.SIGSTOP)
        return p

    for number in (signal.SIGTERM, signal.SIGKILL):
        p = start("stop")
        if number == signal.SIGKILL:
            expect_error("two runs at once", 4, ["another prepare.py"], *command[2:], f"{tmp}/stop")
        p.send_signal(number)
        p.send_signal(signal.SIGCONT)
        _, err = p.communicate(timeout=60)
        if number == signal.SIGTERM:
            check(
                p.returncode == 130 and err == "prepare.py: error: stopped: no shard was written\n",
                f"SIGTERM: exit code {p.returncode}: {err}",
            )
            check(os.listdir(f"{tmp}/stop") == [], f"SIGTERM left {os.listdir(f'{tmp}/stop')}")
    check(not [n for n in os.listdir(f"{tmp}/stop") if n.endswith(".bin")], "kill -9 left a shard that looks whole")
    expect_ok("after kill -9", *command[2:], f"{tmp}/stop")
    check(dump(reader, f"{tmp}/stop/s_train_*.bin")[0].get("documents") == 10000, "after kill -9: other documents")
    # A worker that dies, and a disk that is full (a file may not grow beyond 1 MB).
    p = start("dies")
    with open(f"/proc/{p.pid}/task/{p.pid}/children") as f:
        children = list(map(int, f.read().split()))
    workers = [c for c in children if b"spawn_main" in open(f"/proc/{c}/cmdline", "rb").read()]
    os.kill(workers[0], signal.SIGKILL)
    p.send_signal(signal.SIGCONT)
    _, err = p.communicate(timeout=60)
    check(
        p.returncode == 6 and "a worker process was killed" in err and err.count("\n") == 1,
        f"dead worker: exit code {p.returncode}: {err}",
    )
    p = start("full", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)))
    p.send_signal(signal.SIGCONT)
    _, err = p.communicate(timeout=60)
    check(
        p.returncode == 4 and "File too large" in err and err.count("\n") == 1,
        f"full disk: exit code {p.returncode}: {err}",
    )
    check(not os.listdir(f"{tmp}/dies") and not os.listdir(f"{tmp}/full"), "a dead worker or a full disk left files")


def naive_cross_entropy(train, val, vocab, order):
    """The definition, with dictionaries and recursion."""
    follow = [{} for _ in range(order)]
    for n in range(order):
        for i in range(n, len(train)):
            kinds = follow[n].setdefault(tuple(train[i - n : i]), {})
            kinds[train[i]] = kinds.get(train[i], 0) + 1

    def prob(context, w):
        kinds = follow[len(context)].get(context, {})
        lower = prob(context[1:], w) if context else 1.0 / vocab
        if not kinds:
            return lower
        total = sum(kinds.values())
        return (kinds.get(w, 0) + len(kinds) * lower) / (total + len(kinds))

    logs = [np.log(prob(tuple(val[max(0, i - order + 1) : i]), val[i])) for i in range(1, len(val))]
    return -sum(logs) / len(logs)


def test_yardsticks():
    rng = np.random.default_rng(3)
    for vocab, n_train, n_val in ((5, 300, 50), (257, 4000, 700), (32000, 3000, 900), (3, 3, 2), (40, 500, 3)):
        skew = lambda n: np.minimum((rng.exponential(vocab / 20 + 1, n)).astype(np.int64), vocab - 1)  # noqa: E731
        train, val = skew(n_train), skew(n_val)
        got = ngram.cross_entropies(train, val, vocab)
        for order in (1, 2, 3):
            need = naive_cross_entropy(train.tolist(), val.tolist(), vocab, order)
            check(
                abs(got[order - 1] - need) <= 1e-12 * need,
                f"{order}-gram, vocabulary {vocab}: {got[order - 1]}, {need}",
            )
    # uint16 tokens as they come from a shard, and ids whose trigram code needs 64 bits
    train, val = np.array([65535, 65534, 65535, 65534] * 5, "<u2"), np.array([65534, 65535, 65534], "<u2")
    got, need = ngram.cross_entropies(train, val, 65536)[2], naive_cross_entropy(
        train.tolist(), val.tolist(), 65536, 3
    )
    check(abs(got - need) <= 1e-12 * need, f"large codes: {got}, {need}")
    y = ngram.yardsticks(train, val, 65536, 10)["bigram"]
    check(abs(y["bits_per_byte"] - y["nats_per_token"] * 2 / (np.log(2) * 10)) < 1e-12, "bits a byte")


def main():
    with tempfile.TemporaryDirectory() as tmp:
        if len(sys.argv) == 3 and sys.argv[1] == "--reader":
            reader = os.path.abspath(sys.argv[2])
        elif len(sys.argv) == 1:
            reader = f"{tmp}/test_shards"
            subprocess.run(
                [
                    os.environ.get("CC", "cc"),
                    "-std=c11",
                    "-O1",
                    os.path.join(ROOT, "dev/test/test_shards.c"),
                    "-o",
                    reader,
                    "-lxxhash",
                    "-lm",
                    "-lpthread",
                ],
                check=True,
            )
        else:
            print("usage: test_prepare.py [--reader build/data/test_shards]", file=sys.stderr)
            return 2
        model = make_model(f"{tmp}/test.model")
        test_yardsticks()
        test_wide(tmp, reader)
        test_kinds(tmp, reader)
        test_model(tmp, reader, f"{tmp}/test.model", model)
        test_shuffle(tmp, reader)
        test_errors(tmp, f"{tmp}/test.model")
        test_stop(tmp, reader)
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**counts))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
