"""mpi_jobs.py: the processes of a job that mpirun started on this machine."""

import glob
import os
import re


def rank_pids(p):
    """Process ids of the ranks below an mpirun."""
    found = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            if int(open(path).read().rsplit(")", 1)[1].split()[1]) != p.pid:
                continue
            env = open(os.path.dirname(path) + "/environ", "rb").read()
        except OSError:
            continue
        m = re.search(rb"(?:^|\0)OMPI_COMM_WORLD_RANK=(\d+)", env)
        if m:
            found[int(m.group(1))] = int(path.split("/")[2])
    return found
