"""The trials of a sweep on Ray Tune: their start, the next one, the events of Tune's loop, and the interruption."""

import logging
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from vitray.cluster import session
from vitray.errors import OwnershipLost, one_line
from vitray.runs.shutdown import REPEAT_SECONDS
from vitray.sweeps.plan import DRIVER_CPUS, SweepPlan, trials_that_fit, with_absolute_addresses
from vitray.sweeps.population import param_space, restore_population
from vitray.sweeps.schedulers import build_scheduler
from vitray.sweeps.space import draw_point, name_of
from vitray.sweeps.trial import INTERRUPTED, TrialContext, TrialTrainable
from vitray.sweeps.trial_store import TrialEntry, TrialStore
from vitray.system import storage
from vitray.system.lease import Ownership
from vitray.system.mlflow_client import database_file, tracking_uri, user_dir
from vitray.system.storage import scratch_folder

# Tune's log lines about failed and interrupted trials, which the sweep's logger reports.
QUIET_LOGGERS = {"ray.tune.tune": logging.CRITICAL}
# Seconds between two looks at the nodes of the cluster.
NODES_INTERVAL = 5.0


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
    cpus = resources.cpus if resources.is_alone else DRIVER_CPUS
    trainable = tune.with_resources(tune.with_parameters(TrialTrainable, context=context), {"CPU": cpus})
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


# ---- the next trial --------------------------------------------------------------------------------------------------


class TrialSearcher(Searcher):
    """Suggests the stored trials that are not over, then the new points of a search that learns."""

    def __init__(self, plan: SweepPlan, store: TrialStore, count_places: Callable[[], int]) -> None:
        """Queue the stored trials; under a scheduler also the ended ones, which it replays after a restart.

        `count_places` returns the number of trials that fit the cluster as it is now.
        """
        super().__init__()
        self._plan, self._store, self._space = plan, store, plan.space
        self._count_places, self._places, self._counted = count_places, 0, -math.inf
        self._live: set[str] = set()
        self._started = time.monotonic()
        replays = plan.space.scheduler.traits.decides
        waiting = [name for name, record in store.records().items() if replays or not record.is_over]
        if replays:
            # In the order of their values each trial might be the best so far, and the scheduler would stop none.
            random.Random(0).shuffle(waiting)
        # Ended trials come first, so that running ones are compared with them.
        self._waiting = sorted(waiting, key=lambda name: not store.trials[name].record.is_over)

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its arguments to resume by itself, which is not used.
        return {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the name and the settings of the next trial, FINISHED, or None while no further trial fits."""
        if time.monotonic() - self._counted >= NODES_INTERVAL:
            self._places, self._counted = self._count_places(), time.monotonic()
        # The first one always waits for its nodes in its own process.
        if len(self._live) >= max(1, self._places):
            return None
        if (name := self._next()) is None:
            return Searcher.FINISHED
        self._live.add(trial_id)
        self._store.names[trial_id] = name
        return {"name": name} | self._store.settings(name)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:  # noqa: ARG002
        """Free the trial's place; the trial store has its result."""
        self._live.discard(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: the trials are on disk."""

    def _next(self) -> str | None:
        """Return the name of the next trial; None where no further one starts."""
        if self._waiting and (self._store.trials[self._waiting[0]].record.is_over or not self.is_spent()):
            return self._waiting.pop(0)
        if self._waiting or not self._space.search.traits.learns or len(self._store.trials) >= self._plan.trials:
            return None
        return None if self.is_spent() else self._draw()

    def is_spent(self) -> bool:
        """Whether the budget is spent or too many trials have failed."""
        return self._store.is_spent(self._space, self._plan.trials, self._started)

    def _draw(self) -> str | None:
        """Store a new point and return its name; None where no new point is left."""
        from vitray.sweeps.sampler import TRIES, ask  # imports Optuna

        drawn = [trial for trial in self._store.trials.values() if trial.entry.asked is not None]
        for attempt in range(TRIES):
            suggestion = ask(self._space, drawn, attempt)
            point = draw_point(self._space, suggestion.values)
            if point and (name := name_of(point, self._space)) not in self._store.trials:
                self._store.add(name, TrialEntry(with_absolute_addresses(point), suggestion.asked))
                return name
        return None


# ---- events ----------------------------------------------------------------------------------------------------------


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
