"""Ray Train's trainer with its controller in the driver's process, and without unused helper actors."""

import asyncio
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import ray
from ray.runtime_context import RuntimeContext
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import WorkerGroup


class DriverWorkerGroup(WorkerGroup):
    """A worker group whose controller need not be an actor."""

    def _init_train_context_on_workers(self, workers: Any, sync_actor: Any, train_context_args: Any) -> None:
        # Ray passes the controller's actor handle to the workers, for checkpoints of Ray Train, which are not used.
        # Outside an actor the query for that handle fails.
        is_actor = ray.get_runtime_context().get_actor_id() is not None
        with nullcontext() if is_actor else patch.object(RuntimeContext, "current_actor", None):
            super()._init_train_context_on_workers(workers, sync_actor, train_context_args)


class DriverController(TrainController):
    """A controller that starts, watches and restarts the workers from the driver's process."""

    worker_group_cls = DriverWorkerGroup


class Trainer(TorchTrainer):
    """A trainer that starts faster and reserves no CPU for its controller."""

    def _create_default_callbacks(self) -> list[Any]:
        unused = {"DatasetsCallback"}  # shards the trainer's datasets; each worker reads a stream of its own
        if not ray.get_runtime_context().get_actor_id():
            # The cleaner frees placement groups of a controller that dies before its job, as a trial's may. The state
            # manager would report the controller's actor.
            unused |= {"PlacementGroupCleanerCallback", "StateManagerCallback"}
        return [each for each in super()._create_default_callbacks() if type(each).__name__ not in unused]

    @staticmethod
    def _initialize_and_run_controller(  # pyright: ignore[reportIncompatibleMethodOverride] (Ray accepts any names)
        train_fn_ref: Any,
        scaling_policy: Any,
        failure_policy: Any,
        train_run_context: Any,
        callbacks: Any,
        validation_config: Any,
    ) -> Any:
        # Ray runs the controller as an actor on this node, which also ends with the driver but imports torch first.
        controller = DriverController(
            train_fn_ref, train_run_context, scaling_policy, failure_policy, callbacks, validation_config
        )
        asyncio.run(controller.run())
        return controller.get_result()
