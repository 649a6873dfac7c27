"""The schedulers of Ray Tune, which compare trials at the same share of their runs.

Trials may differ in batch size or duration, so that a number of steps does not mean the same for all.
"""

import random
from collections.abc import Callable
from typing import Any

from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from vitray.config.sections import in_steps
from vitray.config.sweep import Asha, Distribution, Median, NoScheduler, Population
from vitray.sweeps.population import Continuations
from vitray.sweeps.space import Space
from vitray.sweeps.trial_store import TrialStore
from vitray.training.schedule import Length

# The key of a result's share of its run, and the share of a whole run: integers, as ASHA's rungs must be met exactly.
PROGRESS_KEY, FULL_RUN = "share", 10**6


def progress(step: int, steps: int | None) -> int:
    """Return the share of a run in parts of `FULL_RUN`, rounded up; 0, before any rung, for a run of unknown length."""
    return -(-FULL_RUN * step // steps) if steps else 0


def build_scheduler(length: Length, space: Space, store: TrialStore) -> TrialScheduler:
    """Return the scheduler of a space; the length of the first trial that can start converts durations to shares."""
    settings = space.scheduler
    assert type(settings) in BUILDERS, f"scheduler {settings.kind} has no builder in {__name__}"
    return BUILDERS[type(settings)](settings, length, space, store)


def _asha(settings: Asha, length: Length, _space: Space, _store: TrialStore) -> TrialScheduler:
    return AsyncHyperBandScheduler(
        time_attr=PROGRESS_KEY,
        max_t=FULL_RUN,
        grace_period=_share_of(settings.grace, length),
        reduction_factor=settings.reduction,
    )


def _median(settings: Median, length: Length, _space: Space, _store: TrialStore) -> TrialScheduler:
    rule = _without_pauses(MedianStoppingRule)
    return rule(time_attr=PROGRESS_KEY, grace_period=_share_of(settings.grace, length))


def _population(settings: Population, length: Length, space: Space, store: TrialStore) -> TrialScheduler:
    rule = _without_pauses(PopulationBasedTraining)
    return rule(
        time_attr=PROGRESS_KEY,
        perturbation_interval=_share_of(settings.every, length),
        hyperparam_mutations={name: _draws(space.space[name]) for name in space.changeable},
        quantile_fraction=settings.share,
        resample_probability=settings.resample,
        custom_explore_fn=Continuations(space, store),
        log_config=False,
    )


# One row for each kind of scheduler; its settings state what the rest of vitray needs to know of it (`traits`).
BUILDERS: dict[type, Callable[[Any, Length, Space, TrialStore], TrialScheduler]] = {
    NoScheduler: lambda *_: FIFOScheduler(),
    Asha: _asha,
    Median: _median,
    Population: _population,
}


def _without_pauses(rule: Any) -> Any:
    """Return a class of Tune's schedulers without pauses."""

    class _Scheduler(rule):
        """Continues a trial where the rule would pause it, which would end the process of a training run."""

        def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
            decision = super().on_trial_result(tune_controller, trial, result)
            return TrialScheduler.CONTINUE if decision == TrialScheduler.PAUSE else decision

    return _Scheduler


def _share_of(duration: str, length: Length) -> int:
    """Return a duration as a share of a run."""
    # Rounded down, as `progress` is rounded up: a run that has done these steps has also reached the share.
    return max(1, min(FULL_RUN, FULL_RUN * in_steps(duration, length.epoch) // length.total))


def _draws(distribution: Distribution) -> list[Any] | Callable[[], Any]:
    """Return the listed values, of which Tune takes neighbors, or a function that draws from a range."""
    if distribution.values is not None:
        return list(distribution.values)
    return lambda: distribution.snap(distribution.sample(random.Random()))
