"""CPU time, memory and threads of this process and all of its descendants."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Event
from typing import NamedTuple

import psutil


class Usage(NamedTuple):
    """The memory and the threads of a process tree."""

    memory: int
    """Proportional set size in bytes, which counts shared memory once."""
    threads: int


def tree_cpu_seconds() -> dict[int, float]:
    """Return the CPU time of this process and of each living descendant, each with that of the children it reaped."""
    seconds = {}
    for process in _tree():
        with suppress(psutil.NoSuchProcess):  # it exited a moment ago, and its parent has its time
            seconds[process.pid] = sum(process.cpu_times()[:4])
    return seconds


def cpu_seconds_since(before: dict[int, float]) -> float:
    """Return the CPU time since an earlier `tree_cpu_seconds`."""
    # Summed by process: an idle Ray worker that exits meanwhile takes its earlier CPU time with it.
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in tree_cpu_seconds().items())


def tree_usage() -> Usage:
    """Return the present memory and threads of the process tree."""
    memory = threads = 0
    for process in _tree():
        with suppress(psutil.NoSuchProcess):
            memory += process.memory_full_info().pss
            threads += process.num_threads()
    return Usage(memory, threads)


@contextmanager
def highest_usage(every: float) -> Iterator[list[int]]:
    """Sample the process tree every some seconds; the list holds the most memory and the most threads afterwards."""
    done, highest = Event(), [*tree_usage()]

    def sample() -> None:
        while not done.wait(every):
            highest[:] = map(max, highest, tree_usage())

    with ThreadPoolExecutor(1) as pool:
        sampler = pool.submit(sample)
        try:
            yield highest
        finally:
            done.set()
            sampler.result()


def _tree() -> list[psutil.Process]:
    return [this := psutil.Process(), *this.children(recursive=True)]
