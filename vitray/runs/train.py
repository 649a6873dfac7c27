"""`train`: a run from its recipe to its model folder, seen from the driver."""

import os
import sys
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from vitray.cluster import session
from vitray.config import Run
from vitray.errors import RunError
from vitray.runs.callback import Callback
from vitray.runs.console import Console
from vitray.runs.local_start import Place, decode_processes
from vitray.runs.placement import Placement
from vitray.runs.promotion import promote_finished
from vitray.runs.resolve import check_storage, resolve
from vitray.runs.run_dir import Outcome, RunFolder, finished_outcome, fork_source, open_run_dir
from vitray.runs.shutdown import GracefulShutdown
from vitray.runs.trial_hook import TrialHook
from vitray.system import storage
from vitray.system.lease import check_owner, own_folder
from vitray.training.resolved import ResolvedRun

if TYPE_CHECKING:
    from vitray.runs.run_logger import Inbox, RunLogger
    from vitray.runs.train_here import Group
    from vitray.training.messages import WorkerResult


class Platform(Protocol):
    """What runs the workers: Ray (train_on_ray.py), or this process (train_here.py)."""

    placement: Placement

    @property
    def mailbox(self) -> "Inbox":
        """The messages of the workers."""
        ...

    def fit(self, folder: RunFolder, source: str | None) -> "WorkerResult":
        """Run the training loop on all workers; a fork starts from the last weights of the run in folder `source`."""
        ...


def train(
    run: Run,
    name: str,
    out: str = "runs",
    *,
    fork: str | None = None,
    here: bool = False,
    callback: Callback | None = None,
    hook: TrialHook | None = None,
) -> Outcome:
    """Train a new run, or resume the interrupted run of this name, and return its outcome.

    With `here` this process trains, without Ray; so does each process that torchrun has started. `callback` is told of
    steps, evaluations and checkpoints; `hook` is for the trials of a sweep.
    """
    called = time.monotonic()
    storage.check_name(name, "name")
    own_cpus = hook.own_cpus if hook else None
    if not here and own_cpus is None:
        return _lead(run, name, out, fork, callback, hook, called)
    place = Place() if own_cpus else Place.told()
    with decode_processes(place, own_cpus) as decoders:
        from vitray.runs.train_here import follow, joined_group  # torch takes seconds, in those processes, too

        with joined_group(run, place, own_cpus, decoders) as group:
            if group.rank:
                return follow(run, group)
            return group.broadcast(_lead(run, name, out, fork, callback, hook, called, group))


def _lead(
    run: Run,
    name: str,
    out: str,
    fork: str | None,
    callback: Callback | None,
    hook: TrialHook | None,
    called: float,
    group: "Group | None" = None,
) -> Outcome:
    """Train on Ray, or with the processes of a group."""
    console = Console(quiet=hook is not None and hook.is_quiet)
    resolved = resolve(run, hook.dataset if hook else None)
    out = storage.absolute(out)
    run_dir = storage.join(out, name)
    check_storage(run_dir)
    with own_folder(run_dir, name, patience=hook.patience if hook else 0.0) as ownership:
        folder = open_run_dir(run_dir, name, resolved, ownership.id, fork)
        if outcome := finished_outcome(run_dir):
            print(f"vitray: {name} is finished: {run_dir}", file=sys.stderr)
            return outcome
        source = fork_source(run_dir)
        _print_plan(console, folder, resolved, group)
        shutdown = GracefulShutdown(hook.stop_requested if hook else None, ownership.check)
        with _started(resolved, hook, shutdown, group) as platform:
            from vitray.runs.run_logger import RunLogger  # after Ray and torch: a thread imports MLflow

            watchers = callback, hook
            with RunLogger(
                resolved, folder, platform.placement, platform.mailbox, console, called, *watchers
            ) as logger:
                outcome = _train(resolved, folder, platform, logger, shutdown, source)
            workers = None if group is None else 1
            promoted = promote_finished(run_dir, resolved.dataset.url, workers) if run.tracking.promote else None
            return outcome._replace(promotion=promoted)


def _print_plan(console: Console, folder: RunFolder, resolved: ResolvedRun, group: "Group | None") -> None:
    """Print what is known of a run, and what it waits for."""
    from vitray.runs.run_summary import plan_block
    from vitray.weights.freezing import audit_table

    console.block(plan_block(folder.name, folder.url, resolved))
    if resolved.initial:
        console.line("\n".join(f"  {line}" for line in audit_table(resolved.initial.audit).splitlines()) + "\n")
    if group is not None:
        return
    if session.starts_local_ray():
        console.line("  starting Ray on this machine ...")
    elif address := os.environ.get("RAY_ADDRESS"):
        console.line(f"  connecting to Ray at {address} ...")


def _started(
    resolved: ResolvedRun, hook: TrialHook | None, shutdown: GracefulShutdown, group: "Group | None"
) -> AbstractContextManager[Platform]:
    """Return the platform of a run, which ends with a block."""
    if group is not None:
        from vitray.runs.train_here import started_here

        return started_here(resolved, hook, shutdown, group)
    session.prepare_environment()
    from vitray.runs.train_on_ray import started_on_ray  # Ray takes seconds

    return started_on_ray(resolved, hook, shutdown)


def _train(
    resolved: ResolvedRun,
    folder: RunFolder,
    platform: Platform,
    logger: "RunLogger",
    shutdown: GracefulShutdown,
    source: str | None,
) -> Outcome:
    """Train on the workers, save the model and return the outcome; a fork starts from the run in folder `source`."""
    from vitray.runs.model_output import save_weights

    result = platform.fit(folder, source)
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
            trained = resolved.run.replace({"compute.precision": result.precision})
            if result.thresholds is not None:
                trained = trained.replace({"task.thresholds": list(result.thresholds)})
            saved = save_weights(trained, folder.url, resolved.dataset.classes, resolved.initial)
            check_owner(folder.url, folder.owner)  # an upload may take minutes
            return logger.finish(result, saved)
