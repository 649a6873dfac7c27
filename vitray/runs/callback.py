"""`vitray.Callback`: what a caller of `train` is told while a run trains."""

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Callback(NamedTuple):
    """Functions that `train` calls in the process of its caller, with and without Ray.

        train(run, "first", callback=Callback(on_evaluation=lambda step, values: print(step, values["val/top1"])))

    A thread calls them as records come in, and training does not wait. An error in one of them is a note of the run.
    """

    on_step: Callable[[int, Mapping[str, float]], None] | None = None
    """Called with a step and its metrics, such as `train/loss`, as often as `tracking.every`."""
    on_evaluation: Callable[[int, Mapping[str, float]], None] | None = None
    """Called with a step and its scores, such as `val/top1` and `val/loss`."""
    on_checkpoint: Callable[[int, str], None] | None = None
    """Called with a step and the folder of its checkpoint, which is complete."""
