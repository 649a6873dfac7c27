"""`sweep`: stages, trials on Ray Tune, MLflow and the report, from the driver's side."""

import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitray import storage
from vitray.cluster import session
from vitray.config import Run, load_run
from vitray.errors import ConfigError, one_line
from vitray.runs.placement import await_nodes
from vitray.runs.resolve import check_storage, difference
from vitray.storage import scratch_folder
from vitray.sweep.plan import (
    DRIVER_CPUS,
    Recipe,
    SweepPlan,
    cluster_nodes,
    plan_stages,
    plan_sweep,
    trials_that_fit,
)
from vitray.sweep.space import STAGES_DIR, Space
from vitray.sweep.sweep_info import SweepInfo, SweepOutcome
from vitray.system.lease import Ownership, own_folder

if TYPE_CHECKING:
    from vitray.sweep.trial_store import TrialStore

SWEEP_META = "sweep.json"
# Tune's log lines about failed and interrupted trials, which the sweep's logger reports.
QUIET_LOGGERS = {"ray.tune.tune": logging.CRITICAL}


def sweep(
    recipe: Recipe, space: Space, name: str, out: str, command: str, stage_recipes: Mapping[str, Recipe] | None = None
) -> SweepOutcome:
    """Run the stages and every trial that is not over, update the report meanwhile, and return the outcome.

    `command` repeats the sweep; `stage_recipes` has the recipe of each stage of the space.
    """
    base = recipe.run
    storage.check_name(name, "name")
    sweep_dir = storage.join(storage.absolute(out), name)
    check_storage(sweep_dir)
    stages = plan_stages(base, space, stage_recipes or {}, sweep_dir)
    with own_folder(sweep_dir, name) as ownership, session.ray_session():
        # Wait only for the nodes of one trial: Ray does not report how far a cluster can grow.
        await_nodes(base if base.compute.worker_range else base.replace({"compute.workers": 1}))
        if stages:  # before the stages train for hours, refuse trials that do not fit
            plan_sweep(base, space, cluster_nodes(), sweep_dir, ready=False)
        for stage in stages:
            sweep(stage.recipe, stage.space, storage.join(name, STAGES_DIR, stage.name), out, command)
        plan = plan_sweep(base, space, cluster_nodes(), sweep_dir)
        uid, starts, began = open_sweep(sweep_dir, name, base, space)
        print(f"\n  {name}: {plan.summary}\n", file=sys.stderr, flush=True)
        from vitray.sweep.sweep_logger import SweepLogger  # imports torch, MLflow and Tune, which takes seconds
        from vitray.sweep.trial_store import TrialStore

        store = TrialStore(sweep_dir, plan.base, plan.points, space.search.traits.learns, ownership.id)
        with SweepLogger(plan, store, SweepInfo(name, recipe, space, command, uid, starts, began)) as logger:
            if any(not record.is_over for record in store.records().values()) or len(store.entries) < plan.trials:
                _tune(plan, store, logger.info, ownership)
            return logger.finish()


def retry_failed(space: Space, name: str, out: str) -> None:
    """Make the failed trials of an ended sweep and of its stages wait for another start."""
    from vitray.sweep.trial_store import reset_failed

    if space.scheduler.traits.is_population:
        raise ConfigError("--retry-failed: got a population, expected a sweep whose trials do not continue each other")
    sweep_dir = storage.join(storage.absolute(out), name)
    if not storage.exists(storage.join(sweep_dir, SWEEP_META)):
        raise ConfigError(f"--retry-failed: no sweep {name} in {out}; expected --name of an earlier one")
    with own_folder(sweep_dir, name):
        for each in (*(storage.join(name, STAGES_DIR, stage) for stage in space.before), name):
            failed = reset_failed(storage.join(storage.absolute(out), each))
            print(f"  {each}: {', '.join(failed) or 'no trial'} to be tried again", file=sys.stderr, flush=True)


def open_sweep(sweep_dir: str, name: str, base: Run, space: Space) -> tuple[str, int, float]:
    """Return the uid of the sweep in a folder, the number of its starts with this one, and the time of the first.

    This process has to own the folder.
    """
    path = storage.join(sweep_dir, SWEEP_META)
    meta: dict[str, Any]
    if storage.exists(path):
        meta = json.loads(storage.read_bytes(path))
        if changes := difference(_run_from(meta["base"]), base):
            raise ConfigError(f"{name}: a sweep of this name differs in {'; '.join(changes)}; choose another --name")
        # The space may have grown or shrunk: the trial store compares the settings of each trial.
        meta["starts"] += 1
    else:
        meta = {"base": base.to_yaml(), "space": space.to_yaml(), "uid": uuid.uuid4().hex}
        meta |= {"starts": 1, "began": time.time()}
    storage.write_bytes(path, json.dumps(meta).encode())
    return meta["uid"], meta["starts"], meta["began"]


def _run_from(text: str) -> Run:
    with scratch_folder() as folder:
        path = folder / "run.yaml"
        path.write_text(text)
        return load_run(path)


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
    from vitray.tracking.mlflow_client import database_file, tracking_uri, user_dir

    file = database_file(uri := tracking_uri())
    home = {"VITRAY_HOME": str(user_dir().absolute())} if "VITRAY_HOME" in os.environ else {}
    return {"MLFLOW_TRACKING_URI": f"sqlite:///{file}" if file else uri} | home


def _tune(plan: SweepPlan, store: "TrialStore", info: SweepInfo, ownership: Ownership) -> None:
    """Run the trials on Ray Tune."""
    from ray import tune

    from vitray.sweep.interruption import interruptible
    from vitray.sweep.listener import InterruptionStopper, TrialListener
    from vitray.sweep.population import param_space, restore_population
    from vitray.sweep.schedulers import build_scheduler
    from vitray.sweep.searcher import TrialSearcher
    from vitray.sweep.trial import TrialContext, TrialTrainable

    for module, level in QUIET_LOGGERS.items():
        logging.getLogger(module).setLevel(level)
    assert plan.first is not None, "planned before its stages were ready"
    space, resources = info.space, plan.capacity.resources
    context = TrialContext(
        base=plan.base,
        dataset=plan.first.dataset,
        sweep_dir=store.sweep_dir,
        owner=ownership.id,
        parent_uid=info.uid,
        space=space,
        trials=plan.trials,
        resources=resources,
        has_cpus=plan.has_cpus,
        environment=trial_environment(),
    )
    trainable = tune.with_resources(tune.with_parameters(TrialTrainable, context=context), {"CPU": DRIVER_CPUS})
    listener, searcher = TrialListener(store), None
    if is_population := space.scheduler.traits.is_population:
        restore_population(store, plan.trials)
    else:  # Tune's scheduler of populations accepts no searcher
        searcher = TrialSearcher(plan, store, space, lambda: trials_that_fit(plan.base, resources, plan.trials))
    with (
        _tune_folder(store.sweep_dir, is_shared=is_population) as (files, folder),
        interruptible(store.sweep_dir) as interruption,
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
                name=info.uid,
                storage_filesystem=files,
                storage_path=folder,
                verbose=0,
                stop=InterruptionStopper(interruption, ownership),
                callbacks=[listener],
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
    if not interruption.signal:
        store.close()
        for result in results:
            if result.error:
                names = searcher.names if searcher else listener.names
                name = names[Path(result.path).name]  # a trial without a result has no config here
                store.write_end(name, "failed", f"its process failed, at last with {one_line(result.error)}")
    if interruption.signal:
        session.release_resources(trainable.__qualname__)  # the actor's class name in Ray
        raise interruption.error
