"""Early stopping of trials by Ray Tune's schedulers, which compare trials at the same share of their runs.

Trials may differ in batch size or duration, so that a number of steps does not mean the same for all.
"""

from typing import Any

from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from vitray.config.sweep import Asha, Median
from vitray.sweep.space import Space
from vitray.training.schedule import Length, in_steps

# The key of a result's share of its run, and the share of a whole run: integers, as ASHA's rungs must be met exactly.
PROGRESS_KEY, FULL_RUN = "share", 10**6


class _Median(MedianStoppingRule):
    """Tune's median rule without pauses, which would end the process of a training run."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        return TrialScheduler.CONTINUE if decision == TrialScheduler.PAUSE else decision


def progress(step: int, steps: int | None) -> int:
    """Return the share of a run in parts of `FULL_RUN`, rounded up; 0, before any rung, for a run of unknown length."""
    return -(-FULL_RUN * step // steps) if steps else 0


def build_scheduler(length: Length, space: Space) -> TrialScheduler:
    """Return the scheduler of a space; the length of the first trial that can start converts `grace` to a share."""
    match space.scheduler:
        case Asha(grace=grace, reduction=reduction):
            return AsyncHyperBandScheduler(
                time_attr=PROGRESS_KEY, max_t=FULL_RUN, grace_period=share_of(grace, length), reduction_factor=reduction
            )
        case Median(grace=grace):
            return _Median(time_attr=PROGRESS_KEY, grace_period=share_of(grace, length))
        case _:
            return FIFOScheduler()


def share_of(duration: str, length: Length) -> int:
    """Return a duration as a share of a run."""
    # Rounded down, as `progress` is rounded up: a run that has done these steps has also reached the share.
    return max(1, min(FULL_RUN, FULL_RUN * in_steps(duration, length.epoch) // length.total))
