"""One trial as Ray Tune runs it: a training run in a thread, which can be stopped early.

An ended trial replays its recorded scores instead of training again, so that a restarted scheduler learns all of them.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ray import tune

from vitray.config import Run
from vitray.data.shards.manifest import Dataset
from vitray.errors import ConfigError, OwnershipLost, RunError
from vitray.runs.train import train
from vitray.runs.trial_hook import TrialHook
from vitray.sweeps.capacity import TrialResources
from vitray.sweeps.plan import own_cpus, trials_that_fit
from vitray.sweeps.population import CONTINUES, continue_from, copy_checkpoint_to
from vitray.sweeps.schedulers import PROGRESS_KEY, progress
from vitray.sweeps.space import Space
from vitray.sweeps.trial_store import (
    RecordState,
    Scored,
    TrialRecord,
    costs_of,
    read_outcome,
    read_record,
    read_sizes,
    recorded,
    write_record,
)
from vitray.system import storage
from vitray.system.lease import check_owner, check_visible
from vitray.training.checkpoints import complete_steps

# The marker file of an interrupted sweep, which its driver writes.
INTERRUPTED = "interrupted"
# Seconds in which a stopped trial saves its checkpoint and releases its workers.
STOP_SECONDS = 300.0


class TrialContext(NamedTuple):
    """The arguments that all trials of a sweep share."""

    base: Run
    dataset: Dataset
    """Opened once for all trials."""
    sweep_dir: str
    owner: str
    """The id of the driver as the owner of this folder."""
    parent_uid: str
    """The sweep's run in MLflow."""
    space: Space
    trials: int
    resources: TrialResources
    """Of one trial."""
    has_cpus: bool
    """Whether compute.cpus is the user's, not the plan's."""
    environment: dict[str, str]
    """Variables of the driver's environment, which may be missing in a trial's process. Never written to disk."""


class TrialTrainable(tune.Trainable):
    """A training run as Tune's trainable: each step is one score."""

    def setup(self, config: dict[str, Any], context: TrialContext | None = None) -> None:  # type: ignore[override]
        """Prepare the trial of this name and these settings."""
        assert context is not None
        os.environ |= context.environment
        self._context = context
        self._start(config)

    def step(self) -> dict[str, Any]:
        """Return the next score, or the end. Being called means that the scheduler continues the trial."""
        if self._thread.ident is None:
            self._thread.start()
        if self._waits_for_decision:
            self._decisions.put(False)
        result = self._results.get()
        if isinstance(result, BaseException):
            raise RuntimeError(str(result)) from None
        self._waits_for_decision, self._last_step = not result["done"], result["step"]
        return result

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Run another trial in the same process, which has everything imported."""
        self.cleanup()
        if self._thread.is_alive():  # not False: Tune would fail the trial, and not tell the searcher
            raise RuntimeError("the previous trial did not stop in time")
        self._start(new_config)
        return True

    def cleanup(self) -> None:
        """Stop, and wait until the run has saved its checkpoint and released its workers.

        In an interrupted sweep the run resumes later from this checkpoint, in another process.
        """
        resumes = storage.exists(storage.join(self._context.sweep_dir, INTERRUPTED))
        if resumes:
            self._stop_requested.set()
        self._decisions.put(not resumes)
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the checkpoint of the last score, for a trial that continues from it."""
        copy_checkpoint_to(Path(checkpoint_dir), self._run_dir, self._last_step)

    def load_checkpoint(self, checkpoint: str) -> None:  # type: ignore[override]
        """Continue from a copied checkpoint."""
        continue_from(Path(checkpoint), self._run_dir)

    # ---- the run, in its thread --------------------------------------------------------------------------------------

    def _start(self, config: dict[str, Any]) -> None:
        self._results: queue.Queue[Any] = queue.Queue()
        self._decisions: queue.Queue[bool] = queue.Queue()
        self._stop_requested = threading.Event()
        self._waits_for_decision = False
        self._run_dir, self._last_step = storage.join(self._context.sweep_dir, config["name"]), 0
        # Started by the first step: a trial that continues another one first loads its checkpoint.
        self._thread = threading.Thread(target=self._work, args=(config,), name="trial", daemon=True)

    def _work(self, config: dict[str, Any]) -> None:
        try:
            settings = dict(config)
            name, source = settings.pop("name"), settings.pop(CONTINUES, None)
            if source and not complete_steps(self._run_dir):
                raise RunError(f"{name}: it has no checkpoint of {source} to continue from")
            self._run(name, settings)
        except BaseException as error:  # the next step raises it in Tune
            self._results.put(error)

    def _run(self, name: str, settings: Mapping[str, Any]) -> None:
        run_dir = storage.join(self._context.sweep_dir, name)
        try:
            check_visible(self._context.sweep_dir, self._context.owner)
        except ConfigError as error:  # nothing is written: the folder would be one of this node
            self._results.put(_score(0, None, float("nan")) | {"state": "failed", "done": True, "reason": str(error)})
            return
        record = read_record(run_dir)
        for step, value in () if self._context.space.scheduler.traits.is_population else record.scores:
            if self._should_stop(step, record.steps, value):
                if not record.is_over:
                    self._write(run_dir, record._replace(state="stopped early"))
                return
        costs: dict[str, float] = {}
        if not record.is_over:
            record, costs = self._train(name, settings, record)
        # A failed run is no error here: Tune would restart it, as it restarts a trial whose process dies.
        step, value = record.scores[-1] if record.scores and record.state != "failed" else (0, float("nan"))
        end = {"state": record.state, "done": True} | ({"reason": record.reason} if record.reason else {})
        self._results.put(_score(step, record.steps, value) | end | costs)

    def _train(
        self, name: str, settings: Mapping[str, Any], record: TrialRecord
    ) -> tuple[TrialRecord, dict[str, float]]:
        """Run the training; return the trial's last record, and the costs of its run."""
        context, run_dir = self._context, storage.join(self._context.sweep_dir, name)

        def start(scored: Scored) -> RecordState:
            concurrent = max(1, trials_that_fit(context.base, context.resources, context.trials))
            hook = TrialHook(
                parent_uid=context.parent_uid,
                should_stop=scored,
                waits_for_decision=context.space.scheduler.traits.decides,
                dataset=context.dataset,
                concurrent_trials=concurrent,
                has_cpus=context.has_cpus,
                own_cpus=own_cpus(context.resources, concurrent),
                stop_requested=self._stop_requested,
            )
            return train(context.base.replace(settings), name, context.sweep_dir, hook=hook).state

        def decide(record: TrialRecord) -> bool:
            try:
                self._write(run_dir, record)
            except ConfigError:  # unreachable storage costs a restart this score, not the trial
                pass
            except OwnershipLost:  # the workers wait for an answer, and the thread that asks has to live
                self._stop_requested.set()
                return False
            step, value = record.scores[-1]
            return self._should_stop(step, record.steps, value)

        self._write(run_dir, record := record.started())
        self._write(run_dir, record := recorded(start, record, context.space.goal.metric, decide))
        if record.state == "failed":
            return record, {}
        outcome = sizes = None
        with contextlib.suppress(ConfigError):  # the driver reads it later
            outcome = read_outcome(run_dir)
        with contextlib.suppress(ConfigError):
            sizes = read_sizes(context.base.replace(settings), run_dir)
        return record, costs_of(outcome, sizes)

    def _write(self, run_dir: str, record: TrialRecord) -> None:
        """Write a record, unless another sweep has taken over the folder."""
        check_owner(self._context.sweep_dir, self._context.owner)
        write_record(run_dir, record)

    def _should_stop(self, step: int, steps: int | None, value: float) -> bool:
        """Report a score to Tune and wait for the scheduler's decision.

        The last score is reported together with the end of the trial: alone, it could make Tune stop the trial and kill
        it while it saves its model.
        """
        if step == steps:
            return False
        self._results.put(_score(step, steps, value) | {"done": False})
        return self._decisions.get()


def _score(step: int, steps: int | None, value: float) -> dict[str, Any]:
    return {"step": step, "steps": steps, PROGRESS_KEY: progress(step, steps), "goal": value}
