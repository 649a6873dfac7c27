"""Durations in steps, the learning rate, and the steps at which a run records, evaluates or saves.

The learning rate is a function of the step alone, so a resumed run continues exactly.
"""

import itertools
import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

from vitray.config import Run
from vitray.config.sections import in_steps, parse_duration
from vitray.config.training import Constant, Cosine, Linear, Optim
from vitray.data.shares import PAIR, share_sizes
from vitray.errors import ConfigError

# Seconds between two checks of the loss and for a stop request or a preemption notice, however rare the records are.
CHECK_SECONDS = 2.0


def interval_steps(setting: str, text: str, steps_per_epoch: int) -> int:
    """Return an interval in steps; refuse one that rounds to none."""
    steps = in_steps(text, steps_per_epoch)
    if steps < 1:
        raise ConfigError(
            f"{setting}: got {text!r}, which rounds to 0 steps, expected at least one; an epoch has {steps_per_epoch}"
            " steps"
        )
    return steps


class Length(NamedTuple):
    """The length of a run in steps."""

    epoch: int
    warmup: int
    total: int


def length_of(optim: Optim, steps_per_epoch: int) -> Length:
    """Return the length of a run; refuse one without steps, a longer warm-up, and a rate above lr."""
    total, warmup = in_steps(optim.duration, steps_per_epoch), in_steps(optim.warmup, steps_per_epoch)
    an_epoch = f"an epoch has {steps_per_epoch} steps"
    if total < 1:
        raise ConfigError(f"optim.duration: got {optim.duration!r}, expected at least one step; {an_epoch}")
    if warmup > total:
        raise ConfigError(
            f"optim.warmup: got {optim.warmup!r}, which is {warmup} steps, expected at most the {total} steps of"
            f" optim.duration, {optim.duration!r}; {an_epoch}"
        )
    floor = 0.0 if isinstance(optim.schedule, Constant) else optim.schedule.floor
    for setting, rate in (("warmup_from", optim.warmup_from), ("schedule.floor", floor)):
        if rate > optim.lr:
            raise ConfigError(f"optim.{setting}: got {rate}, expected at most optim.lr, {optim.lr}")
    return Length(steps_per_epoch, warmup, total)


def learning_rate(optim: Optim, length: Length, step: int) -> float:
    """Return the learning rate of a step, counted from 0; at step `length.total` it is the floor.

    Step 0 uses `warmup_from`, the first step after the warm-up uses lr, as in timm, big_vision and MAE. The first step
    of a warm-up from 0 therefore changes nothing.
    """
    _, warmup, total = length
    assert 0 <= step <= total, f"step {step} of a run of {total}"
    if step < warmup:
        return optim.warmup_from + (optim.lr - optim.warmup_from) * step / warmup
    after = (step - warmup) / max(total - warmup, 1)
    match optim.schedule:
        case Cosine(floor=floor, during_warmup=during_warmup):
            progress = step / total if during_warmup else after
            return floor + (optim.lr - floor) * (1 + math.cos(math.pi * progress)) / 2
        case Linear(floor=floor):
            return floor + (optim.lr - floor) * (1 - after)
        case Constant():
            return optim.lr
        case _:
            assert_never(optim.schedule)


def weight_decay(optim: Optim, length: Length, step: int) -> float:
    """Return the weight decay of a step, counted from 0: half a cosine from its start to its end."""
    start, end = optim.weight_decay, optim.weight_decay_end
    return start if end is None else end + (start - end) * (1 + math.cos(math.pi * step / length.total)) / 2


class Intervals(NamedTuple):
    """Steps between two records, evaluations and checkpoints; each also happens at the last step."""

    record: int
    evaluate: int
    save: int | None
    """None: checkpoints are spaced by the clock alone."""
    save_seconds: float | None
    """Between two checkpoints by the clock; those of evaluated steps come in addition."""


def intervals_of(run: Run, length: Length) -> Intervals:
    """Return the intervals of a run; refuse one that rounds to no step."""

    def steps(setting: str, every: str) -> int:
        return interval_steps(setting, every, length.epoch)

    every = run.tracking.every
    save, is_timed = run.checkpoint.every, run.checkpoint.is_timed
    evaluate = steps("evaluate.every", run.evaluate.every)
    by_clock = evaluate if run.data.evaluated else None  # so that the best score has its weights
    return Intervals(
        record=steps("tracking.every", every) if every else min(50, max(1, length.total // 20)),
        evaluate=evaluate,
        save=by_clock if is_timed else steps("checkpoint.every", save),
        save_seconds=60 * parse_duration(save)[0] if is_timed else None,
    )


class Triggers:
    """Whether a step, counted as steps done, needs more than training."""

    def __init__(self, intervals: Intervals, total: int) -> None:
        self._intervals, self._total = intervals, total
        self._saved = time.monotonic()

    def __contains__(self, step: int) -> bool:
        return self.records(step) or self.evaluates(step) or self._is_multiple(step, self._intervals.save)

    def records(self, step: int) -> bool:
        """Return whether to record metrics."""
        return self._is_multiple(step, self._intervals.record)

    def evaluates(self, step: int) -> bool:
        """Return whether to evaluate."""
        return self._is_multiple(step, self._intervals.evaluate)

    def saves(self, step: int) -> bool:
        """Return whether to save a checkpoint; one that is due by the clock waits for the next record."""
        seconds = self._intervals.save_seconds
        is_late = seconds is not None and time.monotonic() - self._saved >= seconds
        if is_late or self._is_multiple(step, self._intervals.save):
            self._saved = time.monotonic()
            return True
        return False

    def _is_multiple(self, step: int, interval: int | None) -> bool:
        return step == self._total or (interval is not None and 0 < step < self._total and step % interval == 0)


@dataclass
class CheckTimer:
    """The last check; it spaces checks by the time of a whole pass of the loop, records and checkpoints included."""

    step: int
    checked_at: float = field(default_factory=time.perf_counter)

    def steps_to_next(self, step: int) -> int:
        """Return the steps between the check at this step and the next one, at the pace since the last one."""
        now = time.perf_counter()
        pace = max(1e-6, now - self.checked_at) / (step - self.step)
        self.step, self.checked_at = step, now
        return max(1, round(CHECK_SECONDS / pace))


def num_passes(run: Run, workers: int) -> int:
    """Return the passes in which each worker takes its share of a step: as many as the largest share needs.

    The number is the same on every worker, because batch norms meet in each pass. Refuse shares so small that one
    would have no image in some pass.
    """
    sizes, pair = share_sizes(run.optim.batch, workers), pair_size(run)
    largest, smallest = (-(-images // pair) for images in (max(sizes), min(sizes)))
    local = run.compute.local_batch
    most = max(1, (local if isinstance(local, int) else max(sizes)) // pair)
    passes = -(-largest // most)
    if passes > smallest:
        raise ConfigError(
            f"compute.local_batch {run.compute.local_batch} does not fit optim.batch {run.optim.batch} on {workers}"
            f" workers, because each takes as many passes as the largest share, {passes} for {max(sizes)} images, and"
            f" the smallest share has {min(sizes)}{' in pairs' if pair > 1 else ''}; increase compute.local_batch, or"
            " change optim.batch or compute.workers"
        )
    return passes


def check_shares(run: Run, lowest: int, highest: int) -> None:
    """Refuse numbers of workers whose shares do not fit the same number of passes."""
    for workers in range(lowest, highest + 1):
        num_passes(run, workers)


def micro_batches(images: int, passes: int, run: Run) -> list[slice]:
    """Return the slices of a worker's share for its passes: of nearly equal size, and even for mixing.

    With the passes of `num_passes`, none exceeds compute.local_batch, except for a pair of images that are mixed.
    """
    pair = pair_size(run)
    units = -(-images // pair)
    assert passes <= units, f"{images} images in {passes} passes"
    ends = [min(pair * (units * number // passes), images) for number in range(passes + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def pair_size(run: Run) -> int:
    """Return how many neighbors of a batch stay in one pass, as they are mixed."""
    return PAIR if run.data.mix.is_mixing else 1
