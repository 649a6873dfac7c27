"""Messages from the workers to the driver; a light module, because the mailbox's process imports it."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from vitray.metrics.arrays import Examples

Precision = Literal["fp32", "bf16"]


class WorkersStarted(NamedTuple):
    """The worker group has started."""

    device: str
    workers: int
    precision: Precision
    compile: str | None
    """The mode of torch.compile, if the steps are compiled."""


class Resumed(NamedTuple):
    """The run resumes from a checkpoint."""

    step: int
    workers: int
    """Workers of the run that wrote it."""


class StepDone(NamedTuple):
    """A step is done, of which about one a second is reported."""

    step: int


class Metrics(NamedTuple):
    """Metrics of a step."""

    step: int
    values: dict[str, float]
    is_repeated: bool = False
    """Sent again after a resume, in case the driver died before it logged them."""


class Evaluation(NamedTuple):
    """The parts of the last evaluation that are plotted."""

    confusion: np.ndarray | None
    mistakes: list[tuple[float, int, int, int]]
    """Probability, row, label and predicted class of the most confident ones."""


class Pictures(NamedTuple):
    """Reconstructed images of an evaluation."""

    step: int
    pictures: np.ndarray


class ExamplePictures(NamedTuple):
    """Predictions of an evaluation for the same few images."""

    step: int
    examples: Examples


class FigurePictures(NamedTuple):
    """The evaluate.figures of a step, as PNG by name."""

    step: int
    pictures: Mapping[str, bytes]


class Note(NamedTuple):
    """A line for the user."""

    text: str


class CheckpointSaved(NamedTuple):
    """A checkpoint is complete."""

    step: int


# A worker's activity within a step, in this order.
Activity = Literal["start", "images", "computation", "metrics", "evaluation", "checkpoint"]


class Heartbeat(NamedTuple):
    """A worker's position in the run; it replaces the worker's last one."""

    rank: int
    workers: int
    node: str
    step: int
    activity: Activity
    seconds: float
    """Since the activity began."""
    has_failed: bool = False


Message = (
    WorkersStarted
    | Resumed
    | StepDone
    | Metrics
    | Evaluation
    | Pictures
    | ExamplePictures
    | FigurePictures
    | Note
    | CheckpointSaved
)


# The reason why a worker returns; after a preemption the driver starts the workers again.
Ending = Literal["finished", "stopped early", "interrupted", "preempted", "failed"]


class WorkerResult(NamedTuple):
    """The return value of a worker."""

    ending: Ending
    step: int = 0
    error: str | None = None
    """The reason of a failure."""
    seconds: float = 0.0
    """Training time, without evaluations."""
    workers: int = 1
    precision: Precision = "fp32"
    val_top1: float | None = None
    val_map: float | None = None
    thresholds: Sequence[float] | None = None
    """Of several labels an image: those of the last evaluation."""
    val_loss: float | None = None
    best_step: int | None = None
    """The step of the best evaluation."""
    corrupt: Sequence[str] = ()
    """`shard:row` of the images that could not be decoded."""
    skipped: Sequence[int] = ()
    """Steps left out after a broken loss, counted from 0."""
    costs: Mapping[str, float] = {}
    """Latency and peak memory, as measured by `measure_costs`; empty after an interruption."""
