"""The driver's view of a sweep, from the events of Ray Tune's loop.

Nothing here waits: Tune handles one event at a time, and a trial waits for its next one.
"""

from typing import Any

from ray import tune
from ray.tune.experiment import Trial

from vitray.sweep.interruption import Interruption
from vitray.sweep.trial_store import TrialStore
from vitray.system.lease import Ownership


class TrialListener(tune.Callback):
    """Keeps the trial store up to date."""

    def __init__(self, store: TrialStore) -> None:
        self._store = store
        self.names: dict[str, str] = {}
        """{Tune's id: name} of all trials so far."""

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its arguments to resume by itself, which is not used.
        return {}

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        """Record the start of a trial, and the end of the one that it takes the place of."""
        name = trial.config["name"]
        earlier = self.names.get(trial.trial_id)
        if earlier is not None and earlier != name:
            self._store.replace(name, earlier)
        self.names[trial.trial_id] = name
        self._store.start(name)

    def on_trial_result(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        iteration: int,  # noqa: ARG002
        trials: list[Trial],  # noqa: ARG002
        trial: Trial,
        result: dict[str, Any],
    ) -> None:
        """Record a score or the end of a trial."""
        self._store.update(trial.config["name"], result)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        """Record that Tune has stopped a trial, unless it has ended by itself."""
        self._store.mark_stopped(trial.config["name"])

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        """Record that the process of a trial has failed for the last time."""
        self._store.mark_failed(trial.config["name"])


class InterruptionStopper(tune.Stopper):
    """Stops an interrupted sweep, and one whose folder another process has taken over."""

    def __init__(self, interruption: Interruption, ownership: Ownership) -> None:
        self._interruption, self._ownership = interruption, ownership

    def __call__(self, _trial_id: str, _result: dict[str, Any]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return False

    def __deepcopy__(self, _memo: dict[int, Any]) -> "InterruptionStopper":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def stop_all(self) -> bool:
        """Whether the sweep stops now."""
        if self._interruption.signal:
            self._interruption.mark()
        return self._interruption.signal is not None or self._ownership.is_lost
