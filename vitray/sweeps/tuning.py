"""The trials of a sweep on Ray Tune: their start, the events of Tune's loop, and the interruption by a signal."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from ray import tune
from ray.tune.experiment import Trial

from vitray.cluster import session
from vitray.errors import OwnershipLost, one_line
from vitray.runs.shutdown import REPEAT_SECONDS
from vitray.sweeps.plan import DRIVER_CPUS, SweepPlan, trials_that_fit
from vitray.sweeps.population import param_space, restore_population
from vitray.sweeps.schedulers import build_scheduler
from vitray.sweeps.searcher import TrialSearcher
from vitray.sweeps.trial import INTERRUPTED, TrialContext, TrialTrainable
from vitray.sweeps.trial_store import TrialStore
from vitray.system import storage
from vitray.system.lease import Ownership
from vitray.system.mlflow_client import database_file, tracking_uri, user_dir
from vitray.system.storage import scratch_folder

# Tune's log lines about failed and interrupted trials, which the sweep's logger reports.
QUIET_LOGGERS = {"ray.tune.tune": logging.CRITICAL}


def run_trials(plan: SweepPlan, store: TrialStore, parent_uid: str, ownership: Ownership) -> None:
    """Run the trials that are not over on Ray Tune, below the sweep's run in MLflow."""
    for module, level in QUIET_LOGGERS.items():
        logging.getLogger(module).setLevel(level)
    assert plan.first is not None, "planned before its stages were ready"
    space, resources = plan.space, plan.capacity.resources
    context = TrialContext(
        base=plan.base,
        dataset=plan.first.dataset,
        sweep_dir=store.sweep_dir,
        owner=ownership.id,
        parent_uid=parent_uid,
        space=space,
        trials=plan.trials,
        resources=resources,
        has_cpus=plan.has_cpus,
        environment=trial_environment(),
    )
    trainable = tune.with_resources(tune.with_parameters(TrialTrainable, context=context), {"CPU": DRIVER_CPUS})
    searcher = None
    if is_population := space.scheduler.traits.is_population:
        restore_population(store, plan.trials)
    else:  # Tune's scheduler of populations accepts no searcher
        searcher = TrialSearcher(plan, store, lambda: trials_that_fit(plan.base, resources, plan.trials))
    with (
        _tune_folder(store.sweep_dir, is_shared=is_population) as (files, folder),
        Interruption(store.sweep_dir, ownership) as interruption,
    ):
        tuner = tune.Tuner(
            trainable,
            param_space=None if searcher else param_space(store),
            tune_config=tune.TuneConfig(
                metric="goal",
                mode=space.goal.mode,
                search_alg=searcher,
                num_samples=-1 if searcher else 1,
                scheduler=build_scheduler(plan.first.length, space, store),
                max_concurrent_trials=plan.trials,  # a searcher follows the cluster
                reuse_actors=True,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(
                name=parent_uid,
                storage_filesystem=files,
                storage_path=folder,
                verbose=0,
                stop=interruption,
                callbacks=[TrialListener(store)],
                # Runs write their own checkpoints. Those of a population are copies, all of which stay: Tune would
                # remove one that a trial is about to continue from.
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                # A trial whose process has died starts again, from the last checkpoint of its run.
                failure_config=tune.FailureConfig(max_failures=plan.base.compute.max_failures),
            ),
        )
        results = tuner.fit()
        ownership.check()
        store.finish_points()
    if interruption.signal:
        session.release_resources(trainable.__qualname__)  # the actor's class name in Ray
        raise interruption.error
    store.close()
    for result in results:
        if result.error:
            name = store.names[Path(result.path).name]  # a trial without a result has no config here
            store.write_end(name, "failed", f"its process failed, at last with {one_line(result.error)}")


@contextmanager
def _tune_folder(sweep_dir: str, *, is_shared: bool) -> Iterator[tuple[Any, str]]:
    """Yield file system and path of Tune's folder: a part of the sweep's if trials share checkpoints, else local."""
    if is_shared:
        url = storage.join(sweep_dir, "population")
        storage.remove(url)
        yield storage.filesystem(url)
        storage.remove(url)
    else:
        with scratch_folder() as scratch:
            yield storage.filesystem(str(scratch))


def trial_environment() -> dict[str, str]:
    """Return the absolute addresses of MLflow and of the user's files: a trial has its own working folder."""
    file = database_file(uri := tracking_uri())
    home = {"VITRAY_HOME": str(user_dir().absolute())} if "VITRAY_HOME" in os.environ else {}
    return {"MLFLOW_TRACKING_URI": f"sqlite:///{file}" if file else uri} | home


class TrialListener(tune.Callback):
    """Keeps the trial store up to date, by the events of Tune's loop.

    Nothing here waits: Tune handles one event at a time, and a trial waits for its next one.
    """

    def __init__(self, store: TrialStore) -> None:
        self._store = store

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its arguments to resume by itself, which is not used.
        return {}

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        """Record the start of a trial, and the end of the one that it takes the place of."""
        name: str = trial.config["name"]
        earlier = self._store.names.get(trial.trial_id)
        if earlier is not None and earlier != name:
            self._store.replace(name, earlier)
        self._store.names[trial.trial_id] = name
        self._store.start(name)

    def on_trial_result(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        iteration: int,  # noqa: ARG002
        trials: list[Trial],  # noqa: ARG002
        trial: Trial,
        result: dict[str, Any],
    ) -> None:
        """Record a score or the end of a trial."""
        self._store.update(trial.config["name"], result)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        """Record that Tune has stopped a trial, unless it has ended by itself."""
        self._store.end(trial.config["name"], "stopped early")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        """Record that the process of a trial has failed for the last time."""
        self._store.end(trial.config["name"], "failed", "its process failed")


# ---- interruption ----------------------------------------------------------------------------------------------------


class Interruption(tune.Stopper):
    """Lets the first Ctrl-C or SIGTERM end the trials resumably; a second one ends the driver at once.

    A marker file tells the trials. The sweep also stops if another process has taken over its folder.
    """

    def __init__(self, sweep_dir: str, ownership: Ownership) -> None:
        self.signal: int | None = None
        self.marker = storage.join(sweep_dir, INTERRUPTED)
        self._ownership = ownership
        self._signaled, self._is_marked = float("-inf"), False
        self._handlers: dict[int, Any] = {}

    @property
    def error(self) -> BaseException:
        """The exception that the interrupted sweep ends with."""
        return KeyboardInterrupt() if self.signal == signal.SIGINT else SystemExit(128 + (self.signal or 0))

    def __enter__(self) -> Self:
        storage.remove(self.marker)
        os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
        self._handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._restore_handlers()
        if kind is None or not issubclass(kind, OwnershipLost):  # then the marker may be the new owner's
            storage.remove(self.marker)

    def _on_signal(self, number: int, _frame: Any) -> None:
        now = time.monotonic()
        if now - self._signaled < REPEAT_SECONDS:
            return
        if self.signal is not None:
            self._restore_handlers()
            raise self.error
        self.signal, self._signaled = number, now

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def __call__(self, _trial_id: str, _result: dict[str, Any]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return False

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def stop_all(self) -> bool:
        """Whether the sweep stops now; of an interrupted one, write the marker."""
        if self.signal and not self._is_marked:
            storage.write_bytes(self.marker, b"the sweep was interrupted\n")
            self._is_marked = True
        return self.signal is not None or self._ownership.is_lost
