#!/usr/bin/env python3
"""check_pytorch.py: does train_gdn train as plain PyTorch does?

dev/test/check_pytorch.sh runs it. A model of about five million parameters is trained twice or three times from the same
first weights on the same rows: by PyTorch in fp32, by train_gdn on CPUs and, where there is one, by train_gdncu. What
PyTorch runs is written here from the papers and shares nothing with the trainer: the recurrence token by token with
autograd behind it, torch.optim.AdamW, the learning rate and the order of the rows computed from their description.

The losses of any two, step by step, may differ by LIMIT of the loss, or LIMIT_FP32 when both are fp32. So that agreement
means something, the loss has to fall by a third at least. Rates and rows (by their hashes) must be equal.

The first weights are fla's by default. The papers' begin with gradients about three times as large, and training then makes every
rounding larger: two CPU runs, one of which rounds to bf16 where the GPU does, come to differ by 1.5% of the loss.

The text is this repository's own, byte by byte. Ends with `N passed, N failed, N skipped`; exit status 0 when nothing
failed, 2 for wrong options, 3 when PyTorch is missing.
"""
import argparse
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import time

LIMIT = 0.005  # of the loss at a step, where one of the two computes in bf16
LIMIT_FP32 = 0.001  # where both compute in fp32: roundings alone, which training makes larger
VOCAB, BOS = 257, 256
SEED = 1234
LR, MIN_LR, WARMUP, BETAS, EPS, DECAY, CLIP = 5e-4, 5e-5, 40, (0.9, 0.95), 1e-8, 0.1, 1.0
WINDOW = 64

SIZES = {  # width, MLP, delta-rule heads (key, value), attention heads
    "full": dict(width=256, ff=640, heads=2, head_k=64, head_v=128, attn_heads=4, attn_head_dim=64, layers=6),
    "small": dict(width=64, ff=128, heads=1, head_k=64, head_v=64, attn_heads=1, attn_head_dim=64, layers=2),
}
MODELS = [("gdn", dict(pattern=["gdn"])), ("gdn2 swa", dict(pattern=["gdn2", "swa"]))]


def quit_with(code, text):
    print(f"check_pytorch: {text}", file=sys.stderr)
    sys.exit(code)


# ---------------------------------------------------------------------------- the text and its order

def repository_tokens(root):
    tokens = []
    for folder in ("gdn", "gdn/cuda", "data", "dev/test", "."):
        for name in sorted(os.listdir(os.path.join(root, folder))):
            if name.endswith((".h", ".c", ".cu", ".cuh", ".py")):
                with open(os.path.join(root, folder, name), "rb") as f:
                    tokens += [BOS, *f.read()]
    return tokens


def write_llmc_shard(path, tokens):
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
        f.write(struct.pack(f"<{len(tokens)}H", *tokens))


def philox(key, high, low):
    """Philox 4x32-10 (Salmon et al. 2011): four words from a 64-bit key and a 128-bit counter."""
    c = [low & 0xFFFFFFFF, low >> 32, high & 0xFFFFFFFF, high >> 32]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def fnv(text):
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def sample_at(seed, position, samples):
    """The row at a position: a Feistel network of eight rounds on 2^(2 half) >= samples, walked until below samples."""
    epoch, x = divmod(position, samples)
    half = 1
    while 4**half < samples:
        half += 1
    mask = (1 << half) - 1
    words = philox(seed, fnv("sample order"), epoch)
    key = words[1] << 32 | words[0]
    while True:
        left, right = x >> half, x & mask
        for r in range(8):
            left, right = right, left ^ (philox(key, r, right)[0] & mask)
        x = left << half | right
        if x < samples:
            return x


def learning_rate(step, steps):  # of the update with this number, from 0
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return MIN_LR + 0.5 * (LR - MIN_LR) * (1 + math.cos(math.pi * (step - WARMUP) / (steps - 1 - WARMUP)))


# ---------------------------------------------------------------------------- the model in PyTorch

def read_safetensors(path, torch):
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        body = bytearray(f.read())
    tensors = {}
    for name, t in header.items():
        if name == "__metadata__":
            continue
        assert t["dtype"] == "F32", (name, t)
        a, b = t["data_offsets"]
        tensors[name] = torch.frombuffer(body[a:b], dtype=torch.float32).clone().reshape(t["shape"])
    return tensors


class Model:
    """w: the tensors of a checkpoint by name, gradients wanted. Arrays are [rows, tokens, ...]."""

    def __init__(self, torch, w, size, pattern):
        self.torch, self.w, self.size = torch, w, size
        self.mixers = [pattern[i % len(pattern)] for i in range(size["layers"])]
        self.used = set()

    def get(self, name):
        self.used.add(name)
        return self.w[name]

    def linear(self, x, name):
        return x @ self.get(name + ".weight").T

    def rms_norm(self, x, name, eps=1e-5):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.get(name + ".weight")

    def conv(self, x, name):  # a causal filter of each channel, the last tap is the present token; SiLU
        w, F = self.get(name + ".weight"), self.torch.nn.functional
        taps = w.shape[-1]
        return F.silu(F.conv1d(F.pad(x.transpose(1, 2), (taps - 1, 0)), w, groups=w.shape[0]).transpose(1, 2))

    def heads(self, x, n):
        return x.unflatten(-1, (n, -1))

    def recurrence(self, q, k, v, decay, erase, write):
        """Token by token: S = (I - k erase^T) Diag(decay) S + k write^T, o = S^T q / sqrt(K). All [B, T, H, K or V];
        decay has K channels or one. erase is the gate times k, write the gate times v."""
        torch = self.torch
        B, T, H, K = k.shape
        state = torch.zeros(B * H, K, v.shape[-1], device=k.device, dtype=k.dtype)

        def tokens(x):  # T arrays [B H, channels]
            return x.transpose(1, 2).reshape(B * H, T, -1).unbind(1)

        outputs = []
        for q_t, k_t, d_t, e_t, z_t in zip(*map(tokens, (q, k, decay, erase, write))):
            state = d_t.unsqueeze(2) * state
            new = z_t.unsqueeze(1) - torch.bmm(e_t.unsqueeze(1), state)  # [B H, 1, V]
            state = torch.baddbmm(state, k_t.unsqueeze(2), new)
            outputs.append(torch.bmm(q_t.unsqueeze(1), state).squeeze(1))
        o = torch.stack(outputs, 1) * K**-0.5
        return o.reshape(B, H, T, -1).transpose(1, 2)

    def delta_mixer(self, h, p, gdn2):
        torch, F, H = self.torch, self.torch.nn.functional, self.size["heads"]
        q, k, v = (self.heads(self.conv(self.linear(h, p + n + "_proj"), p + n + "_conv1d"), H) for n in "qkv")
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        rate, bias = self.get(p + "A_log").exp(), self.get(p + "dt_bias")
        if gdn2:  # Gated DeltaNet-2: a gate for each key channel, and for each value column
            f = self.linear(self.linear(h, p + "f_proj.0"), p + "f_proj.1")
            decay = (-rate[:, None] * F.softplus(self.heads(f + bias, H))).exp()
            erase = torch.sigmoid(self.heads(self.linear(h, p + "b_proj"), H)) * k
            write = torch.sigmoid(self.heads(self.linear(h, p + "w_proj"), H)) * v
            gate = self.linear(self.linear(h, p + "g_proj.0"), p + "g_proj.1") + self.get(p + "g_proj.1.bias")
        else:  # Gated DeltaNet: one decay and one beta for each head
            decay = (-rate * F.softplus(self.linear(h, p + "a_proj") + bias)).exp().unsqueeze(-1)
            beta = torch.sigmoid(self.linear(h, p + "b_proj")).unsqueeze(-1)
            erase, write = beta * k, beta * v
            gate = self.linear(h, p + "g_proj")
        o = self.rms_norm(self.recurrence(q, k, v, decay, erase, write), p + "o_norm") * F.silu(self.heads(gate, H))
        return self.linear(o.flatten(2), p + "o_proj")

    def attention_mixer(self, h, p):
        torch, H = self.torch, self.size["attn_heads"]
        q, k, v = (self.heads(self.linear(h, p + n + "_proj"), H).transpose(1, 2) for n in "qkv")
        T, D = q.shape[2:]
        t = torch.arange(T, device=h.device)
        turn = 10000.0 ** (-torch.arange(0, D, 2, device=h.device, dtype=torch.float64) / D)
        angle = t[:, None].double() * turn
        cosine, sine = angle.cos().float(), angle.sin().float()

        def rotate(x):
            a, b = x.chunk(2, -1)
            return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)

        scores = rotate(q) @ rotate(k).transpose(2, 3) * D**-0.5
        seen = (t[None] <= t[:, None]) & (t[None] > t[:, None] - WINDOW)
        o = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        return self.linear(o.transpose(1, 2).flatten(2), p + "o_proj")

    def loss(self, tokens, targets):
        F = self.torch.nn.functional
        x = self.get("model.embeddings.weight")[tokens]
        for i, mixer in enumerate(self.mixers):
            p = f"model.layers.{i}."
            h = self.rms_norm(x, p + "attn_norm")
            x = x + (self.attention_mixer(h, p + "attn.") if mixer == "swa" else
                     self.delta_mixer(h, p + "attn.", mixer == "gdn2"))
            h = self.rms_norm(x, p + "mlp_norm")
            p += "mlp."
            x = x + self.linear(F.silu(self.linear(h, p + "gate_proj")) * self.linear(h, p + "up_proj"), p + "down_proj")
        logits = self.linear(self.rms_norm(x, "model.norm"), "lm_head")
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_pytorch(torch, device, start, size, pattern, data, args):
    weights = {n: t.to(device).requires_grad_() for n, t in read_safetensors(start, torch).items()}
    model = Model(torch, weights, size, pattern)
    groups = [dict(params=[t for t in weights.values() if t.dim() > 1], weight_decay=DECAY),
              dict(params=[t for t in weights.values() if t.dim() == 1], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    tokens = torch.tensor(data, dtype=torch.long, device=device)
    samples, log = (len(data) - 1) // args.seq_len, []
    for step in range(args.steps):
        rows = [sample_at(SEED, step * args.batch + r, samples) for r in range(args.batch)]
        raw = torch.stack([tokens[i * args.seq_len : (i + 1) * args.seq_len + 1] for i in rows])
        loss = model.loss(raw[:, :-1], raw[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        if not step and model.used != set(weights):
            raise RuntimeError(f"tensors that the model does not read: {sorted(set(weights) - model.used)}")
        norm = torch.stack([t.grad.double().square().sum() for t in weights.values()]).sum().sqrt().item()
        for t in weights.values():
            t.grad.mul_(min(1.0, CLIP / norm))
        for g in optimizer.param_groups:
            g["lr"] = learning_rate(step, args.steps)
        optimizer.step()
        log.append(dict(loss=loss.item(), grad_norm=norm, lr=learning_rate(step, args.steps),
                        hash=batch_hash(raw[:, :-1])))
    return log, sum(t.numel() for t in weights.values())


def batch_hash(tokens):
    """As in log.jsonl; None without the package xxhash."""
    try:
        import xxhash
    except ImportError:
        return None
    rows = tokens.int().cpu().numpy()
    return sum(xxhash.xxh3_64_intdigest(row.tobytes(), seed=r) for r, row in enumerate(rows)) & 0xFFFFFFFFFFFFFFFF


# ---------------------------------------------------------------------------- the programs

class Program:
    """A run of train_gdn or train_gdncu in the background."""

    def __init__(self, program, out, shard, size, pattern, args, steps, lr, extra=()):
        self.out = out
        options = [program, "--model", "custom", "--pattern", " ".join(pattern), "--vocab", str(VOCAB), "--bos", str(BOS),
                   "--tied", "off", "--window", str(WINDOW), "--train", shard, "--val", "", "--out", out]
        for name, value in size.items():
            options += ["--" + name.replace("_", "-"), str(value)]
        options += ["--batch", str(args.batch), "--seq-len", str(args.seq_len), "--total-batch",
                    str(args.batch * args.seq_len), "--steps", str(steps), "--lr", str(lr), "--min-lr", str(min(lr, MIN_LR)),
                    "--warmup", str(WARMUP if steps > WARMUP else 0), "--schedule", "cosine", "--weight-decay", str(DECAY), "--decay-all", "off",
                    "--beta1", str(BETAS[0]), "--beta2", str(BETAS[1]), "--adam-eps", str(EPS), "--clip", str(CLIP),
                    "--seed", str(SEED), "--init", args.init, "--eval-every", "0", "--save-every", "0", "--log-every", "1000", *extra]
        self.command = " ".join(options)
        self.console = out + ".txt"
        with open(self.console, "w", encoding="utf-8") as f:
            self.process = subprocess.Popen(options, stdout=f, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def wait(self):
        code = self.process.wait()
        if code:
            with open(self.console, encoding="utf-8") as f:
                last = f.read().strip().split("\n")[-1]
            raise RuntimeError(f"exit code {code}: {last[-300:]} (of: {self.command})")

    def checkpoint(self, step):
        return os.path.join(self.out, f"step-{step:08d}", "model.safetensors")

    def log(self):
        with open(os.path.join(self.out, "log.jsonl"), encoding="utf-8") as f:
            lines = [d for d in map(json.loads, f) if d["kind"] == "step"]
        return [dict(loss=d["loss"], grad_norm=d["grad_norm"], lr=d["lr"], hash=int(d["batch_hash"], 16)) for d in lines]


# ---------------------------------------------------------------------------- the comparison

class Check:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def check(self, ok, text):
        self.passed += ok
        self.failed += not ok
        if not ok:
            print(f"FAILED: {text}", flush=True)

    def compare(self, model, a, b, logs):
        x, y = logs[a], logs[b]
        self.check(len(x) == len(y) > 0, f"{model}: {len(x)} steps of {a}, {len(y)} of {b}")
        differences = [abs(p["loss"] - q["loss"]) / abs(q["loss"]) if p["loss"] and q["loss"] else math.inf
                       for p, q in zip(x, y)]
        worst = max(range(len(differences)), key=differences.__getitem__)
        limit = LIMIT if "train_gdncu" in (a, b) else LIMIT_FP32
        ok = differences[worst] < limit
        print(f"{model:9s} {a:11s} {b:11s} {x[0]['loss']:9.6f} {y[0]['loss']:9.6f} {x[-1]['loss']:9.6f} "
              f"{y[-1]['loss']:9.6f} {100 * differences[0]:9.5f}% {100 * differences[worst]:9.5f}% {worst + 1:5d} "
              f"{100 * sum(differences) / len(differences):9.5f}%  {'PASS' if ok else 'FAIL'}", flush=True)
        self.check(ok, f"{model}: {a} and {b} differ by {100 * differences[worst]:.3f}% at step {worst + 1}, limit "
                       f"{100 * limit:g}%")
        rates = max(abs(p["lr"] - q["lr"]) for p, q in zip(x, y))
        self.check(rates <= 1e-12, f"{model}: learning rates of {a} and {b} differ by {rates}")
        hashes = [(p["hash"], q["hash"]) for p, q in zip(x, y) if p["hash"] is not None and q["hash"] is not None]
        self.check(all(p == q for p, q in hashes), f"{model}: {a} and {b} saw other rows")
        return len(hashes)


def main():
    parser = argparse.ArgumentParser(description="loss curves of train_gdn and train_gdncu against plain PyTorch")
    parser.add_argument("--cpu", default="", metavar="PROGRAM", help="train_gdn; empty: not compared")
    parser.add_argument("--gpu", default="", metavar="PROGRAM", help="train_gdncu; empty: not compared")
    parser.add_argument("--no-pytorch", action="store_true", help="compare the two programs alone")
    parser.add_argument("--work", default="build/pytorch", metavar="DIR", help="folder, emptied [build/pytorch]")
    parser.add_argument("--size", choices=SIZES, default="full", help="full: five million parameters [full]")
    parser.add_argument("--only", default="", metavar="NAME", help="this model alone")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--init", choices=("fla", "paper"), default="fla", help="first weights [fla]")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step [8]")
    parser.add_argument("--seq-len", type=int, default=160, help="tokens of a row [160]")
    args = parser.parse_args()
    if args.steps < WARMUP + 2:
        parser.error(f"--steps {args.steps}: needed {WARMUP + 2} or more")
    if not args.cpu and not args.gpu or (args.no_pytorch and not (args.cpu and args.gpu)):
        parser.error("nothing to compare: name --cpu and --gpu")
    if args.only and args.only not in [name for name, _ in MODELS]:
        parser.error(f"--only {args.only}: needed one of {[name for name, _ in MODELS]}")
    torch, device = None, "cpu"
    if not args.no_pytorch:
        try:
            import torch
        except ImportError as e:
            quit_with(3, f"{e}: PyTorch is needed (pip install torch)")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        device = "cuda" if torch.cuda.is_available() else "cpu"
        print(f"torch {torch.__version__} on {torch.cuda.get_device_name() if device == 'cuda' else 'the CPU'}")
    if os.path.isdir(args.work):
        if os.listdir(args.work) and not os.path.exists(os.path.join(args.work, "text.bin")):
            parser.error(f"--work {args.work}: holds other files; needed a new folder, or one of an earlier check")
        shutil.rmtree(args.work)
    os.makedirs(args.work)
    data = repository_tokens(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    shard = os.path.join(args.work, "text.bin")
    write_llmc_shard(shard, data)
    size, check = SIZES[args.size], Check()
    print(f"{args.steps} steps of {args.batch} x {args.seq_len} tokens, lr {LR:g}, AdamW, clipping at {CLIP:g}; limit at "
          f"every step {100 * LIMIT:g}% of the loss, {100 * LIMIT_FP32:g}% where both are fp32\n{'model':9s} {'one':11s} {'other':11s} {'first':>9s} {'first':>9s} "
          f"{'last':>9s} {'last':>9s} {'step 1':>10s} {'largest':>10s} {'at':>5s} {'mean':>10s}", flush=True)
    for name, settings in MODELS:
        if args.only and name != args.only:
            continue
        pattern, begin = settings["pattern"], time.time()
        hashes, folder = 0, os.path.join(args.work, name.replace(" ", "-"))
        try:
            start = Program(args.cpu or args.gpu, folder + "-start", shard, size, pattern, args, 1, 0)
            start.wait()  # a step with the learning rate 0: the first weights
            runs = {label: Program(program, f"{folder}-{label}", shard, size, pattern, args, args.steps, LR)
                    for label, program in (("train_gdn", args.cpu), ("train_gdncu", args.gpu)) if program}
            logs, params = {}, 0
            if torch:
                logs["PyTorch"], params = train_pytorch(torch, device, start.checkpoint(1), size, pattern, data, args)
            for label, run in runs.items():
                run.wait()
                logs[label] = run.log()
        except (OSError, RuntimeError) as e:
            check.check(False, f"{name}: {e}")
            continue
        labels = list(logs)
        for i, a in enumerate(labels):
            for b in labels[i + 1 :]:
                hashes += check.compare(name, a, b, logs)
            fall = logs[a][-1]["loss"] / logs[a][0]["loss"]
            check.check(args.steps < 200 or fall < 2 / 3, f"{name}: {a} learned little: the loss fell to {fall:.2f} of "
                                                          "the first: the comparison says nothing")
        print(f"{name:9s} {f'{params:,} parameters, ' * (params > 0)}{time.time() - begin:.0f} s, {hashes} hashes of rows "
              f"compared{'' if not torch or logs['PyTorch'][0]['hash'] else ' (PyTorch without: no package xxhash)'}", flush=True)
    print(f"{check.passed} passed, {check.failed} failed, {check.skipped} skipped")
    return 1 if check.failed or not check.passed else 0


if __name__ == "__main__":
    sys.exit(main())
