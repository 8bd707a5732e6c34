#!/usr/bin/env python3
"""bench_ssd.py: Mamba2's state-space product (SSD) here beside the Triton kernels of state-spaces/mamba, one after the other
on the same GPU: 8 x 4,096 tokens, 64 heads of 64, state 128, one group, bf16. Not part of `make test`: it needs a GPU,
PyTorch with Triton, and their package's Python files.

    dev/bench/bench_ssd.py MAMBA [LAB]

MAMBA: a checkout of https://github.com/state-spaces/mamba, or a folder with its mamba_ssm/ops/triton and mamba_ssm/utils.
LAB:   the lab of the delta rule (default build/lab/delta_rule; `make lab` builds it). It is run with `bench`.

Both sides: x, B, C and dt before its softplus in bf16, dt's softplus inside, no D, no gate; every input's gradient; the
second-level cache overwritten before each call; median of 15 after 3 that are not counted. Theirs tunes itself before,
which is not counted.
"""
import argparse
import importlib.machinery
import os
import re
import subprocess
import sys
import types


def median_ms(function, flush, times=15):
    import torch

    for _ in range(3):
        function()
    taken = []
    for _ in range(times):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    return sorted(taken)[times // 2]


def theirs(folder):
    """ms of forward, of forward and backward; a line that says with what."""
    import torch
    import triton

    # their package's __init__ asks for compiled extensions that these kernels do not use: a package without it
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.utils"):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(folder, *name.split("."))]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    torch.manual_seed(1)
    B, T, H, P, N = 8, 4096, 64, 64, 128
    bf16 = dict(device="cuda", dtype=torch.bfloat16)
    x, dt = torch.randn(B, T, H, P, **bf16), torch.randn(B, T, H, **bf16) - 3
    b, c = torch.randn(B, T, 1, N, **bf16), torch.randn(B, T, 1, N, **bf16)
    a, bias = -torch.rand(H, device="cuda") - 0.5, torch.zeros(H, device="cuda")
    inputs = [t.requires_grad_() for t in (x, dt, a, b, c, bias)]
    d_out = torch.randn(B, T, H, P, **bf16)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def forward():
        return mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size=256, dt_bias=bias, dt_softplus=True)

    def both():
        torch.autograd.grad(forward(), inputs, d_out)

    with torch.no_grad():
        f = median_ms(forward, flush)
    return f, median_ms(both, flush), f"torch {torch.__version__}, triton {triton.__version__}"


def ours(lab):
    """ms of forward, of forward and backward, and the floor of both."""
    done = subprocess.run([lab, "bench"], capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"bench_ssd: error: {lab} bench: exit code {done.returncode}: {done.stderr.strip()[-200:]}")
    part = next((p for p in re.split(r"\n\n", done.stdout) if re.match(r"\s*SSD B=8 T=4096", p)), "")
    found = [re.search(rf"^  {name} +([0-9.]+) ms", part, re.M) for name in ("forward", r"forward \+ backward")]
    floor = re.search(r"^  sum .* floor +([0-9.]+) ms", part, re.M)
    if not all(found) or not floor:
        sys.exit(f"bench_ssd: error: {lab} bench printed no times of SSD at 8 x 4096")
    return [float(m.group(1)) for m in found] + [float(floor.group(1))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mamba", metavar="MAMBA")
    parser.add_argument("lab", metavar="LAB", nargs="?", default="build/lab/delta_rule")
    options = parser.parse_args()
    needed = os.path.join(options.mamba, "mamba_ssm", "ops", "triton", "ssd_combined.py")
    if not os.path.isfile(needed):
        sys.exit(f"bench_ssd: error: {needed}: no such file; MAMBA must be a checkout of state-spaces/mamba")
    try:
        import einops, packaging, torch, triton  # noqa: E401,F401
    except ImportError as problem:
        sys.exit(f"bench_ssd: error: {problem}; needed: torch, triton, einops, packaging")
    if not torch.cuda.is_available():
        sys.exit("bench_ssd: error: PyTorch finds no GPU")
    f, both, floor = ours(options.lab)
    their_f, their_both, versions = theirs(options.mamba)
    print(f"SSD, 8 x 4,096 tokens, 64 heads of 64, state 128, one group, bf16; {torch.cuda.get_device_name()}, {versions}")
    print(f"{'':24s} {'forward':>9s} {'forward + backward':>19s}")
    print(f"{'here':24s} {f:6.3f} ms {both:16.3f} ms   {100 * floor / both:.0f}% of the floor of {floor:.2f} ms")
    print(f"{'state-spaces/mamba':24s} {their_f:6.3f} ms {their_both:16.3f} ms   {their_both / both:.2f} times the time here")


if __name__ == "__main__":
    main()
