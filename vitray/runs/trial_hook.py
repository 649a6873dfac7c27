"""The connection of a run to the sweep that it is a trial of."""

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vitray.data.shards.manifest import Dataset
from vitray.system.lease import LEASE_SECONDS, RENEW_SECONDS

# Seconds for which the process of a trial waits for the end of an earlier one, which may renew its lease meanwhile.
TRIAL_PATIENCE = 2 * LEASE_SECONDS + RENEW_SECONDS


class TrialHook(NamedTuple):
    """The connection of a run to the sweep that it is a trial of."""

    parent_uid: str
    """The parent run in MLflow."""
    should_stop: Callable[[int, int, Mapping[str, float]], bool]
    """Called with each evaluation's step, the run's number of steps and the scores; True stops the run early."""
    waits_for_decision: bool
    """Whether training waits for that answer."""
    dataset: Dataset | None = None
    """The sweep's open dataset."""
    concurrent_trials: int = 1
    """Trials that share the cluster."""
    has_cpus: bool = True
    """Whether compute.cpus is the user's, not the plan's."""
    own_cpus: int | None = None
    """CPUs of the trial's process, which then trains by itself; None trains with workers on Ray."""
    stop_requested: threading.Event | None = None
    """Set when the sweep is interrupted: the run then saves a checkpoint and ends."""
    is_quiet: bool = True
    """Whether the run prints nothing."""
    patience: float = TRIAL_PATIENCE
    """Seconds to wait for another owner of its folder."""
