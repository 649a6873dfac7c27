"""What a command costs in CPU time, with all that it starts, Ray's daemons and workers too; Linux alone can say it.

The command runs below a launcher, which is this module run as a program. What outlives its parent becomes a child of
the launcher, which waits for all its children, and the kernel adds up exactly what has been waited for. A process whose
parent ignores the end of its children, as Ray's raylet does, is never waited for: it counts as /proc has shown it last.
"""

import ctypes
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vitray.config import RunError

# Seconds between two looks at /proc: at most so much is missed of a process that nobody waits for. Of two runs on one
# Ray, 18 such processes, looks four times as often found 0.3 CPU-seconds more of 146.
EVERY = 0.2
# Seconds that what a command leaves behind may go on before it is killed.
PATIENCE = 60.0
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Cost(NamedTuple):
    """What a command cost."""

    wall: float
    """Seconds until it ended."""
    cpu: float
    """Seconds, user and system, of all processes until the last of them ended."""
    seen: float
    """The part of them that is known from /proc, the rest from the kernel's sum."""


class Look(NamedTuple):
    """A process as /proc shows it."""

    parent: int
    born: int
    """In ticks since the machine started: a later process of the same number has another."""
    seconds: float
    """CPU time of its own, and of the children that it has waited for."""


def run_counted(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, Cost]:
    """Run a command to its end, with this environment: what it has printed, and what it cost."""
    with tempfile.NamedTemporaryFile(prefix="vitray-") as report:
        launcher = [sys.executable, "-m", "vitray.bench.accounting", report.name, *words]
        done = subprocess.run(launcher, env=dict(environment), capture_output=True, text=True)
        if done.returncode:
            said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            raise RunError(f"{shlex.join(words)}: ended with status {done.returncode}: {said[-1] if said else '-'}")
        return done.stdout, Cost(*json.load(report))


# ---- the launcher ----------------------------------------------------------------------------------------------------


def launch(words: Sequence[str]) -> tuple[int, Cost]:
    """Run a command, and wait for it and for all that it leaves behind: its status, and what it cost."""
    adopt_orphans()
    began = time.perf_counter()
    # As a shell would start it: Python ignores SIGPIPE.
    command = os.posix_spawnp(words[0], list(words), os.environ, setsigdef=[signal.SIGPIPE])
    status, ended = None, began
    unwaited: dict[tuple[int, int], float] = {}
    while True:
        tree = look_at_tree()
        for pid, look in tree.items():
            if is_unwaited(look):
                unwaited[pid, look.born] = look.seconds
            else:
                unwaited.pop((pid, look.born), None)  # it has another parent now, which waits
        try:
            pid, result = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # the last one has been waited for
            break
        if pid == command:
            status, ended = os.waitstatus_to_exitcode(result), time.perf_counter()
        elif pid:  # its parent may have died since the last look, and the kernel has it in its sum now
            unwaited = {key: seconds for key, seconds in unwaited.items() if key[0] != pid}
        else:
            if status is not None and time.perf_counter() - ended > PATIENCE:
                for left in (pid for pid, look in tree.items() if look.parent == os.getpid()):
                    os.kill(left, signal.SIGKILL)
            time.sleep(EVERY)
    used, seen = resource.getrusage(resource.RUSAGE_CHILDREN), sum(unwaited.values())
    assert status is not None, "the command was never waited for"
    return status, Cost(ended - began, used.ru_utime + used.ru_stime + seen, seen)


def adopt_orphans() -> None:
    """Become the parent of every descendant that outlives its own."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("prctl: this system lets no process adopt what outlives its parent")


def look_at_tree() -> dict[int, Look]:
    """Every living descendant of this process, by its number."""
    looks: dict[int, Look] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        looks[int(path.parent.name)] = Look(int(fields[1]), int(fields[19]), seconds)
    mine = {os.getpid()}
    while more := {pid for pid, look in looks.items() if look.parent in mine} - mine:
        mine |= more
    return {pid: look for pid, look in looks.items() if pid in mine and pid != os.getpid()}


def is_unwaited(look: Look) -> bool:
    """Whether the parent of a process ignores its end, so that the kernel adds its time to nobody's."""
    try:
        lines = Path(f"/proc/{look.parent}/status").read_text().splitlines()
    except OSError:  # it has just ended: the launcher will wait in its place
        return False
    ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
    return bool(ignored >> (signal.SIGCHLD - 1) & 1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the command too, which ends by itself
    status, cost = launch(sys.argv[2:])
    Path(sys.argv[1]).write_text(json.dumps(cost))
    sys.exit(status)
