"""What a run is between two steps: what every worker is told, where the run stands, and what is due next."""

import time
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
import torch.distributed as dist

from vitray.config import Run
from vitray.config.training import parse_duration
from vitray.data.shards.manifest import Dataset
from vitray.evaluation.scores import Score
from vitray.tasks.supervised import Task, build_task
from vitray.train.schedule import in_steps

# Losses that a spike is measured against, and records that a checkpoint repeats.
RECENT = 100


class Job(NamedTuple):
    """What every worker gets."""

    run: Run
    dataset: Dataset
    aside: np.ndarray | None
    """For each row of train whether it is evaluated instead of trained on."""
    home: str
    """The run's folder, which all workers reach."""
    attempt: str
    """Names this start of the driver."""
    threads: int
    """Of a worker on a CPU."""
    desk: Any
    """An actor that takes records for the driver; nobody waits for it."""
    asks: bool = False
    """Whether training asks after an evaluation if it is to go on."""
    watches: bool = False
    """Whether Ray tells of nodes that are to be taken away."""
    first: Any = None
    """A promise of the weights that a new run starts from; None starts from random ones."""
    tokenizer: Any = None
    """A promise of the tokenizer whose codes are predicted."""

    def build(self, device: torch.device) -> Task:
        """What is trained, with new weights, and beside it the tokenizer whose codes it predicts."""
        tokenizer: Any = None if self.tokenizer is None else ray.get(self.tokenizer)
        return build_task(self.run, tokenizer and tokenizer.to(device)).to(device)


@dataclass
class Standing:
    """Where a run stands: with the tensors, all that a checkpoint holds."""

    step: int = 0
    """Steps done."""
    losses: list[float] = field(default_factory=list)
    """Of the steps since the last record."""
    recent: list[float] = field(default_factory=list)
    best_top1: float | None = None
    best_loss: float | None = None
    """Where nothing is classified, in place of the best top-1."""
    best_step: int | None = None
    skipped: list[int] = field(default_factory=list)
    """Steps that broke the run and are left out since."""
    told: list[dict[str, Any]] = field(default_factory=list)
    """The last records: told again after a resume, since those of the last moment may have died with the driver."""
    pending: list[int] = field(default_factory=list)
    """Steps whose evaluations are under way, apart from the workers."""
    rewinds: int = 0
    seconds: float = 0.0
    """Spent training, without evaluations, over all parts of the run."""
    latest: Score | None = None
    """Of the last evaluation that is done, and of this process alone: it is not saved."""

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return asdict(replace(self, latest=None))

    @property
    def spared(self) -> set[int]:
        """Steps whose checkpoints stay whatever follows: the best, and those that may turn out to be."""
        return {*self.pending, *([] if self.best_step is None else [self.best_step])}

    def count(self, losses: list[float]) -> None:
        """Add the losses of some steps."""
        self.losses += losses
        self.recent = (self.recent + losses)[-RECENT:]

    def judge(self, step: int, scores: list[Score]) -> None:
        """Remember the best; the averaged weights, which come last, speak where there are any."""
        self.latest = latest = scores[-1]
        if latest.top1 is None:
            if self.best_loss is None or latest.loss < self.best_loss:
                self.best_loss, self.best_step = latest.loss, step
        elif self.best_top1 is None or latest.top1 > self.best_top1:
            self.best_top1, self.best_step = latest.top1, step

    def first_broken(self, losses: list[float], spike: float | None) -> int | None:
        """The place of the first of these losses that is not finite, or that leaps."""
        recent = list(self.recent)
        for place, loss in enumerate(losses):
            leaps = spike is not None and len(recent) >= RECENT // 2 and loss > spike * median(recent)
            if not loss < float("inf") or leaps:
                return place
            recent = [*recent, loss][-RECENT:]
        return None


class Due:
    """At which steps, counted as steps done, there is something to do besides training."""

    def __init__(self, run: Run, steps_per_epoch: int, total: int) -> None:
        every = in_steps(run.tracking.every, steps_per_epoch)
        self.records = {*range(every, total + 1, every), total}
        every = in_steps(run.evaluate.every, steps_per_epoch)
        self.evaluations = {*range(every, total + 1, every), total}
        count, unit = parse_duration(run.checkpoint.every)
        self.minutes = count if unit == "minutes" else None
        every = total if unit == "minutes" else in_steps(run.checkpoint.every, steps_per_epoch)
        self.checkpoints = {*range(every, total + 1, every), total}
        self._saved = time.monotonic()

    def __contains__(self, step: int) -> bool:
        return step in self.records or step in self.evaluations or step in self.checkpoints

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due; one that is due by the clock waits for the next record."""
        late = self.minutes is not None and time.monotonic() - self._saved >= self.minutes * 60
        if step in self.checkpoints or late:
            self._saved = time.monotonic()
            return True
        return False


class Teller:
    """What a worker tells the driver; only one of them is heard, so that all may speak."""

    def __init__(self, desk: Any, is_heard: bool) -> None:
        self._desk, self._is_heard = desk, is_heard
        self._told = 0.0
        self._ends: Any = None

    def say(self, kind: str, fields: dict[str, Any]) -> None:
        """Send a record, without waiting."""
        if self._is_heard:
            self._desk.put.remote({"kind": kind, **fields})

    def metrics(self, step: int, standing: Standing, values: dict[str, float]) -> None:
        """Tell the numbers of a step, and remember to have told them."""
        record = {"step": step, "values": values}
        standing.told = [*standing.told, record][-RECENT:]
        self.say("metrics", record)

    def saved(self, step: int) -> None:
        """Tell that a checkpoint is whole."""
        self.say("saved", {"step": step})

    def score(self, score: Score) -> None:
        """Tell what is drawn of a score; in plain words, or the desk would load torch for them."""
        mistakes = [mistake._asdict() for mistake in score.mistakes]
        self.say("score", {"confusion": score.confusion, "mistakes": mistakes})

    def note(self, text: str) -> None:
        """Tell what a person wants to know."""
        self.say("note", {"text": text})

    def is_told_to_stop(self, step: int) -> bool:
        """Whether training is to end after the scores of a step; waits for the driver."""
        answer: list[bool | None] = [None]
        while self._is_heard and answer[0] is None:
            time.sleep(0.05)
            answer = [ray.get(self._desk.decision.remote(step))]
        if dist.is_initialized():
            dist.broadcast_object_list(answer, 0)
        return bool(answer[0])

    def progress(self, step: int) -> None:
        """Say, about once a second, how far the run is, and ask whether it is to end."""
        if time.monotonic() - self._told > 1:
            self._told = time.monotonic()
            self.say("progress", {"step": step})
            if self._is_heard and not self.is_to_end():
                self._ends = self._desk.ends.remote()

    def is_to_end(self) -> bool:
        """Whether the driver has said so when it was last asked; waits for nobody."""
        return self._ends is not None and bool(ray.wait([self._ends], timeout=0)[0]) and ray.get(self._ends)
