"""The training state between two steps: with the tensors, all that a checkpoint holds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from vitray.config import Run
from vitray.config.training import Guard
from vitray.metrics.scores import Score
from vitray.training.host import Host
from vitray.training.messages import Metrics, Note

# Losses that a spike is compared with, and records that a checkpoint repeats.
RECENT = 100


@dataclass
class TrainState:
    """Progress, recent losses and best scores."""

    step: int = 0
    """Steps done."""
    losses: list[float] = field(default_factory=list)
    """Losses since the last record."""
    recent: list[float] = field(default_factory=list)
    best: dict[str, float] = field(default_factory=dict)
    """The best score so far by its name: top1, map of several labels an image, loss of tasks without classes."""
    best_step: int | None = None
    skipped: list[int] = field(default_factory=list)
    """Steps with a broken loss, left out since; counted from 0, as in random numbers."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """The last metrics, sent again after a resume, as the driver may have died before it logged them."""
    pending: list[int] = field(default_factory=list)
    """Steps whose separate evaluations are running."""
    pending_probes: list[int] = field(default_factory=list)
    """Steps whose probes are running or waiting."""
    best_knn: float | None = None
    best_knn_step: int | None = None
    collapse: str | None = None
    """How the features had collapsed at the last finished probes or evaluation; not saved."""
    watched: dict[str, float] = field(default_factory=dict)
    """The latest probes and scores, by which a collapse is found; not saved."""
    rewinds: int = 0
    seconds: float = 0.0
    """Training time without evaluations, over all starts of the run."""
    latest: Score | None = None
    """The last finished evaluation; not saved."""

    def as_json(self) -> dict[str, Any]:
        """Return the saved part of the state."""
        return asdict(replace(self, latest=None, collapse=None, watched={}))

    @property
    def protected_steps(self) -> set[int]:
        """Steps whose checkpoints are never pruned: the best one and those under evaluation."""
        return {*self.pending, *self.pending_probes, *([] if self.best_step is None else [self.best_step])}

    def recorded(self, step: int, values: dict[str, float]) -> Metrics:
        """Keep the metrics of a step for the next checkpoint, and return their message."""
        self.records = [*self.records, {"step": step, "values": values}][-RECENT:]
        return Metrics(step, values)

    def add_losses(self, losses: list[float]) -> None:
        """Add the losses of some steps."""
        self.losses += losses
        self.recent = (self.recent + losses)[-RECENT:]

    def add_scores(self, step: int, scores: list[Score]) -> None:
        """Update the best score; with averaged weights, theirs counts, which comes last."""
        self.latest = scores[-1]
        name, value = self.latest.main
        sign = -1 if name == "loss" else 1
        if name not in self.best or sign * value > sign * self.best[name]:
            self.best, self.best_step = {name: value}, step

    def check_collapse(self, step: int, values: Mapping[str, float], guard: Guard) -> str | None:
        """Return how the features have collapsed at a step by its probes or scores; update the best kNN accuracy."""
        name, knn = next((each for each in values.items() if each[0].startswith("knn")), ("", None))
        reasons = []
        if knn is not None:
            if self.best_knn is None or knn > self.best_knn:
                self.best_knn, self.best_knn_step = knn, step
            # The upper end of the interval: a few hits more or less of few images are no collapse.
            elif guard.knn_drop is not None and values.get(f"{name}_high", knn) < (1 - guard.knn_drop) * self.best_knn:
                what = "mAP" if name.endswith("map") else "accuracy"
                reasons.append(
                    f"kNN {what} fell to {knn:.2%} from {self.best_knn:.2%} at step {self.best_knn_step:,}, by more"
                    f" than guard.knn_drop, {guard.knn_drop:g} of it"
                )
        rank = values.get("rankme")
        if rank is not None and guard.min_rank is not None and rank < guard.min_rank:
            reasons.append(f"RankMe is {rank:.3g}, below guard.min_rank, {guard.min_rank:g}")
        used = values.get("prototypes_used")
        if used is not None and guard.min_prototypes is not None and used < guard.min_prototypes:
            reasons.append(
                f"all images share {used:.0f} prototypes, below guard.min_prototypes, {guard.min_prototypes}"
            )
        return f"at step {step:,} {' and '.join(reasons)}" if reasons else None

    def first_broken(self, losses: list[float], spike: float | None) -> int | None:
        """Return the index of the first loss that is not finite or that spikes."""
        for index, loss in enumerate(losses):
            recent = (self.recent + losses[:index])[-RECENT:]
            is_spike = spike is not None and len(recent) >= RECENT // 2 and loss > spike * median(recent)
            if not loss < float("inf") or is_spike:
                return index
        return None


def report_collapse(step: int, values: Mapping[str, float], run: Run, state: TrainState, host: Host) -> None:
    """Report features that have collapsed by probes, or by the scores of the last evaluation, with the likely cause."""
    traits = run.task.traits
    if not traits.may_collapse:
        return
    state.watched.update(values)
    before, found = state.collapse, state.check_collapse(step, state.watched, run.guard)
    if found is not None:
        suspects = traits.suspects(run.task, state.watched) if traits.suspects else []
        suspects = suspects or [f"optim.lr, {run.optim.lr:g}, is too high, or optim.warmup too short"]
        found = f"{found}; likely cause: {'; or '.join(suspects)}"
    # A later probe does not take back a stop that all workers may have decided on.
    state.collapse = (before or found) if run.guard.on_collapse == "stop" else found
    if state.collapse and not before:
        host.send(Note(f"collapse: {state.collapse}"))
