#!/usr/bin/env python3
"""gpu_report.py: writes and judges dev/gpu_report.md for gpu_check.sh. Python's own library only.

  gpu_report.py write REPORT PARTS HASH          the report from PARTS/NAME.txt; a section whose part is not there stays as it is
  gpu_report.py verdict REPORT HASH <needed      0 when what says that the kernels are right is of these sources and clean
needed: lines `PART words that begin a line of it`, each of which must be there.

A section is of the date and of the hash of CUDA sources that its first two lines name (`2026-11-30, sources 0123456789abcdef`);
without such a hash it counts as of other sources. A later line that names a hash itself is of that one.
"""
import os
import re
import sys

JUDGED = ["right", "lab", "sanitize"]  # whether the kernels are right; the others are measurements, which may be older
ORDER = JUDGED + ["models", "bench", "input", "ranks", "curves"]
HASH = re.compile(r"\bsources ([0-9a-f]{16})\b")
DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
COUNT = re.compile(r"\b(\d+) passed, (\d+) failed")


def first_match(pattern, lines):
    found = pattern.search("\n".join(lines))
    return found.group(found.re.groups) if found else ""


class Section:
    def __init__(self, lines):
        self.lines = lines
        head = [line for line in lines if line.strip()][:2]
        self.date, self.sources = first_match(DATE, head), first_match(HASH, head)

    def body(self):
        return [line for line in self.lines if line.strip()][2:]

    def age(self):
        return f"{self.date or 'no date'}, sources {self.sources or 'not named'}"


def read_report(path):
    """The report's sections, name -> Section, in its order; none of a file that is not there."""
    sections, name = {}, None
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as f:
        for line in f.read().split("\n"):
            if line.startswith("## "):
                name = line[3:].strip()
                sections[name] = []
            elif name:
                sections[name].append(line[4:] if line.startswith("    ") else line)
    return {n: Section("\n".join(lines).strip("\n").split("\n")) for n, lines in sections.items()}


def read_parts(folder):
    sections = {}
    for name in ORDER:
        path = os.path.join(folder, name + ".txt")
        if os.path.exists(path) and os.path.getsize(path):
            with open(path, encoding="utf-8", errors="replace") as f:
                sections[name] = Section([line.rstrip() for line in f.read().rstrip("\n").split("\n")])
    return sections


def write(report, parts, now):
    kept = read_report(report)
    found = read_parts(parts)
    for name, section in kept.items():  # the parts' folder is in no clone: what it lacks, or has only older, stays
        if name in found and found[name].date and found[name].date < section.date:
            print(f"{name}: {parts} has one of {found[name].date}, older than the report's, which stays")
        elif name in found:
            continue
        found[name] = section
    names = [n for n in ORDER if n in found] + [n for n in found if n not in ORDER]
    out = [
        "# What was checked and measured on a GPU",
        "",
        "Written by `dev/gpu_check.sh report` from what the parts below have printed, each with the command `dev/gpu_check.sh PART`.",
        "`ranks` and `curves` hold what the scripts that they name printed. What the numbers mean and what bounds them: dev/doc/gpu.md.",
        "",
        f"CUDA sources (train_gdn.cu and gdn/cuda, comments and white space left out) when this was put together: {now}",
        "",
        "    section   of          CUDA sources",
    ]
    for name in names:
        section = found[name]
        which = "these" if section.sources == now else "others"
        out.append(f"    {name:9s} {section.date or 'no date':11s} {section.sources or 'not named':17s} {which}")
    for name in names:
        out += ["", f"## {name}", ""] + [("    " + line).rstrip() for line in found[name].lines]
    with open(report + ".new", "w", encoding="utf-8") as f:
        f.write("\n".join(out) + "\n")
    os.replace(report + ".new", report)
    print(f"{report} written: {', '.join(names)}")


def wrong_with(name, section, needed, now):
    """What keeps a judged section from saying that these sources are right."""
    wrong = []
    if section.sources != now:
        wrong.append(f"{name} is of other CUDA sources ({section.age()})")
    lines = [" ".join(line.split()) for line in section.body()]
    if section.sources == now:  # else said once, above
        named = [(line, first_match(HASH, [line])) for line in lines]
        wrong += [f"{name}: {line[:40]} is of sources {h}" for line, h in named if h not in ("", now)]
    for start in needed:
        of = [line for line in lines if line.startswith(start + " ")]
        if not of:
            wrong.append(f"{name}: nothing of {start}")
        if name == "lab":
            wrong += [f"{name}: no count of {start}: {line[:40]}" for line in of if not COUNT.search(line)]
    counts = COUNT.findall("\n".join(lines))
    if name != "sanitize" and not counts:
        wrong.append(f"{name}: no count of what passed")
    wrong += [f"{name}: {f} failed" for p, f in counts if int(f)]
    if any(int(p) == 0 for p, f in counts):
        wrong.append(f"{name}: a count of nothing passed")
    if name == "sanitize":
        clean = re.compile(r" (memcheck|initcheck) ERROR SUMMARY: 0 errors| racecheck RACECHECK SUMMARY: 0 hazards")
        wrong += [f"{name}: {line}" for line in lines if not clean.search(line)]
    return wrong


def verdict(report, now):
    needed = [line.split(None, 1) for line in sys.stdin.read().splitlines() if line.strip()]
    sections = read_report(report)
    wrong = []
    for name in JUDGED:
        if name in sections:
            wrong += wrong_with(name, sections[name], [start.strip() for part, start in needed if part == name], now)
        else:
            wrong.append(f"no section {name}")
    older = [f"{n} is of other CUDA sources ({s.age()})" for n, s in sections.items() if n not in JUDGED and s.sources != now]
    if wrong:
        print(f"{report} does not say that these CUDA sources ({now}) are right: make gpu-check on a GPU writes it anew")
    else:
        print(f"{report}: {', '.join(JUDGED)} are of these CUDA sources ({now}) and clean")
    for line in wrong[:12] + ([f"and {len(wrong) - 12} more"] if len(wrong) > 12 else []):
        print(f"    {line}")
    for line in older:
        print(f"    warning: {line}")
    return 1 if wrong else 0


def main():
    if len(sys.argv) == 5 and sys.argv[1] == "write":
        return write(*sys.argv[2:])
    if len(sys.argv) == 4 and sys.argv[1] == "verdict":
        return verdict(*sys.argv[2:])
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
