"""The steps of a training run with a fault, from the records of its workers: lost, repeated, skipped. Arithmetic only.

A worker appends a line for each optimizer step: time, process, rank, step, images. The steps that are in the final
weights are its history: a start from a checkpoint of step s takes back all later steps of earlier processes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class StepRecord(NamedTuple):
    """One optimizer step of one worker."""

    time: float
    process: int
    rank: int
    step: int
    """Steps that the weights had taken before this one."""
    images: tuple[int, ...]


class History(NamedTuple):
    """The steps that led to the final weights, and those that were taken back."""

    images: dict[int, Counter[int]]
    """The images of all workers by step."""
    lost: int
    """Steps taken back, and so computed again."""
    starts: tuple[int, ...]
    """The first step of each start."""


class Cost(NamedTuple):
    """The difference between a run with a fault and the undisturbed one."""

    steps: int
    lost: int
    repeated: int
    """Images trained on more often than without the fault; one that is seen twice too often counts twice."""
    skipped: int
    """Images trained on less often than without the fault."""
    other_steps: int
    """Steps on other images than the same step of the undisturbed run, missing and further steps included."""


def parse_records(lines: Iterable[str]) -> list[StepRecord]:
    """Return the records of a file in the order of their times."""
    records = []
    for line in lines:
        time, process, rank, step, *images = line.split()
        records.append(StepRecord(float(time), int(process), int(rank), int(step), tuple(map(int, images))))
    return sorted(records)


def starts_of(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """Return the records of each start of the run: of all processes that began together."""
    starts: list[list[StepRecord]] = []
    start_of: dict[int, int] = {}
    ranks: set[int] = set()
    for record in records:
        if record.process not in start_of:
            if not starts or record.rank in ranks or record.step != starts[-1][0].step:
                starts.append([])
                ranks = set()
            ranks.add(record.rank)
            start_of[record.process] = len(starts) - 1
        starts[start_of[record.process]].append(record)
    return starts


def history_of(records: Sequence[StepRecord]) -> History:
    """Return the history of a run."""
    images: dict[int, Counter[int]] = {}
    lost, firsts = 0, []
    for start in starts_of(records):
        first = min(record.step for record in start)
        taken_back = [step for step in images if step >= first]
        lost += len(taken_back)
        for step in taken_back:
            del images[step]
        firsts.append(first)
        for record in start:
            images.setdefault(record.step, Counter()).update(record.images)
    return History(images, lost, tuple(firsts))


def cost_of(run: History, undisturbed: History) -> Cost:
    """Compare a run with the undisturbed one."""
    seen, wanted = (sum(history.images.values(), Counter()) for history in (run, undisturbed))
    steps = run.images.keys() | undisturbed.images.keys()
    other = sum(run.images.get(step) != undisturbed.images.get(step) for step in steps)
    return Cost(len(run.images), run.lost, (seen - wanted).total(), (wanted - seen).total(), other)


def longest_pause(records: Sequence[StepRecord], since: float) -> float | None:
    """Return the longest time without a step of any worker that ends after `since`; None if no step follows."""
    pauses = [after.time - before.time for before, after in pairwise(records) if after.time > since]
    return max(pauses, default=None)
