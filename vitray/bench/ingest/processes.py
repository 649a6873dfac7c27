"""This process and all that it started, as /proc shows them."""

import os
from pathlib import Path


def tree_cpu_seconds() -> dict[int, float]:
    """CPU time of this process and each living descendant, with that of the children each has waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended, and its parent has its time
            continue
        parents[int(path.parent.name)] = int(fields[1])
        ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return {pid: ticks[pid] / os.sysconf("SC_CLK_TCK") for pid in mine & ticks.keys()}
