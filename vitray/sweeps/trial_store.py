"""Trials of a sweep: their points, in order, and the record and outcome of each, on disk and in the driver's memory."""

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from vitray.config import Run
from vitray.config.sweep import Cost
from vitray.errors import ConfigError, RunError
from vitray.models.sizes import Sizes, sizes_of
from vitray.runs.run_dir import OUTCOME, RUN_META, stored_run
from vitray.sweeps.space import Space, SweepPoint, resolve_stages, run_of
from vitray.system import storage
from vitray.system.lease import check_owner

POINTS, RECORD = "points.json", "trial.json"
# Threads that read records at the start: a request to a distant storage takes tens of milliseconds.
READERS = 32
# Seconds in which the run of a stopped trial ends.
ENDING_SECONDS = 600.0
RecordState = Literal["waiting", "running", "finished", "stopped early", "failed"]
# Told of each evaluation's step, the run's number of steps and the scores; returns whether the run stops early.
Scored = Callable[[int, int, Mapping[str, float]], bool]


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

    @property
    def score(self) -> float | None:
        """The latest score, that of the weights which the trial leaves; a loss of NaN is none."""
        latest = self.scores[-1][1] if self.scores else math.nan
        return latest if math.isfinite(latest) else None

    @property
    def is_over(self) -> bool:
        """Whether the trial has ended for good."""
        return self.state in ("finished", "stopped early", "failed")

    def started(self) -> "TrialRecord":
        """Return the record at another start."""
        return self._replace(state="running", began=time.time(), ended=None)


class TrialOutcome(NamedTuple):
    """The results that the run of an ended trial left."""

    model: str | None = None
    val_top1: float | None = None
    val_map: float | None = None
    mlflow_run: str | None = None
    curves: Mapping[str, list[list[float]]] | None = None
    """{metric: (step, value) pairs}."""
    device_seconds: float | None = None
    latency_ms: float | None = None
    peak_memory_bytes: float | None = None
    val_images: int | None = None


class TrialEntry(NamedTuple):
    """A trial before it runs."""

    point: SweepPoint
    asked: dict[str, Any] | None = None
    """The sampler's own parameters and notes of a point that it drew."""
    continues: str | None = None
    """In a population, the trial from whose checkpoint this one continues."""
    replaces: str | None = None
    """In a population, the trial whose place this one has taken."""


def read_record(run_dir: str) -> TrialRecord:
    """Return the record of the trial in a folder; an empty one before its start."""
    path = storage.join(run_dir, RECORD)
    if not storage.exists(path):
        return TrialRecord()
    content = storage.read_json(path)
    scores = tuple((step, value) for step, value in content["scores"])
    rest = (content.get(name) for name in ("began", "ended", "steps"))
    return TrialRecord(content["state"], scores, content["reason"], *rest)


def write_record(run_dir: str, record: TrialRecord) -> None:
    """Replace the record of the trial in a folder."""
    storage.write_bytes(storage.join(run_dir, RECORD), json.dumps(record._asdict()).encode())


def recorded(
    start: Callable[[Scored], RecordState], record: TrialRecord, metric: str, decide: Callable[[TrialRecord], bool]
) -> TrialRecord:
    """Return the record of a trial after its run, which `start` runs; `decide` gets the record with each new score."""

    def scored(step: int, steps: int, values: Mapping[str, float]) -> bool:
        nonlocal record
        if metric not in values or any(step <= known for known, _ in record.scores):
            return False
        record = record._replace(scores=(*record.scores, (step, values[metric])), steps=steps)
        return decide(record)

    try:
        state = start(scored)
    except (RunError, ConfigError) as error:
        return record._replace(state="failed", reason=str(error), ended=time.time())
    return record._replace(state=state, ended=time.time())


def reset_failed(sweep_dir: str) -> list[str]:
    """Make the failed trials of the sweep in a folder wait for another start, and return their names."""
    records = {name: read_record(storage.join(sweep_dir, name)) for name in read_entries(sweep_dir)}
    failed = [name for name, record in records.items() if record.state == "failed"]
    for name in failed:  # with its scores: it resumes from its last checkpoint, if it has one
        write_record(storage.join(sweep_dir, name), records[name]._replace(state="waiting", reason=None, ended=None))
    return failed


def read_outcome(run_dir: str) -> TrialOutcome | None:
    """Return the outcome of the run in a folder; None without one."""
    if not storage.exists(path := storage.join(run_dir, OUTCOME)):
        return None
    content = storage.read_json(path)
    return TrialOutcome(*(content.get(field) for field in TrialOutcome._fields))


def read_sizes(run: Run, run_dir: str) -> Sizes | None:
    """Return the sizes of a trial's network; None before a fine-tuning has read its weights."""
    if run.weights is not None:
        if not storage.exists(storage.join(run_dir, RUN_META)):
            return None
        run = stored_run(run_dir)
    if run.model.is_vit:
        return sizes_of(run.model)
    from vitray.models.other_networks import other_sizes  # imports torch, which takes seconds

    return other_sizes(run.model)


def costs_of(outcome: TrialOutcome | None, sizes: Sizes | None) -> dict[str, float]:
    """Return {name in the space: value} of the known costs of an ended trial."""
    values = {name: getattr(outcome, name, getattr(sizes, name, None)) for name in get_args(Cost)}
    return {name: value for name, value in values.items() if value is not None}


def read_entries(sweep_dir: str) -> dict[str, TrialEntry]:
    """Return {name: trial} of the sweep in a folder."""
    path = storage.join(sweep_dir, POINTS)
    content = storage.read_json(path) if storage.exists(path) else {}
    return {
        name: TrialEntry(SweepPoint(**entry["point"]), entry["asked"], entry.get("continues"), entry.get("replaces"))
        for name, entry in content.items()
    }


@dataclass(eq=False)
class Trial:
    """A trial in the driver's memory: its entry, and what is known of its run so far."""

    entry: TrialEntry
    record: TrialRecord = field(default_factory=TrialRecord)
    costs: Mapping[str, float] | None = None
    """None until its own process has reported its end: a stopped trial ends later than Tune's decision."""
    outcome: TrialOutcome | None = None
    """None until it is read, after the end."""
    run: Run | None = None
    sizes: Sizes | None = None

    def cost(self, name: str) -> float | None:
        """Return a cost, by its name in the space; None before the end."""
        return (self.costs or {}).get(name)


class TrialStore:
    """The state of a sweep: its trials in the driver's memory, and their points on disk.

    Each trial's process writes its own record. The driver reads the records at its start; then it follows the results
    that Tune receives, so that Tune's loop never waits for storage.
    """

    def __init__(
        self, sweep_dir: str, base: Run, points: Mapping[str, SweepPoint], learns: bool, owner: str = ""
    ) -> None:
        """Open the store with these points; a search that learns resumes with the stored ones.

        A population has the stored trials that continue others besides. With the id of an `owner`, no points are
        written after another process has taken over the folder.
        """
        self.sweep_dir, self.base, self._owner = sweep_dir, base, owner
        self.names: dict[str, str] = {}
        """{Tune's id: name} of the trials that Tune has had so far."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trial-store")
        self._written: Future[None] | None = None
        self._submitting = threading.Lock()
        stored = read_entries(sweep_dir)
        # Through JSON, so that tuples compare equal to stored lists.
        entries = {name: TrialEntry(SweepPoint(*json.loads(json.dumps(point)))) for name, point in points.items()}
        # A trial keeps its first name and its folder: an added value may change the names of all points.
        names = {_identity(entry): name for name, entry in reversed(stored.items()) if not entry.continues}
        names |= {_identity(stored[name]): name for name in entries if name in stored}
        given: dict[str, TrialEntry] = {}
        for name, entry in ((names.get(_identity(entry), name), entry) for name, entry in entries.items()):
            old = given.get(name, stored.get(name, entry))
            if _identity(old) != _identity(entry):
                raise ConfigError(
                    f"{sweep_dir}: the space now gives trial {name} {entry.point.settings}, it started with"
                    f" {old.point.settings}; choose another --name"
                )
            given[name] = entry
        continuations = {name: entry for name, entry in stored.items() if entry.continues}
        kept = stored if learns else given | continuations
        self.trials = {name: Trial(entry) for name, entry in kept.items()}
        # Points that the space has lost stay on disk: the space may get them back.
        self._lost = {name: entry for name, entry in stored.items() if name not in kept}
        self._write(self._content())
        _for_each(self._read, [name for name in kept if name in stored])

    def run_dir(self, name: str) -> str:
        """Return the run folder of a trial."""
        return storage.join(self.sweep_dir, name)

    def settings(self, name: str) -> dict[str, Any]:
        """Return {dotted setting: value} of a trial, with the model folders of its stages."""
        point = self.trials[name].entry.point
        return resolve_stages(point.settings, point.before, self.sweep_dir)

    def run(self, name: str) -> Run:
        """Return the run of a trial."""
        trial = self.trials[name]
        trial.run = trial.run or run_of(self.base, trial.entry.point, self.sweep_dir)
        return trial.run

    def records(self) -> dict[str, TrialRecord]:
        """Return the records of all trials, in order."""
        return {name: trial.record for name, trial in list(self.trials.items())}

    # ---- the events of Tune's loop -----------------------------------------------------------------------------------

    def add(self, name: str, entry: TrialEntry) -> None:
        """Add a trial; a thread writes its point."""
        self.trials[name] = Trial(entry)
        self._submit_points()

    def start(self, name: str) -> None:
        """Record that a trial has started, unless it only repeats its scores."""
        trial = self.trials[name]
        if not trial.record.is_over:
            trial.record = trial.record._replace(state="running", began=time.time())

    def update(self, name: str, result: Mapping[str, Any]) -> None:
        """Record a result of a trial: a score, or its end, which has a state."""
        trial = self.trials[name]
        if trial.record.is_over:
            return
        record = trial.record._replace(steps=result["steps"])
        if result["step"] and all(step < result["step"] for step, _ in record.scores):
            record = record._replace(scores=(*record.scores, (result["step"], result["goal"])))
        if "state" in result:
            record = record._replace(state=result["state"], reason=result.get("reason"), ended=time.time())
            trial.costs = {cost: result[cost] for cost in get_args(Cost) if cost in result}
        trial.record = record

    def end(self, name: str, state: RecordState, reason: str | None = None) -> None:
        """Record that Tune has ended a trial, unless it has ended by itself."""
        trial = self.trials[name]
        if not trial.record.is_over:
            trial.record = trial.record._replace(state=state, reason=reason, ended=time.time())

    def replace(self, name: str, earlier: str) -> None:
        """Record that a trial has taken the place of an earlier one; a thread writes it."""
        trial = self.trials[name]
        trial.entry = trial.entry._replace(replaces=earlier)
        self.end(earlier, "stopped early")
        self._submit_points()

    # ---- reads and writes of storage ---------------------------------------------------------------------------------

    def outcome(self, name: str) -> TrialOutcome:
        """Return the outcome of a trial; an empty one before its end."""
        trial = self.trials[name]
        if trial.outcome is None and trial.record.is_over:
            self._read_end(name)
        return trial.outcome or TrialOutcome()

    def sizes(self, name: str) -> Sizes | None:
        """Return the sizes of a trial's network; None before a fine-tuning has read its weights."""
        trial = self.trials[name]
        trial.sizes = trial.sizes or read_sizes(self.run(name), self.run_dir(name))
        return trial.sizes

    def is_spent(self, space: Space, trials: int, started: float) -> bool:
        """Whether the budget is spent since a start, on the monotonic clock, or too many of some trials have failed."""
        budget = space.budget
        if sum(trial.record.state == "failed" for trial in self.trials.values()) > space.failures * trials:
            return True
        if budget.minutes is not None and time.monotonic() - started > 60 * budget.minutes:
            return True
        if budget.device_hours is None:
            return False
        spent = sum(trial.cost("device_seconds") or 0.0 for trial in self.trials.values())
        return spent >= 3600 * budget.device_hours

    def read_again(self) -> None:
        """Read the records of the trials that were not over, which other processes may have trained since."""
        _for_each(self._read, [name for name, trial in self.trials.items() if not trial.record.is_over])

    def read_ends(self) -> None:
        """Read the rest of the trials that have ended; the run of a trial that Tune stops ends some seconds later."""
        trials = list(self.trials.items())
        _for_each(self._read_end, [name for name, trial in trials if trial.record.is_over and trial.outcome is None])

    def write_end(self, name: str, state: RecordState, reason: str) -> None:
        """Write the end of a trial, unless its process has written one."""
        record = read_record(self.run_dir(name))
        if not record.is_over:
            record = record._replace(state=state, reason=reason, ended=time.time())
            write_record(self.run_dir(name), record)
        self.trials[name].record = record

    def retry_points(self) -> None:
        """Write the points again if the last try has failed."""
        if self._written is not None and self._written.done() and self._written.exception() is not None:
            self._submit_points()

    def finish_points(self) -> None:
        """Wait until the points are on disk."""
        if self._written is not None and self._written.exception() is not None:
            self._write(self._content())
        self._written = None

    def close(self) -> None:
        """Wait until the points are on disk, and read again the trials whose end Tune has not reported.

        At the end of a sweep Tune kills the processes of stopped trials after some seconds, so their end is written
        here.
        """
        self.finish_points()
        known = {name: trial.record for name, trial in self.trials.items() if trial.costs is None}
        _for_each(self._read, known)
        for name, record in known.items():
            trial = self.trials[name]
            if record.state == "stopped early" and not trial.record.is_over:
                trial.record = record
                write_record(self.run_dir(name), record)

    def _read(self, name: str) -> None:
        """Read the record of a trial, and the outcome of an ended one."""
        trial = self.trials[name]
        trial.record = read_record(self.run_dir(name))
        if trial.record.is_over:
            self._read_outcome(name, has_reported=True)

    def _read_end(self, name: str) -> None:
        """Read the outcome of an ended trial, after its record if Tune has stopped it."""
        trial = self.trials[name]
        has_reported = trial.costs is not None
        if not has_reported:
            record = read_record(self.run_dir(name))
            if has_reported := record.is_over:
                trial.record = record
            elif trial.record.state != "failed" and time.time() - (trial.record.ended or 0.0) < ENDING_SECONDS:
                return
        self._read_outcome(name, has_reported=has_reported)

    def _read_outcome(self, name: str, *, has_reported: bool) -> None:
        """Read the outcome of an ended trial, and its costs if its own process has reported its end."""
        trial = self.trials[name]
        outcome = read_outcome(self.run_dir(name)) or TrialOutcome()
        if has_reported:
            trial.costs = {**(trial.costs or {}), **costs_of(outcome, self.sizes(name))}
        trial.outcome = outcome

    def _submit_points(self) -> None:
        with self._submitting:  # the newest points are written last
            self._written = self._writer.submit(self._write, self._content())

    def _content(self) -> bytes:
        entries = self._lost | {name: trial.entry for name, trial in list(self.trials.items())}
        content = {name: entry._asdict() | {"point": entry.point._asdict()} for name, entry in entries.items()}
        return json.dumps(content).encode()

    def _write(self, content: bytes) -> None:
        if self._owner:
            check_owner(self.sweep_dir, self._owner)
        storage.write_bytes(storage.join(self.sweep_dir, POINTS), content)


def _identity(entry: TrialEntry) -> str:
    """Return the settings and stages of a trial as text; its name only describes them."""
    return json.dumps([entry.point.settings, entry.point.before], sort_keys=True)


def _for_each(read: Callable[[str], None], names: Collection[str]) -> None:
    """Call a function for each name, many at a time."""
    if names:
        with ThreadPoolExecutor(READERS) as readers:
            list(readers.map(read, names))
