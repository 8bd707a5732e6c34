#!/usr/bin/env python3
"""Draws runs into one PNG: loss, gradient norm, learning rate and tokens/s from their log.jsonl.

    .venv/bin/python scripts/plot.py out/gdn_400m_15b
    .venv/bin/python scripts/plot.py out/gdn out/h1 out/mamba2 --out compare.png --x steps --smooth 0.98
    .venv/bin/python scripts/plot.py out/gdn out/h1 out/mamba2 --out compare.png --validation

A run is its folder or its log.jsonl; it may be going on. The label is the folder's name. Needs matplotlib (scripts/setup.sh
test, or pip install -r data/requirements.txt). Exit codes: 0 drawn, 2 wrong option, 3 matplotlib is missing, 4 a log that
cannot be read or has no steps, 5 the picture cannot be written.
"""

import argparse
import json
import math
import os
import sys

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31"]


def fail(code, text):
    print(f"plot.py: error: {text}", file=sys.stderr)
    sys.exit(code)


class Run:
    """The numbers of one log.jsonl: lists over its steps, null as NaN; validations; steps at which it was resumed."""

    def __init__(self, path):
        self.path = os.path.join(path, "log.jsonl") if os.path.isdir(path) else path
        self.step, self.tokens = [], []
        self.values = {name: [] for name in ("loss", "grad_norm", "lr", "tokens_per_s")}
        self.evals, self.resumed, self.skipped = [], [], 0
        try:
            with open(self.path, encoding="utf-8") as f:
                lines = f.read().split("\n")
        except (OSError, UnicodeDecodeError) as e:
            fail(4, f"{self.path}: cannot be read: {getattr(e, 'strerror', None) or e}")
        for number, line in enumerate(lines, 1):
            if number == len(lines):
                break  # nothing, or a line that is being written
            try:
                self.take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                fail(4, f"{self.path} line {number}: needed a line of a train_gdn log, found {line[:60]!r}")
        if not self.step:
            fail(4, f"{self.path}: no steps yet")

    def take(self, entry):
        kind = entry["kind"]
        if kind == "step":
            self.step.append(int(entry["step"]))
            self.tokens.append(int(entry["tokens"]))
            self.skipped += bool(entry["skipped"])
            for name, values in self.values.items():
                values.append(math.nan if entry[name] is None else float(entry[name]))
        elif kind == "eval":
            if entry["loss"] is not None:
                self.evals.append((int(entry["step"]), float(entry["loss"])))
        elif kind == "run" and entry["resumed"]:
            self.resumed.append(int(entry["step"]))

    def at(self, step, unit):
        """A step on the x axis; a run has the same number of tokens in every step."""
        return step if unit == "steps" else step * (self.tokens[-1] / self.step[-1])


def smoothed(values, weight):
    """Exponential mean that starts without a bias; NaN stays a gap and is left out of the mean."""
    mean, total, out = 0.0, 0.0, []
    for v in values:
        if math.isfinite(v):
            mean = weight * mean + (1 - weight) * v
            total = weight * total + (1 - weight)
            out.append(mean / total)
        else:
            out.append(math.nan)
    return out


def count_text(x, _):
    """1.2k, 500M, 100B"""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(x) >= size:
            return f"{x / size:g}{unit}"
    return f"{x:g}"


def weight_of(run, args):
    """Without --smooth a mean over about a hundredth of the run, over at most 500 steps."""
    return args.smooth if args.smooth is not None else 1 - 1 / (1 + min(len(run.step), 50000) / 100)


def quantile(values, q):
    ordered = sorted(v for v in values if math.isfinite(v))
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else math.nan


def labels_of(runs):
    """Folder names; where two are alike, with as many folders before them as tell them apart."""
    parts = [os.path.abspath(r.path).split(os.sep) for r in runs]
    parts = [p[:-1] if p[-1] == "log.jsonl" else p for p in parts]
    depth = 1
    while depth < max(map(len, parts)) and len({tuple(p[-depth:]) for p in parts}) < len({tuple(p) for p in parts}):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def limits(axis, runs, name, log):
    """The part that matters: not the first steps of a loss, nor single spikes."""
    tails = [v for r in runs for v in r.values[name][len(r.step) // 50 :]]
    if name == "loss":
        tails += [v for r in runs for s, v in r.evals if s >= r.step[len(r.step) // 50]]
    low, high = quantile(tails, 0.0 if name == "loss" else 0.002), quantile(tails, 0.995)
    if name == "tokens_per_s":
        low = 0.0
    if not (math.isfinite(low) and math.isfinite(high) and high > low):
        return
    if log and low > 0:
        axis.set_ylim(low / 1.25, high * 1.25)
    else:
        axis.set_ylim(low - (0.06 * (high - low) if name != "tokens_per_s" else 0), high + 0.1 * (high - low))


def draw(runs, labels, args, plt, ticker):
    panels = [
        ("loss", "loss (nats a token)", False),
        ("grad_norm", "gradient norm before clipping", True),
        ("lr", "learning rate", False),
        ("tokens_per_s", "tokens/s", False),
    ]
    figure, axes = plt.subplots(2, 2, figsize=(14, 8.5), sharex=True, constrained_layout=True)
    for axis, (name, title, log) in zip(axes.flat, panels):
        for i, run in enumerate(runs):
            colour = COLOURS[i % len(COLOURS)]
            x, y = [run.at(s, args.x) for s in run.step], run.values[name]
            smooth = 0.0 if name == "lr" else weight_of(run, args)
            if smooth > 0:
                axis.plot(x, y, color=colour, alpha=0.22, linewidth=0.8, rasterized=True)
            dot = "." if len(x) == 1 else None  # no line has one point
            axis.plot(x, smoothed(y, smooth), color=colour, linewidth=1.6, label=labels[i], marker=dot)
            if name == "loss" and run.evals:
                axis.plot(
                    [run.at(s, args.x) for s, _ in run.evals],
                    [v for _, v in run.evals],
                    linestyle="none",
                    marker="o",
                    markersize=5,
                    markerfacecolor="white",
                    markeredgecolor=colour,
                    zorder=3,
                    label=f"{labels[i]}, validation: {run.evals[-1][1]:.3f}",
                )
            for step in run.resumed:
                axis.axvline(run.at(step, args.x), color=colour, linewidth=0.7, linestyle=":", alpha=0.6)
        if log and all(v > 0 for r in runs for v in r.values[name] if math.isfinite(v)):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axis.yaxis.set_minor_formatter(ticker.NullFormatter())
            axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        if name == "tokens_per_s":
            axis.yaxis.set_major_formatter(ticker.FuncFormatter(count_text))
        if name == "lr":
            axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axis.set_ylim(bottom=0)
        else:
            limits(axis, runs, name, axis.get_yscale() == "log")
        axis.set_title(title, fontsize=11, loc="left")
        axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    for axis in axes[1]:
        axis.set_xlabel(args.x)
        axis.xaxis.set_major_formatter(ticker.FuncFormatter(count_text))
    for axis in axes[0]:
        axis.tick_params(labelbottom=True)
    axes[0][0].legend(fontsize=9, frameon=False, loc="upper right")
    notes = []
    weights = sorted({f"{weight_of(r, args):.3g}" for r in runs})
    if weights != ["0"]:
        notes.append(f"lines: exponential mean, weight {' and '.join(weights)}; pale: every step")
    if any(r.resumed for r in runs):
        notes.append("dotted: resumed")
    if any(r.skipped for r in runs):
        notes.append(
            "skipped updates: " + ", ".join(f"{label} {r.skipped}" for r, label in zip(runs, labels) if r.skipped)
        )
    figure.suptitle(args.title or (labels[0] if len(runs) == 1 else ""), fontsize=13)
    if notes:
        figure.text(0.995, 0.002, "   ".join(notes), ha="right", va="bottom", fontsize=8, color="#555555")
        figure.get_layout_engine().set(rect=(0, 0.02, 1, 0.98))
    return figure


def draw_validation(runs, labels, args, plt, ticker):
    """One panel: the validation losses of all runs, the last one of each in the legend, lowest first."""
    figure, axis = plt.subplots(figsize=(10, 6.5), constrained_layout=True)
    for i in sorted(range(len(runs)), key=lambda i: runs[i].evals[-1][1]):
        x = [runs[i].at(step, args.x) for step, _ in runs[i].evals]
        label = f"{labels[i]}: {runs[i].evals[-1][1]:.3f}"
        y = [loss for _, loss in runs[i].evals]
        axis.plot(x, y, color=COLOURS[i % len(COLOURS)], linewidth=1.6, marker="o", markersize=4, label=label)
    losses = sorted(loss for r in runs for _, loss in r.evals[len(r.evals) // 5 :])  # the first ones would flatten it
    if losses[-1] > losses[0]:
        axis.set_ylim(losses[0] - 0.05 * (losses[-1] - losses[0]), losses[-1] + 0.05 * (losses[-1] - losses[0]))
    axis.set_xlabel(args.x)
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(count_text))
    axis.set_title(args.title or "validation loss (nats a token)", fontsize=11, loc="left")
    axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.legend(fontsize=10, frameon=False, loc="upper right")
    return figure


def main():
    parser = argparse.ArgumentParser(
        prog="plot.py", description="Draws loss, gradient norm, learning rate and tokens/s of runs into one PNG."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or its log.jsonl")
    parser.add_argument("--out", default="run.png", metavar="FILE", help="the picture (default: run.png)")
    parser.add_argument("--x", choices=("tokens", "steps"), default="tokens", help="the x axis (default: tokens)")
    parser.add_argument(
        "--smooth",
        type=float,
        metavar="WEIGHT",
        help="of the exponential mean, 0 (none) to below 1 (default: by the run's length)",
    )
    parser.add_argument("--validation", action="store_true", help="one panel: the validation losses alone")
    parser.add_argument("--title", default="", metavar="TEXT", help="over the picture (default: the run's name)")
    args = parser.parse_args()
    if args.smooth is not None and not 0 <= args.smooth < 1:
        fail(2, f"--smooth {args.smooth:g}: needed 0 or more and less than 1")
    if not args.out.lower().endswith(".png"):
        fail(2, f"--out {args.out}: needed a name that ends in .png")
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        from matplotlib import ticker
    except ImportError as e:
        fail(3, f"{e.name} is missing: run scripts/setup.sh test and use .venv/bin/python, or pip install matplotlib")
    runs = [Run(path) for path in args.runs]
    if args.validation:
        for run in runs:
            if not run.evals:
                fail(4, f"{run.path}: no validation yet: train with --val")
        figure = draw_validation(runs, labels_of(runs), args, plt, ticker)
    else:
        figure = draw(runs, labels_of(runs), args, plt, ticker)
    try:
        figure.savefig(args.out, format="png", dpi=110)
    except OSError as e:
        fail(5, f"--out {args.out}: cannot be written: {e.strerror}")
    steps = ", ".join(f"{len(r.step)} steps" for r in runs)
    print(f"{args.out}: {len(runs)} run{'s' if len(runs) > 1 else ''}, {steps}")


if __name__ == "__main__":
    main()
