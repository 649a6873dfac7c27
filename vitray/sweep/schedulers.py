"""Early stopping of trials: Ray Tune's schedulers, counted in steps."""

from typing import Any

from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from vitray.config.sweep import Asha, Median
from vitray.runs.plan import Plan
from vitray.sweep.space import Space
from vitray.training.schedule import in_steps


class _Median(MedianStoppingRule):
    """Tune's median rule without pauses, which would end the process of a training run."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        return TrialScheduler.CONTINUE if decision == TrialScheduler.PAUSE else decision


def build_scheduler(plan: Plan, space: Space) -> TrialScheduler:
    """Return the scheduler of a space."""
    match space.scheduler:
        case Asha(grace=grace, reduction=reduction):
            return AsyncHyperBandScheduler(
                time_attr="step",
                max_t=plan.steps,
                grace_period=in_steps(grace, plan.steps_per_epoch),
                reduction_factor=reduction,
            )
        case Median(grace=grace):
            return _Median(time_attr="step", grace_period=in_steps(grace, plan.steps_per_epoch))
        case _:
            return FIFOScheduler()
