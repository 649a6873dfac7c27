"""The facts of a run that the driver's parts share."""

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vitray.data.shards.manifest import Dataset
from vitray.runs.placement import Placement
from vitray.runs.plan import PlannedRun


class TrialHook(NamedTuple):
    """The connection of a run to the sweep that it is a trial of."""

    parent_uid: str
    """The parent run in MLflow."""
    should_stop: Callable[[int, Mapping[str, float]], bool]
    """Called with each evaluation's step and scores; True stops the run early."""
    waits_for_decision: bool
    """Whether training waits for that answer."""
    dataset: Dataset | None = None
    """The sweep's open dataset."""
    concurrent_trials: int = 1
    """Trials that share the cluster."""
    stop_requested: threading.Event | None = None
    """Set when the sweep is interrupted: the run then saves a checkpoint and ends."""


class RunInfo(NamedTuple):
    """A planned run with its name, folder and placement."""

    name: str
    run_dir: str
    uid: str
    planned: PlannedRun
    placement: Placement
    called: float
    """When `train` was called, on the monotonic clock."""
    fork: str | None
    hook: TrialHook | None
