"""`sweep`: stages, trials on Ray Tune, MLflow and the report, from the driver's side."""

import json
import sys
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vitray.cluster import session
from vitray.config import Run, load_run
from vitray.errors import ConfigError
from vitray.runs.placement import await_nodes
from vitray.runs.resolve import check_storage
from vitray.runs.run_dir import difference
from vitray.sweeps.plan import SWEEP_META, Recipe, SweepPlan, cluster_nodes, plan_stages, plan_sweep
from vitray.sweeps.space import STAGES_DIR, Space
from vitray.system import storage
from vitray.system.lease import own_folder
from vitray.system.storage import scratch_folder

if TYPE_CHECKING:
    from vitray.sweeps.sweep_logger import SweepLogger, SweepOutcome


def sweep(
    recipe: Recipe, space: Space, name: str, out: str, command: str, stage_recipes: Mapping[str, Recipe] | None = None
) -> "SweepOutcome":
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
        with begun(plan, recipe, name, command, sweep_dir, ownership.id) as logger:
            store = logger.store
            if len(store.trials) < plan.trials or not all(record.is_over for record in store.records().values()):
                from vitray.sweeps.tuning import run_trials  # imports Tune, which takes seconds

                # Once for all trials, whose worker groups start in this job.
                with session.abandoned_groups_removed(session.START_CLEANUP_INTERVAL, own_starts=True):
                    run_trials(plan, store, logger.uid, ownership)
            return logger.finish()


def begun(
    plan: SweepPlan, recipe: Recipe, name: str, command: str, sweep_dir: str, owner: str, *, follows: bool = True
) -> "SweepLogger":
    """Write that the sweep of a plan begins or goes on, print its plan if it is followed, and return its logger.

    This process has to own the folder; `follows`: whether it shows what other processes train.
    """
    uid, starts, began = begin_sweep(sweep_dir, name, recipe.run, plan.space)
    if follows:
        print(f"\n  {name}: {plan.summary}\n", file=sys.stderr, flush=True)
    from vitray.sweeps.sweep_logger import SweepLogger  # imports torch and MLflow, which takes seconds
    from vitray.sweeps.trial_store import TrialStore

    store = TrialStore(sweep_dir, plan.base, plan.points, plan.space.search.traits.learns, owner)
    return SweepLogger(
        plan, store, recipe, name=name, command=command, uid=uid, starts=starts, began=began, follows=follows
    )


def retry_failed(space: Space, name: str, out: str) -> None:
    """Make the failed trials of an ended sweep and of its stages wait for another start."""
    from vitray.sweeps.trial_store import reset_failed

    if space.scheduler.traits.is_population:
        raise ConfigError("--retry-failed: got a population, expected a sweep whose trials do not continue each other")
    sweep_dir = storage.join(storage.absolute(out), name)
    if not storage.exists(storage.join(sweep_dir, SWEEP_META)):
        raise ConfigError(f"--retry-failed: no sweep {name} in {out}; expected --name of an earlier one")
    with own_folder(sweep_dir, name):
        for each in (*(storage.join(name, STAGES_DIR, stage) for stage in space.before), name):
            failed = reset_failed(storage.join(storage.absolute(out), each))
            print(f"  {each}: {', '.join(failed) or 'no trial'} to be tried again", file=sys.stderr, flush=True)


def begin_sweep(sweep_dir: str, name: str, base: Run, space: Space) -> tuple[str, int, float]:
    """Return the uid of the sweep in a folder, the number of its starts with this one, and the time of the first.

    This process has to own the folder.
    """
    path = storage.join(sweep_dir, SWEEP_META)
    meta: dict[str, Any]
    if storage.exists(path):
        meta = storage.read_json(path)
        with scratch_folder() as folder:
            (folder / "run.yaml").write_text(meta["base"])
            earlier = load_run(folder / "run.yaml")
        if changes := difference(earlier, base):
            raise ConfigError(f"{name}: a sweep of this name differs in {'; '.join(changes)}; choose another --name")
        # The space may have grown or shrunk: the trial store compares the settings of each trial.
        meta["starts"] += 1
    else:
        meta = {"base": base.to_yaml(), "space": space.to_yaml(), "uid": uuid.uuid4().hex}
        meta |= {"starts": 1, "began": time.time()}
    storage.write_bytes(path, json.dumps(meta).encode())
    return meta["uid"], meta["starts"], meta["began"]
