"""The searcher: hands Ray Tune the next trial."""

import math
import random
import time
from collections.abc import Callable
from typing import Any

from ray.tune.search import Searcher

from vitray.sweeps.plan import SweepPlan, with_absolute_addresses
from vitray.sweeps.space import draw_point, name_of
from vitray.sweeps.trial_store import TrialEntry, TrialStore

# Seconds between two looks at the nodes of the cluster.
NODES_INTERVAL = 5.0


class TrialSearcher(Searcher):
    """Suggests the stored trials that are not over, then the new points of a search that learns."""

    def __init__(self, plan: SweepPlan, store: TrialStore, count_places: Callable[[], int]) -> None:
        """Queue the stored trials; under a scheduler also the ended ones, which it replays after a restart.

        `count_places` returns the number of trials that fit the cluster as it is now.
        """
        super().__init__()
        self._plan, self._store, self._space = plan, store, plan.space
        self._count_places, self._places, self._counted = count_places, 0, -math.inf
        self._live: set[str] = set()
        self._started = time.monotonic()
        replays = plan.space.scheduler.traits.decides
        waiting = [name for name, record in store.records().items() if replays or not record.is_over]
        if replays:
            # In the order of their values each trial might be the best so far, and the scheduler would stop none.
            random.Random(0).shuffle(waiting)
        # Ended trials come first, so that running ones are compared with them.
        self._waiting = sorted(waiting, key=lambda name: not store.trials[name].record.is_over)

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its arguments to resume by itself, which is not used.
        return {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the name and the settings of the next trial, FINISHED, or None while no further trial fits."""
        if time.monotonic() - self._counted >= NODES_INTERVAL:
            self._places, self._counted = self._count_places(), time.monotonic()
        # The first one always waits for its nodes in its own process.
        if len(self._live) >= max(1, self._places):
            return None
        if (name := self._next()) is None:
            return Searcher.FINISHED
        self._live.add(trial_id)
        self._store.names[trial_id] = name
        return {"name": name} | self._store.settings(name)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:  # noqa: ARG002
        """Free the trial's place; the trial store has its result."""
        self._live.discard(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: the trials are on disk."""

    def _next(self) -> str | None:
        """Return the name of the next trial; None where no further one starts."""
        if self._waiting and (self._store.trials[self._waiting[0]].record.is_over or not self.is_spent()):
            return self._waiting.pop(0)
        if self._waiting or not self._space.search.traits.learns or len(self._store.trials) >= self._plan.trials:
            return None
        return None if self.is_spent() else self._draw()

    def is_spent(self) -> bool:
        """Whether the budget is spent or too many trials have failed."""
        budget, trials = self._space.budget, self._store.trials.values()
        failed = sum(trial.record.state == "failed" for trial in trials)
        if failed > self._space.failures * self._plan.trials:
            return True
        if budget.minutes is not None and time.monotonic() - self._started > 60 * budget.minutes:
            return True
        if budget.device_hours is None:
            return False
        spent = sum(trial.cost("device_seconds") or 0.0 for trial in trials)
        return spent >= 3600 * budget.device_hours

    def _draw(self) -> str | None:
        """Store a new point and return its name; None where no new point is left."""
        from vitray.sweeps.sampler import TRIES, ask  # imports Optuna

        drawn = [trial for trial in self._store.trials.values() if trial.entry.asked is not None]
        for attempt in range(TRIES):
            suggestion = ask(self._space, drawn, attempt)
            point = draw_point(self._space, suggestion.values)
            if point and (name := name_of(point, self._space)) not in self._store.trials:
                self._store.add(name, TrialEntry(with_absolute_addresses(point), suggestion.asked))
                return name
        return None
