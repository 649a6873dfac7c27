"""`vitray.open_sweep`: a sweep from its folder, as values for people: its trials as a table, the best, the report."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from vitray.config.parsing import parse_yaml
from vitray.config.sweep import Goal
from vitray.errors import ConfigError, nearest
from vitray.pages.notebook import facts_html, frame_html, joined_html, page_html
from vitray.runs.saved_run import SavedRun
from vitray.sweeps.plan import REPORT, SWEEP_META
from vitray.sweeps.report.results import Measure, TrialState, best_first, leader
from vitray.sweeps.trial_store import READERS, TrialEntry, TrialOutcome, read_entries, read_outcome, read_record
from vitray.system import storage

if TYPE_CHECKING:
    import pandas as pd


class SavedTrial(NamedTuple):
    """A trial as it is in its folder."""

    name: str
    state: TrialState
    score: float | None
    """The latest value of the goal."""
    settings: dict[str, Any]
    """The drawn variables, and the settings that vary over the sweep."""
    reason: str | None
    """Of a failure or an early stop."""
    outcome: TrialOutcome


class SavedSweep:
    """A sweep as it is in its folder at the time of opening: over, or on its way."""

    def __init__(self, url: str) -> None:
        """See `open_sweep`."""
        self.url = url
        """The folder."""
        if not storage.exists(path := storage.join(url, SWEEP_META)):
            folder, _, name = url.rpartition("/")
            others = {file.partition("/")[0] for file in storage.list_files(folder) if file.endswith(f"/{SWEEP_META}")}
            raise ConfigError(f"{url}: no sweep{nearest(name, others)}")
        space, _ = parse_yaml(storage.read_json(path)["space"], path)
        self.goal: Goal = Goal.model_validate(space["goal"])
        """The metric that trials are compared by, and whether more is better."""
        measure = Measure(self.goal.metric, self.goal.mode)
        entries = read_entries(url)
        with ThreadPoolExecutor(READERS) as pool:  # reads may wait for a network
            trials = list(pool.map(self._trial, entries, entries.values()))
        self._trials = best_first(trials, measure)
        best = leader([trial for trial in self._trials if trial.state != "failed"], measure)
        self.best: str | None = best and best.name
        """The name of the best finished trial, of the best so far while none is finished; None without a score."""

    @property
    def report(self) -> str:
        """The address of the report, a page."""
        return storage.join(self.url, REPORT)

    @property
    def model(self) -> str:
        """The address of the best trial's model folder, for `vitray.load`."""
        if self.best is None:
            raise ConfigError(f"{self.url}: no trial has a score yet")
        return self.trial(self.best).model

    def trial(self, name: str) -> SavedRun:
        """Return a trial as a run: its settings, curves and model."""
        if name not in (names := [trial.name for trial in self._trials]):
            raise ConfigError(f"{self.url}: no trial {name!r}{nearest(name, names)}")
        return SavedRun(storage.join(self.url, name))

    @cached_property
    def trials(self) -> "pd.DataFrame":
        """A row for each trial, the best first: state, goal, drawn variables and varied settings, costs, a reason."""
        import pandas as pd

        rows = [
            {"trial": trial.name, "state": trial.state, self.goal.metric: trial.score, **trial.settings}
            | {"device_seconds": trial.outcome.device_seconds, "latency_ms": trial.outcome.latency_ms}
            | {"peak_memory_bytes": trial.outcome.peak_memory_bytes, "reason": trial.reason}
            for trial in self._trials
        ]
        return pd.DataFrame(rows)

    def _trial(self, name: str, entry: TrialEntry) -> SavedTrial:
        folder = storage.join(self.url, name)
        record, settings = read_record(folder), entry.point.drawn | entry.point.shown
        outcome = read_outcome(folder) or TrialOutcome()
        return SavedTrial(name, record.state, record.score, settings, record.reason, outcome)

    def _facts(self) -> dict[str, Any]:
        states = [trial.state for trial in self._trials]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none yet"
        best = next((trial for trial in self._trials if trial.name == self.best), None)
        score = "none" if best is None else f"{best.name}: {self.goal.metric} {best.score:.4g}"
        return {"trials": counts, "best": score, "report": self.report}

    def __repr__(self) -> str:
        return "\n".join(f"{name:<10} {value}" for name, value in self._facts().items())

    def _repr_html_(self) -> str:
        parts = [facts_html(self.url.rpartition("/")[2], self._facts()), frame_html(self.trials)]
        return joined_html([*parts, page_html(self.report)] if storage.exists(self.report) else parts)


def open_sweep(name: str | os.PathLike[str], out: str | os.PathLike[str] = "sweeps") -> SavedSweep:
    """Return the sweep of a name below a folder of sweeps, whether it is over or not.

    `out`: the folder of all sweeps, or s3://
    """
    storage.check_name(os.fspath(name), "name")
    return SavedSweep(storage.join(storage.absolute(os.fspath(out)), os.fspath(name)))
