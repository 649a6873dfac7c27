"""A sweep seen from its driver: points, admission, one run of MLflow above the trials', Tune, the report."""

import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitray import storage
from vitray.cluster import session
from vitray.config import Run, load_run
from vitray.data.shards.manifest import Dataset
from vitray.errors import ConfigError, nearest
from vitray.runs.driver import await_nodes
from vitray.runs.plan import Plan, check_storage, difference, make_plan
from vitray.sweep.capacity import Admission, Needs, Node, admit, sentence
from vitray.sweep.space import BEFORE, Point, Space, check_space, name_of, run_of, stage_space

SWEEP, RUN = "sweep.json", "run.yaml"
# What every evaluation tells.
METRICS = ("val/top1", "val/top5", "val/loss")
# CPUs that the process of a trial reserves: it waits for its workers, and Tune wants something to be reserved.
DRIVER_CPUS = 0.01
# Settings of the trials that hold for what is trained before them too, where the space says nothing else.
SHARED = ("data.url", "data.train", "data.val", "data.development", "model.image_size", "tracking.experiment")
SHARED += ("compute.workers", "compute.device", "compute.cpus", "compute.gpus")


class Outcome(NamedTuple):
    """How a sweep ended."""

    name: str
    home: str
    trials: int
    finished: int
    stopped_early: int
    failed: int
    best: str | None
    best_goal: float | None
    report: str
    mlflow_run: str | None
    """None where the tracking server was away."""


class Planned(NamedTuple):
    """A sweep before anything is started."""

    base: Run
    """What all trials share."""
    points: dict[str, Point]
    """By name; of a search that learns, what it might draw."""
    trials: int
    plan: Plan | None
    """Of the first trial that can begin; None where all wait for what is trained before."""
    dataset: Dataset | None
    admission: Admission
    said: str


class Recipe(NamedTuple):
    """A run, and how a person says it."""

    run: Run
    words: Sequence[str]
    """The recipe's name, and settings laid over it."""


class Stage(NamedTuple):
    """A sweep before the sweep."""

    name: str
    recipe: Recipe
    space: Space

    @property
    def cases(self) -> list[str]:
        """The names of its runs."""
        return list(self.space.space[self.name].values or ())


def stages_of(base: Run, space: Space, recipes: Mapping[str, Recipe], home: str) -> list[Stage]:
    """What is trained before the trials of the sweep in this folder, each of it known to be a run."""
    base = _absolute(base)
    values = base.dotted()
    shared = {path: values[path] for path in SHARED} | {"tracking.register_as": None}
    points = check_space(space, base)[: space.budget.trials] if space.before else []
    stages = []
    for name in space.before:
        run, words = recipes[name]
        try:
            recipe = Recipe(run.replace(shared), [*words, *(f"{path}={json.dumps(shared[path])}" for path in shared)])
            stages.append(Stage(name, recipe, stage_space(space, name, points, home)))
            check_space(stages[-1].space, recipe.run)
        except ConfigError as error:
            raise ConfigError(f"before.{name}: {str(error).removeprefix('replace: ')}") from None
    return stages


def plan_sweep(base: Run, space: Space, nodes: Sequence[Node], home: str = "", ready: bool = True) -> Planned:
    """Which trials there are, and how many of them fit these nodes at a time; one message where that is none.

    Before it is ready, what its trials name in the sweep's folder has not been trained.
    """
    base = _absolute(base)
    points = {name_of(point, space): point for point in check_space(space, base)[: space.budget.trials]}
    wanted = [number for number in (getattr(space.search, "trials", None), space.budget.trials) if number]
    trials = min(wanted) if space.learns else len(points)
    needs = needs_of(base, nodes)
    admission = admit(nodes, needs, trials)
    if not admission.concurrent:
        raise ConfigError(f"compute.workers: {admission.why}")
    reserved = {} if needs.gpus else {"compute.cpus": needs.cpus}
    base = base.replace({"compute.workers": needs.workers, "tracking.register_as": None} | reserved)
    runs = [run_of(base, point, home) for point in points.values()]
    _check_goal(runs, space)
    free = [run for run, point in zip(runs, points.values(), strict=True) if ready or not point.before]
    _, plan, dataset, *_ = make_plan(free[0]) if free else (None, None, None)
    return Planned(
        base=base,
        points=points,
        trials=trials,
        plan=plan,
        dataset=dataset,
        admission=admission,
        said=sentence(admission, trials, nodes),
    )


def _check_goal(runs: Sequence[Run], space: Space) -> None:
    """Refuse a goal that no evaluation tells, and a scheduler that would wait for what comes later."""
    metric = space.goal.metric
    for run in runs:
        told = METRICS if run.model.num_classes is not None else ("val/loss",)
        known = told + tuple(f"{name}_ema" for name in told if run.optim.ema)
        if metric not in known:
            raise ConfigError(f"goal.metric: got {metric!r}, wanted one of {', '.join(known)}{nearest(metric, known)}")
        if run.data.evaluated is None:
            raise ConfigError("data.val: got null, wanted a split whose scores trials are compared by")
        if space.scheduler.kind != "none" and run.evaluate.where != "workers":
            where, kind = run.evaluate.where, space.scheduler.kind
            raise ConfigError(
                f"evaluate.where: got {where}, wanted workers: scheduler {kind} is asked after each score"
            )


def needs_of(base: Run, nodes: Sequence[Node]) -> Needs:
    """What a trial of this run takes; `auto` is one worker a trial, so that as many run at a time as may be."""
    workers = (base.compute.worker_range or (1, 1))[1]
    has_gpus = base.compute.device != "cpu" and any(node.gpus for node in nodes)
    gpus = base.compute.gpus if has_gpus or base.compute.device == "gpu" else 0.0
    data_cpus = 1.0 + (base.evaluate.where != "workers" and bool(base.data.evaluated))
    # A whole CPU for each worker where there are so many, and less where the cluster is small.
    left = sum(node.cpus for node in nodes) - data_cpus - DRIVER_CPUS
    cpus = base.compute.cpus or (1.0 if gpus else max(0.01, min(1.0, int(100 * left / workers) / 100)))
    return Needs(workers=workers, cpus=cpus, gpus=gpus, data_cpus=data_cpus, driver_cpus=DRIVER_CPUS)


def _absolute(base: Run) -> Run:
    """With addresses that read alike in every folder: a trial's process runs in one of its own."""
    from vitray.tracking.mlflow_client import pin_uri

    changes: dict[str, Any] = {}
    if base.data.url is not None:
        changes["data.url"] = storage.absolute(base.data.url)
    if base.task.kind == "finetune":
        changes["task.weights"] = pin_uri(base.task.weights)
    return base.replace(changes) if changes else base


def dry_run(base: Run, space: Space, before: Mapping[str, Recipe]) -> dict[str, Any]:
    """The plan alone, on the cluster at RAY_ADDRESS, or on this machine, where no Ray is started for it."""
    stages = stages_of(base, space, before, home="")
    if "RAY_ADDRESS" in os.environ:
        with session.running():
            planned = plan_sweep(base, space, nodes_here(), ready=False)
    else:
        planned = plan_sweep(base, space, [Node(cpus=session.cpus_here(), gpus=gpus_here())], ready=False)
    known = {} if space.learns else planned.points
    said = [f"  {name}" for name in known] or [f"  points as {space.search.kind} draws them, each from those before it"]
    first = [f"  before: {stage.name} {', '.join(stage.cases)}" for stage in stages]
    print("\n".join([f"  {planned.said}", *first, "", *said]), file=sys.stderr)
    return {
        "before": {stage.name: stage.cases for stage in stages},
        "trials": planned.trials,
        "concurrent": min(planned.admission.concurrent, planned.trials),
        "waves": planned.admission.waves(planned.trials),
        "points": [dict(point.settings) for point in known.values()],
    }


def gpus_here() -> int:
    """GPUs of this machine, as Ray will find them."""
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    return NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()


def nodes_here() -> list[Node]:
    """The nodes of the running Ray."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(cpus=found.get("CPU", 0.0), gpus=found.get("GPU", 0.0)) for found in alive]


def sweep(
    recipe: Recipe, space: Space, name: str, out: str, command: str, before: Mapping[str, Recipe] | None = None
) -> Outcome:
    """Run every trial that is not over, after what is trained before them, and keep the report true while they run.

    `command` repeats the sweep; `before` has the recipe of each stage that the space names.
    """
    base = recipe.run
    home = storage.join(storage.absolute(out), name)
    check_storage(home)
    stages = stages_of(base, space, before or {}, home)
    with session.running():
        # What is there once one trial has room counts for all: how far a cluster may grow, Ray does not tell.
        await_nodes(base if base.compute.worker_range else base.replace({"compute.workers": 1}))
        if stages:  # what does not fit is said before hours of training
            plan_sweep(base, space, nodes_here(), home, ready=False)
        for stage in stages:
            sweep(stage.recipe, stage.space, storage.join(name, BEFORE, stage.name), out, command)
        planned = plan_sweep(base, space, nodes_here(), home)
        uid = open_sweep(home, name, base, space)
        print(f"\n  {name}: {planned.said}\n", file=sys.stderr, flush=True)
        from vitray.sweep.sweep_logger import Story  # torch, MLflow and Tune take seconds
        from vitray.sweep.trial_store import Ledger

        ledger = Ledger(home, planned.base, planned.points, space.learns)
        with Story(planned, ledger, recipe, space, name, uid, command) as story:
            if any(not record.is_over for record in ledger.records().values()) or len(ledger.entries) < planned.trials:
                _tune(planned, ledger, space, uid, story)
            return story.finish()


def _stored(text: str) -> Run:
    with tempfile.TemporaryDirectory(prefix="vitray-") as folder:
        path = Path(folder) / RUN
        path.write_text(text)
        return load_run(path)


def open_sweep(home: str, name: str, base: Run, space: Space) -> str:
    """The identity of the sweep in a folder: that of an interrupted one of the same recipe, or a new one."""
    where = storage.join(home, SWEEP)
    content = {"base": base.to_yaml(), "space": space.to_yaml()}
    if storage.exists(where):
        known = json.loads(storage.read_bytes(where))
        if known["base"] != content["base"]:
            differing = difference(_stored(known["base"]), base)
            raise ConfigError(f"{name}: a sweep of this name differs in {'; '.join(differing)}; choose another --name")
        # The space may have grown, or shrunk: a trial is known by its name, and its settings are compared when it runs.
        return known["uid"]
    uid = uuid.uuid4().hex
    storage.write_bytes(where, json.dumps(content | {"uid": uid, "began": time.time()}).encode())
    return uid


def _tune(planned: Planned, ledger: Any, space: Space, uid: str, story: Any) -> None:
    from ray import tune

    from vitray.sweep.schedulers import scheduler_of
    from vitray.sweep.searcher import Handing, interruptible
    from vitray.sweep.trial import Context, Trial
    from vitray.tracking.mlflow_client import tracking_uri

    for name in ("ray.tune.execution.tune_controller", "ray.tune.tune"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # of a trial that fails, the story tells
    environment = {"MLFLOW_TRACKING_URI": tracking_uri()}
    environment |= {name: os.environ[name] for name in ("VITRAY_HOME",) if name in os.environ}
    asks = space.scheduler.kind != "none"
    at_a_time = min(planned.admission.concurrent, planned.trials)
    metric = space.goal.metric
    assert planned.plan is not None, "planned before it was ready"
    assert planned.dataset is not None, "planned before it was ready"
    context = Context(planned.base, planned.dataset, ledger.home, uid, metric, asks, at_a_time, environment)
    trial = tune.with_resources(tune.with_parameters(Trial, context=context), {"CPU": DRIVER_CPUS})
    with (
        tempfile.TemporaryDirectory(prefix="vitray-") as aside,  # of what Tune keeps nothing is used
        interruptible(ledger.home) as interruption,
    ):
        tuner = tune.Tuner(
            trial,
            tune_config=tune.TuneConfig(
                metric="goal",
                mode=space.goal.mode,
                search_alg=Handing(planned, ledger, space, asks),
                num_samples=-1,
                scheduler=scheduler_of(planned.plan, space),
                max_concurrent_trials=planned.admission.concurrent,
                reuse_actors=True,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(
                name=uid,
                storage_path=aside,
                verbose=0,
                stop=story.listener(interruption),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # a run keeps its own
            ),
        )
        tuner.fit()
    if interruption.signal:
        session.give_back(trial.__qualname__)  # as Ray lists it
        raise KeyboardInterrupt if interruption.signal == signal.SIGINT else SystemExit(128 + interruption.signal)
