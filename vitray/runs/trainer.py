"""Ray Train's trainer, whose workers the driver leads itself, without helpers that would have nothing to do."""

import asyncio
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import ray
from ray.runtime_context import RuntimeContext
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import WorkerGroup


class Workers(WorkerGroup):
    """Workers whose leader may be no actor."""

    def _init_train_context_on_workers(self, workers: Any, sync_actor: Any, train_context_args: Any) -> None:
        # Workers are told of the actor that leads them, to ask it for checkpoints of Ray Train's, of which there are
        # none; a process that is no actor may not even ask which it is.
        is_actor = ray.get_runtime_context().get_actor_id() is not None
        with nullcontext() if is_actor else patch.object(RuntimeContext, "current_actor", None):
            super()._init_train_context_on_workers(workers, sync_actor, train_context_args)


class Leader(TrainController):
    """Starts the workers, looks after them, and starts them again."""

    worker_group_cls = Workers


class Trainer(TorchTrainer):
    """A trainer that starts faster, and whose run leaves the CPUs to itself."""

    def _create_default_callbacks(self) -> list[Any]:
        unused = {"DatasetsCallback"}  # hands out datasets of the trainer; each worker reads a stream of its own
        if not ray.get_runtime_context().get_actor_id():
            # One gives back what a leader has reserved that ends while its job goes on, as a trial of a sweep may; the
            # other, which Ray starts where it is told to, would name the actor that leads.
            unused |= {"PlacementGroupCleanerCallback", "StateManagerCallback"}
        return [each for each in super()._create_default_callbacks() if type(each).__name__ not in unused]

    def _initialize_and_run_controller(  # pyright: ignore[reportIncompatibleMethodOverride] (there it takes any names)
        self,
        train_fn_ref: Any,
        scaling_policy: Any,
        failure_policy: Any,
        train_run_context: Any,
        callbacks: Any,
        validation_config: Any,
    ) -> Any:
        # Ray's way is an actor on this node, which ends with the driver too, and loads torch before anything begins.
        leader = Leader(train_fn_ref, train_run_context, scaling_policy, failure_policy, callbacks, validation_config)
        asyncio.run(leader.run())
        return leader.get_result()
