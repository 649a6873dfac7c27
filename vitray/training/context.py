"""The arguments of a worker."""

from typing import Any, NamedTuple

import numpy as np
import ray
import torch

from vitray.config import Run
from vitray.data.shards.manifest import Dataset
from vitray.tasks.build import Task, build_task


class WorkerContext(NamedTuple):
    """Settings, data and driver handles, equal on every worker."""

    run: Run
    dataset: Dataset
    holdout_mask: np.ndarray | None
    """For each row of train, whether it is held out for evaluation."""
    run_dir: str
    threads: int
    """Compute threads of a CPU worker."""
    mailbox: Any
    """The actor handle of the driver's mailbox."""
    waits_for_decision: bool = False
    """Whether training waits after an evaluation for the scheduler's decision."""
    watches_preemption: bool = False
    """Whether Ray reports nodes that are about to be preempted."""
    driver_node: str | None = None
    """The ID of the driver's node."""
    initial_weights: Any = None
    """An object reference to the weights of a new run; None initializes at random."""
    tokenizer: Any = None
    """An object reference to the tokenizer whose codes are predicted."""
    teacher: Any = None
    """An object reference to the teacher of a distillation."""

    def build(self, device: torch.device, *, trains: bool = False) -> Task:
        """Return the task with random weights and its frozen tokenizer; if it trains, with its teacher too."""
        tokenizer: Any = None if self.tokenizer is None else ray.get(self.tokenizer)
        teacher: Any = ray.get(self.teacher) if trains and self.teacher is not None else None
        return build_task(self.run, tokenizer and tokenizer.to(device), teacher and teacher.to(device)).to(device)

    data_cpus: int | None = None
    """Most CPUs of one execution that decodes images; None is all."""
    probe_gpus: int = 0
    """GPUs of the process that computes evaluate.probes and evaluate.figures; 0 is a CPU."""
    owner: str | None = None
    """The id of the driver as the owner of the run folder."""
