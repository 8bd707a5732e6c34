#!/usr/bin/env python3
"""floors.py [PRESET[:SEQ_LEN]]...: the tokens/s of one H200 that dev/bench/models.txt holds whole models against.

The time of 32,768 tokens with nothing overlapped: matrix products (and attention's, which is bound by them) at the measured
rate of the model's shapes, every other byte that the fused design moves at the measured rate of a copy. Without arguments:
the models of models.txt, after the two for which the same sum was first made by hand: 69,500 and 70,500. Reads sizes and
FLOPs from `./train_gdn --model PRESET --dry-run`.
"""
import os
import re
import subprocess
import sys

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
TOKENS = 32768  # of a step
FLOPS = 7.93e9 * TOKENS / 0.383  # of products: fla-gdn-1b's took 383 ms; the labs hold single products against 675 TFLOP/s
BYTES = 4.27e12  # of a copy, a second
CHUNK = 64


def describe(preset):
    text = subprocess.run(["./train_gdn", "--model", preset, "--dry-run"], capture_output=True, text=True, check=True).stdout
    size = {}
    for line in text.split("\n"):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|"):
            size.update((cells[i].rstrip(" *"), cells[i + 1]) for i in range(0, len(cells) - 1, 2))
    size["matrix"] = float(re.search(r"\(([\d.e+]+) matrix products", text).group(1))
    size["parameters"] = int(re.search(r"^  total +([\d,]+)", text, re.M).group(1).replace(",", ""))
    return size


def delta_rule_bytes(heads, v_heads, K, V, gate_channels, erase_channels):
    """Bytes a token of prepare, scan, reverse scan and gradients: what dev/cuda/delta_rule.cu's benchmark counts."""
    k, v = 2 * heads * K, 2 * v_heads * V
    state, pairs, vectors = 2 * v_heads * K * V / CHUNK, 2 * 8192 * v_heads / CHUNK, 1024 * v_heads / CHUNK
    gates = k * (2 if erase_channels else 1) if gate_channels else 0
    operands = 3 * k if gate_channels else 0
    write = v if erase_channels else 0
    prepare = 2 * k + pairs + vectors + gates + operands
    scan = (operands or 2 * k) + write + pairs + vectors + 3 * v + state
    reverse = (operands or 2 * k) + pairs + vectors + 2 * v + state
    gradients = 4 * k + vectors + 5 * v + 2 * state + 2 * gates + 2 * write
    return prepare + scan + reverse + gradients


def convolution_and_norm(channels, gated, gate=True):
    """Bytes a token: the convolution reads and writes (backward: dy, x, dx); the norm at the mixer's end reads o and gate, writes
    one (backward: dy, o, gate, their gradients, and its output once more)."""
    return 2 * channels * (2 + 3) + 2 * gated * (3 + 6 if gate else 2 + 4)


def mixer(kind, size, T):
    """(bytes, FLOPs) a token of a layer's mixer outside its matrix products, forward and backward."""
    n = {key: int(value) for key, value in size.items() if isinstance(value, str) and value.isdigit()}
    if kind in ("swa", "attn"):
        window = min(T, n["window"]) if kind == "swa" else T
        keys = (window * (window + 1) / 2 + (T - window) * window) / T  # of a token, on average
        q, kv = n["attn-heads"] * n["attn-head-dim"], n["attn-kv-heads"] * n["attn-head-dim"]
        return 2 * 2 * 2 * (q + kv), (4 + 10) * q * keys  # RoPE: reads and writes q and k, both ways. The way
        # back is in attention's backward by now, which would make the floors of these models 0.3 to 0.5% higher
    if kind == "mamba2":
        inner, state = n["mamba-expand"] * n["width"], n["mamba-state"]
        groups = n["mamba-groups"]
        return (delta_rule_bytes(groups, inner // n["mamba-head"], state, n["mamba-head"], False, False) +
                convolution_and_norm(inner + 2 * groups * state, inner), 0)
    H, HV, K, V = n["heads"], n["v-heads"], n["head-k"], n["head-v"]
    return (delta_rule_bytes(H, HV, K, V, kind in ("kda", "gdn2"), kind == "gdn2") +
            convolution_and_norm(2 * H * K + HV * V, HV * V, kind != "deltanet"), 0)


def floor(preset, T):
    size = describe(preset)
    width, layers, ff, pattern = int(size["width"]), int(size["layers"]), int(size["ff"]), size["pattern"].split()
    # two norms (x and h; dy, x, dx twice, h once more), two residuals; SwiGLU (gate, up, product; dproduct, gate, up,
    # theirs, product)
    layer = width * (2 * 4 + 2 * 2 + 2 * 10) + ff * (6 + 12)
    moved, flops = layers * layer, size["matrix"]
    for i in range(layers):
        b, f = mixer(pattern[i % len(pattern)], size, T)
        moved, flops = moved + b, flops + f
    moved += 2 * 2 * int(size["vocab"])  # logits, read and overwritten by their gradients
    seconds = TOKENS * flops / FLOPS + (TOKENS * moved + 30 * size["parameters"]) / BYTES  # AdamW: 30 bytes a parameter
    return TOKENS / seconds


def main():
    asked = sys.argv[1:]
    if not asked:
        for preset, T, known in (("fla-gdn-1b", 4096, 69500), ("fla-h1-1b", 4096, 70500)):
            print(f"# {preset} {floor(preset, T):,.0f}, by hand {known:,}")
        with open("dev/bench/models.txt", encoding="utf-8") as f:
            rows = [line.split() for line in f if line.strip() and not line.startswith("#")]
        asked = list(dict.fromkeys(f"{row[0]}:{row[2]}" for row in rows))
    for one in asked:
        preset, _, T = one.partition(":")
        print(f"{preset:18s} {T or 4096:>6} {floor(preset, int(T or 4096)):9,.0f}")


if __name__ == "__main__":
    sys.exit(main())
