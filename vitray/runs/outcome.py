"""The outcome of a run: how it ended, its scores and its costs."""

import json
from typing import Literal, NamedTuple

from vitray import storage

OUTCOME = "outcome.json"


class Outcome(NamedTuple):
    """How a run ended."""

    name: str
    home: str
    """The run folder."""
    state: Literal["finished", "stopped early"]
    model: str | None
    """The model folder; None after an early stop."""
    model_bytes: int | None
    """Bytes of the stored tensors; a delta counts only its own."""
    val_top1: float | None
    """Score of the weights in the model folder; None without classes."""
    val_loss: float | None
    """Loss of the same weights."""
    mlflow_run: str | None
    """None while the tracking server is unreachable."""
    steps: int
    seconds: float
    """Training time, without start and evaluations."""
    images_per_second: float | None
    """Median over the records, without the first, which includes the start."""
    start: dict[str, float]
    """Seconds from the call to: ray, workers, first step."""


def finished_outcome(run_dir: str) -> Outcome | None:
    """Return the outcome of a finished run; None for any other."""
    if not storage.exists(path := storage.join(run_dir, OUTCOME)):
        return None
    content = json.loads(storage.read_bytes(path))
    return Outcome(*(content.get(field) for field in Outcome._fields)) if content["state"] == "finished" else None
