#!/usr/bin/env python3
"""fill_costs.py PRESET=TOKENS_PER_S[,TOKENS_PER_S_OF_TWO]...: puts measured speeds of one H200, and of two of a machine, into
the cost sheets of scripts/*_1*b.sh: RATE, RATE2, the speed lines and the table of hours and dollars. It can be run again with
other numbers. DATE and HOW in the environment go into the speed lines, and MICRO, how many micro-batches a step had: one
number, or two for one GPU and for each of two ("1 2", the default: gpu_check.sh models and bench_ranks.sh MICRO=4); PRICE
into the table."""
import glob
import os
import re
import subprocess
import sys

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
rates = dict(a.split("=") for a in sys.argv[1:])
how, date = os.environ.get("HOW", ""), os.environ.get("DATE", "")
micro = [int(n) for n in os.environ.get("MICRO", "1 2").split()]
if not rates or not date or len(micro) not in (1, 2):
    sys.exit(__doc__)
SPEED = r"^#   speed .*\n(?:#    +(?:measured|steps of) .*\n)*"  # in a sheet
for path in sorted(glob.glob("scripts/*_1*b.sh")):
    text = open(path).read()
    preset = re.search(r" PRESET=(\S+)", text).group(1)
    if preset not in rates:
        print(f"{path}: nothing for {preset}")
        continue
    one, _, two = rates[preset].partition(",")
    text = re.sub(r" RATE=\S+( RATE2=\S*)?", f" RATE={one}" + (f" RATE2={two}" if two else ""), text)
    speed = f"{int(one):,} tokens/s on one H200" + (f", {int(two):,} on two" if two else "")
    # the update comes once a step: the fewer micro-batches, the more it weighs, and two GPUs may look more than twice one
    steps = f"steps of {micro[0]} micro-batch{'es' if micro[0] > 1 else ''}"
    if two and micro[0] != micro[-1]:
        steps += f" on one, of {micro[-1]} each on two, where the update weighs less"
    sheet = f"#   speed         {speed}\n#                 measured {date}{how}\n#                 {steps}\n"
    text = re.sub(SPEED, lambda m: sheet, text, flags=re.M)
    open(path, "w").write(text)
    env = {k: v for k, v in os.environ.items() if k not in ("TOKENS", "TOTAL_BATCH", "DRY_RUN", "MODEL")}
    table = subprocess.run([path], env=dict(env, COSTS="1"), capture_output=True, text=True, check=True).stdout
    lines = "".join("#" + line + "\n" for line in table.rstrip("\n").split("\n"))
    text = re.sub(r"^#   +(GPUs|\d+ ).*\n", "", text, flags=re.M)  # an earlier table
    text = re.sub(SPEED, lambda m: m.group(0) + lines, text, flags=re.M)
    open(path, "w").write(text)
    print(path, one, two)
