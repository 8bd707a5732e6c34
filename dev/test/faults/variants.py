"""variants.py: builds of the program from a patched copy of gdn/, in build/faults/variant-NAME/. The engine is compiled
once, as it is; what is compiled anew is the program around it (program.c), without optimization: about a second.
"""
from common import *  # noqa: F401,F403

SOURCE = os.path.join(PROJECT, "gdn")


def build(name, patches, mpi=False):
    """patches: [(file, old text, new text, how often the old text is there (1))]. Returns the program's path."""
    folder = os.path.join(BUILD, "variant-" + name)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SOURCE, os.path.join(folder, "gdn"), ignore=shutil.ignore_patterns("cuda"))
    for file, old, new, *times in patches:
        path = os.path.join(folder, "gdn", file)
        with open(path) as f:
            text = f.read()
        check(text.count(old) == (times[0] if times else 1), f"variant {name}: gdn/{file} holds {text.count(old)} times what is to be replaced: {old!r}")
        with open(path, "w") as f:
            f.write(text.replace(old, new))
    flags = []
    if mpi:
        with open(os.path.join(PROJECT, "build", "mpi_flags")) as f:
            flags = f.read().split()
    program = os.path.join(folder, "train_gdn")
    p = subprocess.run(["gcc", "-std=c11", "-D_GNU_SOURCE", "-O0", "-w", "-fopenmp", "-I" + folder,
                        os.path.join(HERE, "program.c"), os.path.join(BUILD, "engine.o"), "-o", program] + flags +
                       ["-ljansson", "-lxxhash", "-lpthread", "-lm"], stderr=subprocess.PIPE)
    check(p.returncode == 0, f"variant {name} does not compile: {p.stderr.decode()[-800:]}")
    return program
