"""Which trials end early: Tune's rules, told in steps."""

from typing import Any

from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from vitray.config.sweep import Asha, Median
from vitray.runs.plan import Plan
from vitray.sweep.space import Space
from vitray.train.schedule import in_steps


class _Median(MedianStoppingRule):
    """Tune's, which would also pause a trial while too few others have come as far, and end its process for that."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        said = super().on_trial_result(tune_controller, trial, result)
        return TrialScheduler.CONTINUE if said == TrialScheduler.PAUSE else said


def scheduler_of(plan: Plan, space: Space) -> TrialScheduler:
    """What Tune asks after each score of a trial."""
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
