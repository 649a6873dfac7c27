"""A run on Ray, seen from the driver: the connection, the placement of the workers, their starts and restarts."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.exceptions import RayActorError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from vitray.cluster import session
from vitray.errors import RunError
from vitray.models.own_networks import require_declared
from vitray.runs import ray_host
from vitray.runs.failures import HangReport, fit_with_restarts
from vitray.runs.growth import NEVER, Growth
from vitray.runs.model_output import initial_weights
from vitray.runs.placement import Placement, alive_nodes, await_nodes, place_workers, room_for_workers, start_attempts
from vitray.runs.run_dir import RunFolder
from vitray.runs.shutdown import GracefulShutdown
from vitray.runs.trial_hook import TrialHook
from vitray.runs.worker_mailbox import LOST, Mailbox, MailboxLost
from vitray.system.storage import scratch_folder
from vitray.tasks.supervised import Teacher
from vitray.training import host
from vitray.training.messages import Message, Note, WorkerResult
from vitray.training.resolved import ResolvedRun


class RayMailbox:
    """The mailbox as an actor on this node; after its loss, another one takes its place."""

    def __init__(self) -> None:
        self.replace()

    def replace(self) -> None:
        """Start a mailbox, the first one or in place of a dead one."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.actor: Any = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()

    def take(self) -> list[Message]:
        """Return all messages since the last call."""
        try:
            return ray.get(self.actor.take.remote())
        except RayActorError:  # training then fails, too, and starts again with another mailbox
            return []

    def decide(self, step: int, stop: bool) -> None:
        """Record whether training stops early after the evaluation of a step."""
        self.actor.decide.remote(step, stop)


@contextmanager
def started_on_ray(
    resolved: ResolvedRun, hook: TrialHook | None, shutdown: GracefulShutdown
) -> Iterator["RayPlatform"]:
    """Connect to Ray for a block, and place the workers of a run."""
    require_declared(resolved.run.model.name)
    with session.ray_session(keep=True), shutdown.handle_signals():
        await_nodes(resolved.run)
        trials, has_cpus = (hook.concurrent_trials, hook.has_cpus) if hook else (1, True)
        placement = place_workers(resolved.run, trials, has_cpus)
        yield RayPlatform(resolved, placement, hook, shutdown)


class RayPlatform:
    """The workers of a run as Ray Train starts them."""

    def __init__(
        self, resolved: ResolvedRun, placement: Placement, hook: TrialHook | None, shutdown: GracefulShutdown
    ) -> None:
        self.placement, self.mailbox = placement, RayMailbox()
        self._resolved, self._shutdown = resolved, shutdown
        self._is_trial, self._waits_for_decision = hook is not None, hook is not None and hook.waits_for_decision

    def fit(self, folder: RunFolder, source: str | None) -> WorkerResult:
        """Run the training loop, and again where nodes join or are preempted or, some times, after a lost mailbox.

        Messages that are lost with a mailbox are in the checkpoint that the workers resume from, or are sent again.
        """
        initial, restarts = initial_weights(self._resolved, source), self._resolved.run.compute.max_failures
        # Ray Train requires a storage path, but no checkpoint of ours uses it. A local one cannot fail with the run's.
        with scratch_folder() as scratch:
            while True:
                growth = Growth(self._resolved.run, self.placement, self.mailbox.actor)
                try:
                    with growth.watched():
                        result = self._fit(folder, initial, scratch)
                    grows = growth.is_requested and not self._shutdown.is_requested()
                    if result.ending != "interrupted" or grows:
                        ray.get(self.mailbox.actor.forget_stop.remote())  # fails if the last messages are lost
                except (MailboxLost, RayActorError) as error:
                    if not restarts:
                        text = f"training failed: {LOST}; free memory there, and repeat the command"
                        raise RunError(text) from error
                    restarts -= 1
                    self.mailbox.replace()
                    self.mailbox.actor.put.remote(Note(f"{LOST}; the workers start again"))
                    continue
                if grows and result.ending == "interrupted":
                    text = f"nodes have joined: step {result.step:,} is saved; the workers start again, as more"
                    self.mailbox.actor.put.remote(Note(text))
                elif result.ending != "preempted":
                    return result

    def _fit(self, folder: RunFolder, initial: dict[str, Tensor] | None, scratch: Path) -> WorkerResult:
        """Run the training loop on the workers and return the result of the first one."""
        resolved, placement, mailbox = self._resolved, self.placement, self.mailbox.actor
        compute, teacher = resolved.run.compute, resolved.teacher
        start = ray_host.RayStart(
            resolved=resolved.without_networks(),
            run_dir=folder.url,
            owner=folder.owner,
            threads=placement.threads,
            data_cpus=placement.data_cpus,
            probe_gpus=placement.probe_gpus,
            mailbox=mailbox,
            waits_for_decision=self._waits_for_decision,
            watches_preemption=os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1") != "0",
            driver_node=ray.get_runtime_context().get_node_id(),
            initial=None if initial is None else ray.put(initial),
            tokenizer=resolved.tokenizer and ray.put(resolved.tokenizer.tokenizer),
            teacher=teacher and ray.put(Teacher.of(teacher)),
        )

        def attempt() -> Any:
            return self._trainer(start, scratch).fit()

        fit = partial(fit_with_restarts, attempt, mailbox, compute.max_failures)
        # The next start, or the decoding of images, would wait for the CPUs of a failed one. A sweep does so itself.
        removed = session.abandoned_groups_removed(session.START_CLEANUP_INTERVAL, own_starts=True)
        with nullcontext() if self._is_trial else removed:
            return self._shutdown.wait_for(fit, mailbox).return_value

    def _trainer(self, start: ray_host.RayStart, scratch: Path) -> TorchTrainer:
        """Return Ray Train's trainer of an attempt, with as many workers as the nodes hold now."""
        placement, run = self.placement, self._resolved.run
        lowest, highest = placement.workers
        # Ray would also take the CPU that decodes images. A cluster that grows is asked for the nodes of all workers.
        if lowest < highest and session.autoscaling_timeout() is None:
            highest = max(lowest, min(highest, room_for_workers(run, placement, alive_nodes())))
        return TorchTrainer(
            ray_host.worker,
            train_loop_config={"start": start},
            torch_config=TorchConfig(timeout_s=host.COLLECTIVE_SECONDS),
            scaling_config=ray.train.ScalingConfig(
                num_workers=highest if lowest == highest else (lowest, highest),
                elastic_resize_monitor_interval_s=NEVER,
                use_gpu=placement.use_gpu,
                resources_per_worker={"CPU": placement.cpus} | ({"GPU": run.compute.gpus} if placement.use_gpu else {}),
            ),
            run_config=ray.train.RunConfig(
                name=uuid.uuid4().hex[:12],
                storage_path=str(scratch),
                # The driver restarts failed workers; Ray Train starts them again where nodes are missing or preempted.
                failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=start_attempts()),
                callbacks=[HangReport(start.mailbox, host.COLLECTIVE_SECONDS)],
                logging_config=ray.train.LoggingConfig(log_level="WARNING"),
            ),
        )
