"""Trials of a sweep on disk: their points, in order, and the record and outcome of each."""

import json
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from vitray import storage
from vitray.config import Run
from vitray.config.training import Finetune
from vitray.errors import ConfigError
from vitray.models.sizes import Sizes, sizes_of
from vitray.runs.run_dir import OUTCOME, RUN_META, stored_run
from vitray.sweep.space import SweepPoint, run_of

POINTS, RECORD = "points.json", "trial.json"
RecordState = Literal["waiting", "running", "finished", "stopped early", "failed"]


class TrialRecord(NamedTuple):
    """The state and the scores of a trial so far."""

    state: RecordState = "waiting"
    scores: tuple[tuple[int, float], ...] = ()
    """(step, value) of the goal's metric."""
    reason: str | None = None
    """The error of a failed trial."""
    began: float | None = None
    """The latest start, in seconds since 1970."""
    ended: float | None = None
    steps: int | None = None
    """Of the whole run; None before its first score."""

    def best(self, mode: Literal["max", "min"]) -> float | None:
        """Return the best score so far."""
        return (max if mode == "max" else min)((value for _, value in self.scores), default=None)

    @property
    def is_over(self) -> bool:
        """Whether the trial has ended for good."""
        return self.state in ("finished", "stopped early", "failed")


class TrialOutcome(NamedTuple):
    """The results that the run of an ended trial left."""

    model: str | None = None
    val_top1: float | None = None
    mlflow_run: str | None = None
    curves: Mapping[str, list[list[float]]] | None = None
    """{metric: (step, value) pairs}."""
    device_seconds: float | None = None
    latency_ms: float | None = None
    peak_memory_bytes: float | None = None


class TrialEntry(NamedTuple):
    """A trial before it runs."""

    point: SweepPoint
    asked: dict[str, Any] | None = None
    """The sampler's own parameters and notes of a point that it drew."""


def read_record(run_dir: str) -> TrialRecord:
    """Return the record of the trial in a folder; an empty one before its start."""
    path = storage.join(run_dir, RECORD)
    if not storage.exists(path):
        return TrialRecord()
    content = json.loads(storage.read_bytes(path))
    scores = tuple((step, value) for step, value in content["scores"])
    rest = (content.get(name) for name in ("began", "ended", "steps"))
    return TrialRecord(content["state"], scores, content["reason"], *rest)


def write_record(run_dir: str, record: TrialRecord) -> None:
    """Replace the record of the trial in a folder."""
    storage.write_bytes(storage.join(run_dir, RECORD), json.dumps(record._asdict()).encode())


def read_entries(sweep_dir: str) -> dict[str, TrialEntry]:
    """Return {name: trial} of the sweep in a folder."""
    path = storage.join(sweep_dir, POINTS)
    content = json.loads(storage.read_bytes(path)) if storage.exists(path) else {}
    return {name: TrialEntry(SweepPoint(**entry["point"]), entry["asked"]) for name, entry in content.items()}


class TrialStore:
    """The trials of a sweep; each is on disk before it starts."""

    def __init__(self, sweep_dir: str, base: Run, points: Mapping[str, SweepPoint], learns: bool) -> None:
        """Open the store with these points; a search that learns resumes with the stored ones."""
        self.sweep_dir, self.base = sweep_dir, base
        self._runs: dict[str, Run] = {}
        self._sizes: dict[str, Sizes] = {}
        self._ended: dict[str, tuple[TrialRecord, TrialOutcome]] = {}
        stored = read_entries(sweep_dir)
        # Through JSON, so that tuples compare equal to stored lists.
        given = {name: TrialEntry(SweepPoint(*json.loads(json.dumps(point)))) for name, point in points.items()}
        for name, entry in given.items():
            old, new = stored.get(name, entry).point, entry.point
            if (old.settings, old.before) != (new.settings, new.before):
                raise ConfigError(
                    f"{sweep_dir}: the space now gives trial {name} {new.settings}, it started with {old.settings};"
                    " choose another --name"
                )
        self.entries = stored if learns else given
        # Points that the space has lost stay on disk: the space may get them back.
        self._lost = {name: entry for name, entry in stored.items() if name not in self.entries}
        self._write()

    def add(self, name: str, entry: TrialEntry) -> None:
        """Add a trial."""
        self.entries[name] = entry
        self._write()

    def fail(self, name: str, reason: str) -> None:
        """Record that a trial has failed, unless it has ended by itself."""
        record = self.record(name)
        if not record.is_over:
            write_record(self.run_dir(name), record._replace(state="failed", reason=reason, ended=time.time()))

    def run_dir(self, name: str) -> str:
        """Return the run folder of a trial."""
        return storage.join(self.sweep_dir, name)

    def run(self, name: str) -> Run:
        """Return the run of a trial."""
        if name not in self._runs:
            self._runs[name] = run_of(self.base, self.entries[name].point, self.sweep_dir)
        return self._runs[name]

    def record(self, name: str) -> TrialRecord:
        """Return the record of a trial."""
        return self._read(name)[0]

    def records(self) -> dict[str, TrialRecord]:
        """Return the records of all trials, in order."""
        return {name: self.record(name) for name in self.entries}

    def outcome(self, name: str) -> TrialOutcome:
        """Return the outcome of a trial; an empty one before its end."""
        return self._read(name)[1]

    def cost(self, name: str, field: str) -> float | None:
        """Return a cost of a trial, by its name in the space; None while unknown."""
        return getattr(self.sizes(name) if field in ("params", "gflops") else self.outcome(name), field, None)

    def sizes(self, name: str) -> Sizes | None:
        """Return the sizes of a trial's network; None before a fine-tuning has read its weights."""
        if name not in self._sizes:
            run, run_dir = self.run(name), self.run_dir(name)
            if isinstance(run.task, Finetune):
                if not storage.exists(storage.join(run_dir, RUN_META)):
                    return None
                run = stored_run(run_dir)
            self._sizes[name] = sizes_of(run.model)
        return self._sizes[name]

    def _read(self, name: str) -> tuple[TrialRecord, TrialOutcome]:
        if name in self._ended:
            return self._ended[name]
        record, outcome = read_record(self.run_dir(name)), TrialOutcome()
        if not record.is_over:
            return record, outcome
        if storage.exists(path := storage.join(self.run_dir(name), OUTCOME)):
            content = json.loads(storage.read_bytes(path))
            outcome = TrialOutcome(*(content.get(field) for field in TrialOutcome._fields))
        self._ended[name] = record, outcome
        return record, outcome

    def _write(self) -> None:
        entries = {
            name: {"point": entry.point._asdict(), "asked": entry.asked}
            for name, entry in (self._lost | self.entries).items()
        }
        storage.write_bytes(storage.join(self.sweep_dir, POINTS), json.dumps(entries).encode())
