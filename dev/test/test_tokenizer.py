#!/usr/bin/env python3
"""Compares gdn/tokenizer.h with the SentencePiece library, through test_tokenizer --encode and --decode.

Without options: trains small BPE models (several settings) on text made here and compares ids and decoded text on
documents made here. With --model and --jsonl also a given model on real documents. Needs `pip install sentencepiece`.

  python dev/test/test_tokenizer.py [--program build/test_tokenizer] [--model M.model] [--jsonl F.jsonl[.gz]] [--count N]
"""
import argparse, gzip, hashlib, json, os, random, struct, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
WORDS = ("the model reads a long text and learns words of many kinds such as state gate delta rule memory attention "
         "über naïve café Straße Ωμέγα привет мир שלום سلام नमस्ते 日本語 中文字符 한국어 ไทย x=1 3.14159 1,234 foo_bar "
         "don't e-mail http://a.b/c?d=e&f").split()
ODD = ["😀", "👩‍👩‍👧", "🇩🇪", "e\u0301", "a\u0308\u0323", "\u200b", "\u00a0", "\u3000", "\u2581", "\ufffd", "\ufeff", "\0", "\x01",
       "\x7f", "\x85", "\t", "\r\n", "\n\n\n", "  ", "     ", "<s>", "</s>", "<unk>", "<0x41>", "<0xE2>", "[SEP]", "[SEPARATOR]",
       "\U0010ffff", "\U000e0001", "𝔘𝔫𝔦", "ﬁ", "①", "ｶﾞ"]


def make_document(rng, invalid):
    """Bytes of one document; with `invalid` some are not UTF-8."""
    out = []
    for _ in range(rng.choice([0, 1, 1, 2, 5, 20, 60, 200])):
        kind = rng.random()
        if kind < 0.55:
            out.append(rng.choice(WORDS).encode())
        elif kind < 0.75:
            out.append(rng.choice(ODD).encode())
        elif kind < 0.80:
            c = rng.randrange(0x110000)
            out.append(chr(c if not 0xD800 <= c < 0xE000 else 0x41).encode())
        elif kind < 0.85:
            out.append((rng.choice("a \n=-日é") * rng.choice([3, 17, 100])).encode())
        elif kind < 0.90 and invalid:
            out.append(rng.choice([bytes(rng.randrange(256) for _ in range(rng.randrange(1, 6))), b"\xed\xa0\x80", b"\xc0\xaf",
                                   b"\xf4\x90\x80\x80", b"\xe6\x97", b"\x80", b"\xff\xfe", b"\xf0\x9f\x98", b"\xe2\x96"]))
        else:
            out.append("".join(rng.choice("abcdefghijklmnop .,!?ABC0123456789") for _ in range(rng.randrange(1, 12))).encode())
        if rng.random() < 0.7:
            out.append(b" ")
    return b"".join(out)


def run(program, mode, model, items, width):
    """Sends length-prefixed items, returns the answers and what the program said of its time."""
    data = b"".join(struct.pack("<q", len(x) // width) + x for x in items)
    done = subprocess.run([program, mode, model], input=data, capture_output=True)
    if done.returncode:
        sys.exit(f"{program} {mode} ended with {done.returncode}: {done.stderr.decode(errors='replace').strip()}")
    answers, at, width = [], 0, 4 if mode == "--encode" else 1
    while at < len(done.stdout):
        n = struct.unpack_from("<q", done.stdout, at)[0] * width
        answers.append(done.stdout[at + 8:at + 8 + n])
        at += 8 + n
    return answers, done.stderr.decode().strip().splitlines()[-1]


class Counter:
    passed = failed = skipped = 0


def compare(name, program, path, documents, extra_ids, counter):
    """Ids of every document, and the text of those ids and of extra_ids, against the library."""
    import sentencepiece
    library = sentencepiece.SentencePieceProcessor(model_file=path)
    found = subprocess.run([program, "--info", path], capture_output=True, text=True, check=True).stdout.split()
    with open(path, "rb") as f:
        digest = hashlib.sha256(f.read()).hexdigest()
    needed = [str(x) for x in (library.vocab_size(), library.bos_id(), library.eos_id(), library.unk_id(), digest)]
    counter.passed += found == needed
    counter.failed += found != needed
    if found != needed:
        print(f"FAILED: {name}: vocabulary, BOS, EOS, unknown, SHA-256 are {found}, needed {needed}")
    start = time.time()
    want = [library.encode(d) for d in documents]
    library_time = time.time() - start
    got, speed = run(program, "--encode", path, documents, 1)
    pack = lambda ids: struct.pack(f"<{len(ids)}i", *ids)
    bad = [i for i in range(len(documents)) if i >= len(got) or got[i] != pack(want[i])]
    for i in bad[:3]:
        found = list(struct.unpack(f"<{len(got[i]) // 4}i", got[i])) if i < len(got) else None
        print(f"FAILED: {name}: ids of {documents[i][:80]!r}: {found and found[:30]}, needed {want[i][:30]}")
    texts = want + extra_ids
    back, decode_speed = run(program, "--decode", path, [pack(x) for x in texts], 4)
    bad_text = 0
    for i, ids in enumerate(texts):
        right = library.decode(ids).encode("utf-8", "surrogateescape")
        if i >= len(back) or back[i] != right:
            bad_text += 1
            if bad_text <= 3:
                print(f"FAILED: {name}: text of {ids[:30]}: {back[i][:80] if i < len(back) else None!r}, needed {right[:80]!r}")
    counter.failed += len(bad) + bad_text
    counter.passed += len(documents) - len(bad) + len(texts) - bad_text
    size = sum(map(len, documents))
    print(f"{name}: {len(documents)} documents, {size / 1e6:.2f} MB, {sum(map(len, want))} ids, {len(bad)} differ; "
          f"{len(texts)} id lists decoded, {bad_text} differ; encode {speed}; decode {decode_speed}; "
          f"the library encodes {size / 1e6 / max(library_time, 1e-9):.1f} MB/s")


def train(folder, name, seed, **settings):
    import sentencepiece
    rng, lines = random.Random(seed), []
    for _ in range(3000):
        line = make_document(rng, False).decode().replace("\0", "").replace("\n", " ").replace("\r", " ")
        lines.append(line[:1000])
    path = os.path.join(folder, name + ".model")
    options = dict(model_type="bpe", vocab_size=1200, byte_fallback=True, normalization_rule_name="identity",
                   remove_extra_whitespaces=False, character_coverage=0.98, minloglevel=2, num_threads=1)
    options.update(settings)
    with open(path, "wb") as f:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=f, **options)
    return path


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--program", help="test_tokenizer; left out: it is compiled into a temporary folder")
    ap.add_argument("--model", help="also compare this SentencePiece BPE model")
    ap.add_argument("--jsonl", help="real documents for --model: one JSON object with `text` a line, .gz or plain")
    ap.add_argument("--count", type=int, default=1000, help="how many real documents (default 1000)")
    args = ap.parse_args()
    counter = Counter()
    try:
        import sentencepiece
    except ImportError:
        print("sentencepiece is not installed (pip install sentencepiece): nothing compared")
        print("0 passed, 0 failed, 1 skipped")
        return 0
    print(f"sentencepiece {sentencepiece.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        program = args.program
        if not program:
            program = os.path.join(folder, "test_tokenizer")
            subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-O2", os.path.join(HERE, "test_tokenizer.c"), "-o", program],
                           check=True)
        rng = random.Random(7)
        documents = [make_document(rng, True) for _ in range(2000)]
        models = {
            "llama-like": dict(split_digits=True, allow_whitespace_only_pieces=True),
            "user-defined": dict(user_defined_symbols=["[SEP]", "[SEPARATOR]", "  ", "\u2581\u2581\u2581", "é", "日本", "a b"],
                                 control_symbols=["<ctl>"]),
            "no-byte-fallback": dict(byte_fallback=False),
            "extra-whitespace-removed": dict(remove_extra_whitespaces=True),
            "no-dummy-prefix": dict(add_dummy_prefix=False),
            "suffix": dict(treat_whitespace_as_suffix=True, remove_extra_whitespaces=True),
            "whitespace-inside": dict(split_by_whitespace=False, user_defined_symbols=["\n"]),
            "own-names": dict(unk_piece="[U]", bos_piece="[B]", eos_piece="[E]", unk_surface="?", unk_id=3, bos_id=0, eos_id=1, pad_id=2),
        }
        for seed, (name, settings) in enumerate(models.items()):
            path = train(folder, name, seed, **settings)
            size = sentencepiece.SentencePieceProcessor(model_file=path).vocab_size()
            few = [x for x in (0, 1, 2, 3, size - 1, size // 2)] + list(range(3, min(259, size)))
            ids = [[rng.choice(few) if rng.random() < 0.6 else rng.randrange(size) for _ in range(rng.randrange(0, 30))]
                   for _ in range(2000)]
            compare(name, program, path, documents, ids, counter)
        for name, settings in {"unigram": dict(model_type="unigram", byte_fallback=False, vocab_size=1000),
                               "nmt_nfkc": dict(normalization_rule_name="nmt_nfkc")}.items():
            path = train(folder, name, 99, **settings)
            done = subprocess.run([program, "--encode", path], input=b"", capture_output=True)
            right = done.returncode == 4 and done.stderr.count(b"\n") == 1 and b"--tokenizer" in done.stderr
            print(("" if right else "FAILED: ") + f"{name}: refused with {done.returncode}: {done.stderr.decode().strip()}")
            counter.passed += right
            counter.failed += not right
        if args.model and args.jsonl:
            with (gzip.open if args.jsonl.endswith(".gz") else open)(args.jsonl, "rt", encoding="utf-8") as f:
                real = [json.loads(line)["text"].encode() for line, _ in zip(f, range(args.count))]
            compare("made documents, " + os.path.basename(args.model), program, args.model, documents, [], counter)
            compare("real documents, " + os.path.basename(args.model), program, args.model, real, [], counter)
        else:
            print("real documents: only with --model and --jsonl")
    print(f"{counter.passed} passed, {counter.failed} failed, {counter.skipped} skipped")
    return counter.failed > 0


if __name__ == "__main__":
    sys.exit(main())
