#!/usr/bin/env python3
"""Tests of dev/gpu_check.sh without a GPU: the hash of the CUDA sources, what becomes the report, and its verdict, in a copy
of the scripts with small sources; the parts run programs that print what the tests say.

dev/test/test_gpu_report.py [NAME...]      Python's own library only
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

from case_runner import check, run_cases

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ROOT = tempfile.mkdtemp(prefix="test_gpu_report_")
LABS = "rmsnorm swiglu gated_rmsnorm short_conv classifier embedding adamw matmul delta_rule sliding_attention".split()


class Copy:
    """A folder with the scripts and two CUDA sources."""

    def __init__(self, name):
        self.root = os.path.join(ROOT, name)
        self.programs, self.parts = os.path.join(self.root, "programs"), os.path.join(self.root, "parts")
        self.report = os.path.join(self.root, "dev", "gpu_report.md")
        for folder in ("dev/bench", "gdn/cuda", "programs", "parts"):
            os.makedirs(os.path.join(self.root, folder))
        for script in ("gpu_check.sh", "gpu_report.py"):
            shutil.copy(os.path.join(REPOSITORY, "dev", script), os.path.join(self.root, "dev"))
        self.put("train_gdn.cu", "int main() { return 0; }  // a comment\n")
        self.put("gdn/cuda/a_b.cuh", "int a;\n")
        self.put("gdn/cuda/ab.cuh", 'const char *s = "// no comment";\n')

    def put(self, path, text, mode=0o644):
        path = os.path.join(self.root, path)
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
        os.chmod(path, mode)

    def program(self, name, text):
        self.put(os.path.join("programs", name), "#!/bin/bash\n" + text, 0o755)

    def part(self, name, text, date="2026-12-01", sources=None):
        self.put(f"parts/{name}.txt", f"NVIDIA H200, 580.1\n{date}, sources {sources or self.hash()}, CUDA 13.0\n{text}")

    def run(self, *args, want=0, **env):
        env = {**os.environ, "PROGRAMS": self.programs, "PARTS": self.parts, "PATH": self.programs + ":" + os.environ["PATH"], **env}
        p = subprocess.run([os.path.join(self.root, "dev/gpu_check.sh"), *args], capture_output=True, text=True, env=env, timeout=60)
        check(p.returncode == want, f"{args}: exit code {p.returncode}, needed {want}: {p.stdout[-800:]} {p.stderr[-800:]}")
        return p.stdout

    def hash(self):
        text = self.run("hash").strip()
        check(re.fullmatch("[0-9a-f]{16}", text), f"hash {text!r}")
        return text

    def text(self):
        with open(self.report, encoding="utf-8") as f:
            return f.read()

    def good_parts(self, **of):
        """All parts, as clean runs leave them; of: keyword arguments of part()."""
        self.part("right", "1234 passed, 0 failed, 0 skipped\ngdn   12 shapes  error / limit 0.49\n", **of)
        self.part("lab", "".join(f"{lab:18s} 251 passed, 0 failed, 0 skipped\n" for lab in LABS), **of)
        pairs = [(lab, "small", t) for lab in LABS if lab != "matmul" for t in ("memcheck", "racecheck", "initcheck")]
        pairs += [("delta_rule", "general", t) for t in ("memcheck", "racecheck", "initcheck")]
        pairs += [("test_gdncu", case, "memcheck") for case in ("mamba2 gdn swa B=2 T=65", "gdn2 kda documents B=2 T=129")]
        said = dict(racecheck="RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
        self.part("sanitize", "".join(f"{a:18s} {b:8s} {t:9s} {said.get(t, 'ERROR SUMMARY: 0 errors')}\n" for a, b, t in pairs), **of)
        for name in ("models", "bench", "input", "ranks", "curves"):
            self.part(name, f"what {name} says\n", **of)


def test_hash():
    c = Copy("hash")
    first = c.hash()
    check(c.hash() == first, "not the same twice")
    found = subprocess.run(["locale", "-a"], capture_output=True, text=True).stdout.split()
    for locale in ["C"] + [x for x in found if "UTF-8" in x or "utf8" in x][:3]:
        check(c.run("hash", LC_ALL=locale).strip() == first, f"another hash in the locale {locale}")
    # a stand-in for the shell's order in other locales: the sources named in another one
    script = os.path.join(c.root, "dev/gpu_check.sh")
    text = open(script, encoding="utf-8").read()
    check(text.count("train_gdn.cu gdn/cuda/*") == 1, "the sources are named in another way")
    c.put("dev/gpu_check.sh", text.replace("train_gdn.cu gdn/cuda/*", "gdn/cuda/ab.cuh gdn/cuda/a_b.cuh train_gdn.cu"), 0o755)
    check(c.hash() == first, "the hash depends on the order of the names")
    c.put("dev/gpu_check.sh", text, 0o755)
    c.put("train_gdn.cu", "// other words\nint main() {\n  return 0;\n}\n")
    check(c.hash() == first, "comments and white space count")
    c.put("gdn/cuda/ab.cuh", 'const char *s = "// a comment?";\n')
    check(c.hash() != first, "a string does not count")
    c.put("gdn/cuda/ab.cuh", 'const char *s = "// no comment";\n')
    check(c.hash() == first, "not that of before")
    c.put("gdn/cuda/new.cuh", "")
    check(c.hash() != first, "a new file does not count")


def test_report_of_all_parts():
    c = Copy("all")
    c.good_parts()
    c.run("report")
    text = c.text()
    head = text.split("\n## ")[0]
    for name in ("right", "lab", "sanitize", "models", "bench", "input", "ranks", "curves"):
        check(re.search(rf"^    {name} +2026-12-01 +{c.hash()} +these$", head, re.M), f"{name} in the head: {head}")
        with open(os.path.join(c.parts, name + ".txt")) as f:
            check(all("    " + line.rstrip() + "\n" in text for line in f), f"{name}: not all of it is in the report")
    out = c.run("verdict")
    check("warning" not in out and c.hash() in out, out)
    c.run("report", PARTS=os.path.join(c.root, "none"))  # again, from the report alone
    check(c.text() == text, "a report without parts is not the one of before")


def test_sources_changed():
    c = Copy("changed")
    c.good_parts()
    c.run("report")
    old = c.hash()
    c.put("gdn/cuda/ab.cuh", "int changed;\n")
    out = c.run("verdict", want=1)
    for name in ("right", "lab", "sanitize"):
        check(f"{name} is of other CUDA sources (2026-12-01, sources {old})" in out, out)
    check("models is of other CUDA sources (2026-12-01, sources " + old in out, out)
    c.run("report")  # the same parts, put together anew: still what they are of
    check(c.run("verdict", want=1) == out, "a new report of old parts is judged otherwise")
    check(re.search(rf"^    right +2026-12-01 +{old} +others$", c.text(), re.M), c.text()[:900])


def test_only_measurements_are_old():
    c = Copy("measurements")
    c.good_parts(sources="0123456789abcdef", date="2026-11-01")
    models = open(os.path.join(c.parts, "models.txt")).read()
    c.good_parts()
    c.put("parts/models.txt", models)
    c.put("parts/bench.txt", "NVIDIA H200\n2026-11-02, sources of an earlier commit\nrmsnorm 75.5 us\n")
    c.run("report")
    out = c.run("verdict")
    check("warning: models is of other CUDA sources (2026-11-01, sources 0123456789abcdef)" in out, out)
    check("warning: bench is of other CUDA sources (2026-11-02, sources not named)" in out, out)
    check(out.count("warning") == 2, out)


def test_parts_that_are_not_there_stay():
    c = Copy("kept")
    c.good_parts()
    c.run("report")
    before = c.text()
    shutil.rmtree(c.parts)
    os.mkdir(c.parts)
    c.part("models", "new numbers\n", date="2026-12-02")
    c.put("parts/curves.txt", "NVIDIA H200\n2026-11-30, sources 0123456789abcdef\nolder than the report's\n")
    out = c.run("report")
    check("curves:" in out and "2026-11-30, older than the report's" in out, out)
    text = c.text()
    check("new numbers" in text and "what models says" not in text, "the new part is not in the report")
    check("what curves says" in text and "older than" not in text, "an older part took a section's place")
    for name in ("right", "lab", "sanitize", "bench", "input", "ranks"):
        section = before.split(f"\n## {name}\n")[1].split("\n## ")[0]
        check(f"\n## {name}\n{section}" in text, f"{name} was lost or changed")
    check("warning" not in c.run("verdict"), "the verdict has changed")


def test_verdict_looks_into_sections():
    for name, change, said in (
        ("failed", ("right", "1234 passed, 0 failed", "1233 passed, 1 failed"), "right: 1 failed"),
        ("nothing", ("right", "1234 passed", "0 passed"), "right: a count of nothing passed"),
        ("no-count", ("right", "1234 passed, 0 failed, 0 skipped", ""), "right: no count"),
        ("lab-failed", ("lab", "adamw              251 passed, 0", "adamw              250 passed, 1"), "lab: 1 failed"),
        ("lab-lost", ("lab", "delta_rule ", "delta "), "lab: nothing of delta_rule"),
        ("lab-no-count", ("lab", "adamw              251 passed, 0 failed", "adamw              died"),
         "lab: no count of adamw"),
        ("line-of-other-in-right", ("right", "0.49", "0.49  (2026-11-30, sources 0123456789abcdef)"),
         "is of sources 0123456789abcdef"),
        ("hazards", ("sanitize", "RACECHECK SUMMARY: 0 hazards", "RACECHECK SUMMARY: 7 hazards"), "7 hazards"),
        ("errors", ("sanitize", "ERROR SUMMARY: 0 errors", "ERROR SUMMARY: 10 errors"), "10 errors"),
        ("stopped", ("sanitize", "ERROR SUMMARY: 0 errors", "stopped after 240 s, 0 findings until then"), "stopped after 240 s"),
        ("pair-lost", ("sanitize", "gated_rmsnorm      small    racecheck", "gated_rmsnorm      small    memcheck "),
         "sanitize: nothing of gated_rmsnorm small racecheck"),
        ("engine-lost", ("sanitize", "test_gdncu", "some_other"), "nothing of test_gdncu mamba2 gdn swa B=2 T=65 memcheck"),
        ("line-of-other", ("sanitize", "0 warnings)", "0 warnings)  (2026-11-30, sources 0123456789abcdef)"),
         "is of sources 0123456789abcdef"),
    ):
        c = Copy("judge-" + name)
        c.good_parts()
        part, old, new = change
        with open(os.path.join(c.parts, part + ".txt")) as f:
            text = f.read()
        check(old in text, f"{name}: {old!r} is not in the part")
        c.put(f"parts/{part}.txt", text.replace(old, new))
        c.run("report")
        out = c.run("verdict", want=1)
        check(said in out, f"{name}: {out}")
    c = Copy("judge-absent")
    c.run("verdict", want=1)  # no report at all
    c.good_parts()
    os.remove(os.path.join(c.parts, "sanitize.txt"))
    c.run("report")
    check("no section sanitize" in c.run("verdict", want=1), "a section that is not there is not missed")


def fake_machine(c, tool_result="ERROR SUMMARY: 0 errors"):
    """Programs that a run of the parts meets: labs, the engine's test, nvidia-smi, compute-sanitizer."""
    c.program("nvidia-smi", "echo 'NVIDIA H200, 580.1'\n")
    for lab in LABS:
        c.program(lab, "echo 251 passed, 0 failed, 0 skipped\n")
    c.program("rmsnorm-racecheck", "echo 251 passed, 0 failed, 0 skipped\n")
    c.program("test_gdncu", """
if [ "${1:-}" = --only ]; then echo "cuda $2"; exit 0; fi
echo 'cuda gdn                          B=2 T=1    worst error / limit 0.31 (logits)'
echo 'cuda gdn                          B=2 T=17   worst error / limit 0.49 (model.layers.0.attn.A_log)'
echo 'cuda kda swa                      B=2 T=17   worst error / limit 0.20 (h_end)'
echo 'cuda tensor attn.A_log                         2 compared  error / limit 0.49 at gdn B=2 T=17'
echo '1234 passed, 0 failed, 0 skipped'
""")
    c.program("compute-sanitizer", f"""
echo "$*" >>"{c.root}/sanitized"
shift
tool=$1; shift
"$@" || exit $?
if [ $tool = racecheck ]; then echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'
else echo '========= {tool_result}'; fi
""")


def test_parts():
    c = Copy("parts")
    fake_machine(c)
    c.run("right", "lab", "sanitize", "report")
    text = c.text()
    check(re.search(r"^    gdn +2 shapes +error / limit 0.49 at 2 x 17 +model.layers.0.attn.A_log$", text, re.M), text[:1500])
    check(re.search(r"^    attn.A_log +2 compared +error / limit 0.49 at gdn B=2 T=17$", text, re.M), text[:1500])
    check(re.search(r"^    gated_rmsnorm +small +racecheck +RACECHECK SUMMARY: 0 hazards", text, re.M), "no racecheck of gated_rmsnorm")
    with open(os.path.join(c.root, "sanitized")) as f:
        calls = f.read()
    check("--tool memcheck " + c.programs + "/test_gdncu --only mamba2 gdn swa B=2 T=65\n" in calls, calls)
    check("rmsnorm-racecheck small\n" in calls and "delta_rule general\n" in calls, calls)
    c.run("verdict")


def test_parts_that_fail():
    c = Copy("parts-fail")
    fake_machine(c, "ERROR SUMMARY: 3 errors")
    c.run("lab", "right")
    out = c.run("sanitize", "report", want=1)
    check("3 errors" in out and "3 errors" in c.run("verdict", want=1), out)
    fake_machine(c)
    c.program("gated_rmsnorm", "echo FAILED: something; echo 250 passed, 1 failed, 0 skipped; exit 1\n")
    out = c.run("sanitize", "report", want=1)  # what fails its own checks is not clean, whatever the tool found
    check("exit code 1: ERROR SUMMARY: 0 errors" in out or "exit code 1: FAILED" in out or "exit code 1: 250" in out, out)
    check("sanitize: gated_rmsnorm" in c.run("verdict", want=1), "the verdict does not name it")
    # a part that is interrupted leaves what an earlier one found
    with open(os.path.join(c.parts, "right.txt")) as f:
        before = f.read()
    c.program("test_gdncu", "echo 5 passed, 0 failed, 0 skipped\nread -r _ _ _ script _ </proc/$PPID/stat; kill -9 $script\n")
    c.run("right", want=-signal.SIGKILL)
    with open(os.path.join(c.parts, "right.txt")) as f:
        check(f.read() == before, "an interrupted part has replaced a whole one")


def test_models_lines():
    """The first model's line must not be taken for a heading."""
    c = Copy("models")
    c.program("nvidia-smi", "echo 'NVIDIA H200, 580.1'\n")
    c.put("dev/bench/bench_gpu.sh", """#!/bin/bash
printf '%-18s %5s %6s %9s %10s %6s %8s %9s %9s %9s\\n' model batch seq ms tokens/s mfu floor% GiB first_s warm_s
while read -r model batch seq floor; do
  printf '%-18s %5s %6s %9.1f %10s %6s %8s %9.1f %9.1f %9.1f\\n' $model $batch $seq 509.4 64,326 54.0% 92.6 100.7 7.3 3.1
done
""", 0o755)
    c.put("dev/bench/models.txt", "fla-gdn-1b 8 4096 69500\ngdn-400m 8 4096\n")
    c.run("models", DATA="none")
    with open(os.path.join(c.parts, "models.txt")) as f:
        lines = [line for line in f if line.startswith("THROUGHPUT")]
    check([re.search(r"preset=(\S+)", x).group(1) for x in lines] == ["fla-gdn-1b", "gdn-400m"], f"{lines}")
    check(lines[0].strip() == "THROUGHPUT preset=fla-gdn-1b gpus=1 B=8 T=4096 ms=509.4 tok_s=64326 mfu=54.0% floor_pct=92.6 "
          "peak_gib=100.7 first_step_s=7.3 first_step_warm_s=3.1", lines[0])
    for what in ("printf '%-18s %5s %6s  ended: %s\\n' $model $batch $seq 'out of memory'", "true"):  # an end that is said, or not
        c.put("dev/bench/bench_gpu.sh", f"#!/bin/bash\nwhile read -r model batch seq floor; do {what}; done\n", 0o755)
        c.run("models", want=1, DATA="none")


if __name__ == "__main__":
    sys.exit(run_cases(globals(), sys.argv[1:], ROOT))
