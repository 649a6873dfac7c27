"""`train`: a run from its recipe to its model folder, seen from the driver."""

import os
import sys
import time
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitray.cluster import session
from vitray.config import Run
from vitray.errors import RunError
from vitray.runs.console import Console
from vitray.runs.placement import Placement, await_nodes, place_workers, start_attempts
from vitray.runs.promotion import promote_finished
from vitray.runs.resolve import TrialHook, check_storage, resolve
from vitray.runs.run_dir import Outcome, RunFolder, finished_outcome, fork_source, open_run_dir
from vitray.runs.shutdown import GracefulShutdown
from vitray.system import storage
from vitray.system.lease import LEASE_SECONDS, RENEW_SECONDS, check_owner, own_folder
from vitray.system.storage import scratch_folder
from vitray.training.resolved import ResolvedRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from vitray.runs.run_logger import RunLogger
    from vitray.training.messages import WorkerResult

# Seconds for which the process of a trial waits for the end of an earlier one, which may renew its lease meanwhile.
TRIAL_PATIENCE = 2 * LEASE_SECONDS + RENEW_SECONDS


def train(run: Run, name: str, out: str = "runs", *, fork: str | None = None, hook: TrialHook | None = None) -> Outcome:
    """Train a new run, or resume the interrupted run of this name, and return its outcome."""
    called, console = time.monotonic(), Console(quiet=hook is not None)
    storage.check_name(name, "name")
    resolved = resolve(run, hook.dataset if hook else None)
    out = storage.absolute(out)
    run_dir = storage.join(out, name)
    check_storage(run_dir)
    with own_folder(run_dir, name, patience=TRIAL_PATIENCE if hook else 0.0) as ownership:
        folder = open_run_dir(run_dir, name, resolved, ownership.id, fork)
        if outcome := finished_outcome(run_dir):
            print(f"vitray: {name} is finished: {run_dir}", file=sys.stderr)
            return outcome
        source = fork_source(run_dir)
        _print_plan(console, folder, resolved)
        session.prepare_environment()
        shutdown = GracefulShutdown(hook.stop_requested if hook else None, ownership.check)
        with session.ray_session(keep=True), shutdown.handle_signals():
            # Imported late, as they take seconds; Ray Train and torch before a thread imports MLflow.
            import ray.train.torch  # noqa: F401

            from vitray.runs.run_logger import RunLogger

            await_nodes(resolved.run)
            trials, has_cpus = (hook.concurrent_trials, hook.has_cpus) if hook else (1, True)
            placement = place_workers(resolved.run, trials, has_cpus)
            with RunLogger(resolved, folder, placement, console, called, hook) as logger:
                outcome = _train(resolved, folder, placement, logger, shutdown, source)
            promoted = promote_finished(run_dir, resolved.dataset.url) if run.tracking.promote else None
            return outcome._replace(promotion=promoted)


def _print_plan(console: Console, folder: RunFolder, resolved: ResolvedRun) -> None:
    """Print what is known of a run, and what it waits for."""
    from vitray.runs.run_summary import plan_block
    from vitray.weights.freezing import audit_table

    console.block(plan_block(folder.name, folder.url, resolved))
    if resolved.initial:
        console.line("\n".join(f"  {line}" for line in audit_table(resolved.initial.audit).splitlines()) + "\n")
    if session.starts_local_ray():
        console.line("  starting Ray on this machine ...")
    elif address := os.environ.get("RAY_ADDRESS"):
        console.line(f"  connecting to Ray at {address} ...")


def _train(
    resolved: ResolvedRun,
    folder: RunFolder,
    placement: Placement,
    logger: "RunLogger",
    shutdown: GracefulShutdown,
    source: str | None,
) -> Outcome:
    """Train on the workers, save the model and return the outcome; a fork starts from the run in folder `source`."""
    from vitray.runs.model_output import last_weights, save_weights

    initial = resolved.initial.task_state if resolved.initial else last_weights(source) if source else None
    # Ray Train requires a storage path, but no checkpoint of ours uses it. A local one cannot fail with the run's.
    with scratch_folder() as scratch:
        fit = partial(_fit, resolved, folder, placement, initial, logger.hook, shutdown, scratch)
        result = _fit_to_end(fit, logger, resolved.run.compute.max_failures)
    assert result.ending != "preempted"
    match result.ending:
        case "interrupted":
            logger.console.line(f"  step {result.step:,} is saved")
            raise shutdown.error
        case "failed":
            raise RunError(f"{folder.name}: {result.error}")
        case "stopped early":
            check_owner(folder.url, folder.owner)
            return logger.finish(result, None)
        case "finished":
            check_owner(folder.url, folder.owner)
            saved = save_weights(resolved.run, folder.url, resolved.dataset.classes, resolved.initial)
            check_owner(folder.url, folder.owner)  # an upload may take minutes
            return logger.finish(result, saved)


def _fit_to_end(fit: "Callable[[Any], WorkerResult]", logger: "RunLogger", restarts: int) -> "WorkerResult":
    """Call `fit` with a mailbox, and again after a preemption or the loss of the mailbox, the latter `restarts` times.

    Messages that are lost with a mailbox are in the checkpoint that the workers resume from, or are sent again.
    """
    import ray
    from ray.exceptions import RayActorError

    from vitray.runs.worker_mailbox import LOST, MailboxLost
    from vitray.training.messages import Note

    while True:
        try:
            result = fit(logger.mailbox)
            if result.ending != "interrupted":
                ray.get(logger.mailbox.hang.remote())  # fails if the last messages are lost
        except (MailboxLost, RayActorError) as error:
            if not restarts:
                raise RunError(f"training failed: {LOST}; free memory there, and repeat the command") from error
            restarts -= 1
            logger.replace_mailbox()
            logger.mailbox.put.remote(Note(f"{LOST}; the workers start again"))
            continue
        if result.ending != "preempted":
            return result


def _fit(
    resolved: ResolvedRun,
    folder: RunFolder,
    placement: Placement,
    initial: "dict[str, Tensor] | None",
    hook: TrialHook | None,
    shutdown: GracefulShutdown,
    scratch: Path,
    mailbox: Any,
) -> "WorkerResult":
    """Run the training loop on the workers and return the result of the first one."""
    import ray
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    from vitray.runs import ray_host
    from vitray.runs.failures import COLLECTIVE_SECONDS, HangReport, fit_with_restarts
    from vitray.tasks.supervised import Teacher

    compute, teacher = resolved.run.compute, resolved.teacher
    start = ray_host.RayStart(
        resolved=resolved._replace(initial=None, tokenizer=None, teacher=None),
        run_dir=folder.url,
        owner=folder.owner,
        threads=placement.threads,
        data_cpus=placement.data_cpus,
        probe_gpus=placement.probe_gpus,
        mailbox=mailbox,
        waits_for_decision=hook is not None and hook.waits_for_decision,
        watches_preemption=os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1") != "0",
        driver_node=ray.get_runtime_context().get_node_id(),
        initial=None if initial is None else ray.put(initial),
        tokenizer=resolved.tokenizer and ray.put(resolved.tokenizer.tokenizer),
        teacher=teacher and ray.put(Teacher(teacher.network, teacher.normalize)),
    )
    lowest, highest = placement.workers
    trainer = TorchTrainer(
        ray_host.worker,
        train_loop_config={"start": start},
        torch_config=TorchConfig(timeout_s=COLLECTIVE_SECONDS),
        scaling_config=ray.train.ScalingConfig(
            num_workers=highest if lowest == highest else (lowest, highest),
            use_gpu=placement.use_gpu,
            resources_per_worker={"CPU": placement.cpus} | ({"GPU": compute.gpus} if placement.use_gpu else {}),
        ),
        run_config=ray.train.RunConfig(
            name=uuid.uuid4().hex[:12],
            storage_path=str(scratch),
            # The driver restarts failed workers; Ray Train starts them again where nodes are missing or preempted.
            failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=start_attempts()),
            callbacks=[HangReport(mailbox, COLLECTIVE_SECONDS)],
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
        ),
    )
    fit = partial(fit_with_restarts, trainer.fit, mailbox, compute.max_failures)
    # The next start, or the decoding of images, would wait for the CPUs of a failed one.
    with session.abandoned_groups_removed(session.START_CLEANUP_INTERVAL, own_starts=True):
        return shutdown.wait_for(fit, mailbox).return_value
