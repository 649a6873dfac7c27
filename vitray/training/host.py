"""The platform that the training loop runs on, as the loop sees it.

Ray Train is one (runs/ray_host.py), the process that was called is the other (runs/local_host.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vitray.data.stream.batches import StreamSpec
from vitray.data.stream.stream import Stream
from vitray.training.messages import Activity, Message

# Seconds that a worker waits for the others in a collective operation. Rank 0 may wait 17 minutes for a storage that is
# away before it gives up: six tries to write a checkpoint, of 140 seconds each, and the pauses between them.
COLLECTIVE_SECONDS = 1800
# Seconds between two reports of the steps done.
PROGRESS_SECONDS = 1.0


class Notice(NamedTuple):
    """Word of a node that is about to be preempted."""

    restarts: bool
    """Whether the workers can start again elsewhere. Not if the driver's own node ends: then training goes on."""


class Job(Protocol):
    """Work beside training."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result, and raise the error of a job that failed."""
        ...

    def cancel(self) -> Any:
        """End the job; nobody waits for its result."""
        ...


class Host(Protocol):
    """What the loop needs of its platform. All workers call a *collective* method after the same step."""

    rank: int
    workers: int
    node: str
    """A name of this machine, if a platform decodes for the workers of several; else the same for all."""
    device: torch.device
    threads: int
    """Compute threads of a CPU worker."""

    def load(self, name: Literal["initial", "tokenizer", "teacher"]) -> Any:
        """Return weights of a new run, or the tokenizer or teacher of its task; None without them."""
        ...

    def open_stream(self, spec: StreamSpec) -> Stream:
        """Return images of the run's dataset."""
        ...

    def check_owner(self) -> None:
        """Raise OwnershipLost if another process has taken over the run folder."""
        ...

    def at(self, step: int, activity: Activity) -> None:
        """Note what the worker is doing, for the report of a hang."""
        ...

    def progress(self, step: int) -> None:
        """Note the steps done; called after each one."""
        ...

    def send(self, message: Message) -> None:
        """Send a message from rank 0 to the driver, without waiting; other ranks send nothing."""
        ...

    def sample(self, step: int) -> None:
        """Send the load of this machine, from one worker of each."""
        ...

    def report(self, step: int, values: Mapping[str, float], checkpoint: str | None) -> None:
        """Show the metrics of a step and rank 0's last checkpoint on the platform's own pages. Collective."""
        ...

    def stop_requested(self) -> bool:
        """Whether this worker knows of a request to save and stop; the loop tells the others."""
        ...

    def should_stop(self, step: int) -> bool:
        """Whether to stop early after the evaluation of a step, as a sweep decides. Collective."""
        ...

    def notice(self) -> Notice | None:
        """Return the first notice of a preemption, once. Collective."""
        ...

    def start_scores(self, networks: Sequence[Mapping[str, Tensor]], after: Job | None) -> Job:
        """Score some weights of the task beside training, after another job; the result is a list of scores."""
        ...

    def start_probes(self, step: int, weights: Mapping[str, np.ndarray]) -> Job:
        """Compute probes and figures of a network beside training; the result is a `Probed`."""
        ...

    def unfinished(self, jobs: Sequence[Job], seconds: float) -> list[Job]:
        """Wait for some seconds, and return the jobs that have not ended."""
        ...
