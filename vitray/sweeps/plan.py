"""The plan of a sweep, checked before anything starts: stages, points, and the trials that fit the cluster."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitray.cluster import session
from vitray.config import Run
from vitray.errors import ConfigError, nearest
from vitray.runs.placement import evaluation_gpus
from vitray.runs.resolve import resolve, resolve_schedule
from vitray.sweeps.capacity import Capacity, Node, TrialResources, describe_capacity, fit_trials
from vitray.sweeps.space import (
    Space,
    SweepPoint,
    check_set_once,
    check_space,
    name_of,
    placeholders,
    run_of,
    stage_models,
    stage_space,
)
from vitray.system import storage
from vitray.training.resolved import ResolvedRun

# Files of the folder of a sweep.
SWEEP_META, REPORT = "sweep.json", "report/index.html"
# Metrics of every evaluation, by how many labels an image has.
METRICS = {"one": ("val/top1", "val/top5", "val/loss", "val/mean_per_class"), "several": ("val/map", "val/loss")}
# CPUs of a trial's driver process, which only waits for its workers: Tune requires some.
DRIVER_CPUS = 0.01
# Settings of the trials that also hold for the stages before them, unless the space sets them.
SHARED_SETTINGS = ("data.url", "data.train", "data.val", "data.holdout", "model.image_size", "tracking.experiment")
SHARED_SETTINGS += ("compute.workers", "compute.device", "compute.cpus", "compute.gpus")
# Settings that are addresses: of a dataset, or of a model folder.
ADDRESSES = ("data.url", "task.weights", "task.distill.teacher", "task.objective.tokenizer")


class SweepPlan(NamedTuple):
    """A sweep before its start."""

    base: Run
    """The settings that all trials share."""
    space: Space
    has_cpus: bool
    """Whether compute.cpus is the user's, not this plan's."""
    points: dict[str, SweepPoint]
    """By name; only examples for a search that learns."""
    trials: int
    first: ResolvedRun | None
    """The first trial that can start; None where all wait for stages."""
    capacity: Capacity
    summary: str


class Recipe(NamedTuple):
    """A run, with the arguments that spell it on the command line."""

    run: Run
    args: Sequence[str]
    """The recipe's name and its overrides."""


class Stage(NamedTuple):
    """A sweep before the sweep: it trains the initial weights of trials."""

    name: str
    recipe: Recipe
    space: Space

    @property
    def cases(self) -> list[str]:
        """The names of its runs."""
        return list(self.space.space[self.name].values or ())


def plan_stages(base: Run, space: Space, recipes: Mapping[str, Recipe], sweep_dir: str) -> list[Stage]:
    """Return the stages of the sweep in a folder, each checked to be a sweep of valid runs."""
    from vitray.weights.addresses import check_model_name

    check_model_name(base.tracking.register_as)
    base = _with_absolute_urls(base)
    values = base.dotted()
    if base.tracking.promote:
        wanted = "expected null in a sweep; `vitray promote` compares its best model afterwards"
        raise ConfigError(f"tracking.promote: got a rule for {base.tracking.promote.alias}, {wanted}")
    shared = {path: values[path] for path in SHARED_SETTINGS} | {"tracking.promote": None, "tracking.register_as": None}
    points = check_space(space, base)[: space.budget.trials] if space.before else []
    stages = []
    for name in space.before:
        run, args = recipes[name]
        try:
            check_set_once(args[1:], space.before[name].settings, "the space")
            check_set_once(args[1:], shared, "the sweep")
            recipe = Recipe(run.replace(shared), [*args, *(f"{path}={json.dumps(shared[path])}" for path in shared)])
            stages.append(Stage(name, recipe, stage_space(space, name, points, sweep_dir)))
            check_space(stages[-1].space, recipe.run)
        except ConfigError as error:
            raise ConfigError(f"before.{name}: {str(error).removeprefix('replace: ')}") from None
    return stages


def plan_sweep(base: Run, space: Space, nodes: Sequence[Node], sweep_dir: str = "", ready: bool = True) -> SweepPlan:
    """Return the trials of a sweep and how many of them fit these nodes at a time; refuse a sweep of which none fits.

    `ready` is False before the stages are trained: their model folders do not exist yet.
    """
    base, has_cpus = _with_absolute_urls(base), base.compute.cpus is not None
    checked = check_space(space, base)[: space.budget.trials]
    points = {name_of(point, space): with_absolute_addresses(point) for point in checked}
    limits = [number for number in (space.search.trials, space.budget.trials) if number]
    trials = min(limits) if space.search.traits.learns else len(points)
    resources = trial_resources(base, nodes)
    capacity = fit_trials(nodes_of_workers(base, nodes), resources, trials)
    if not capacity.concurrent:
        besides = ", besides the one for evaluations" if evaluation_gpus(base) else ""
        raise ConfigError(f"compute.workers: {capacity.limit}{besides}")
    reserved = {} if resources.gpus or resources.is_alone else {"compute.cpus": resources.cpus}
    if space.scheduler.traits.is_population and capacity.concurrent < trials:
        wanted = "whose trials run at the same time; give them fewer CPUs or workers, or the cluster more"
        raise ConfigError(f"scheduler: got a population of {trials}, expected at most {capacity.concurrent}, {wanted}")
    base = base.replace({"compute.workers": resources.workers, "tracking.register_as": None} | reserved)
    runs = [run_of(base, point, sweep_dir) for point in points.values()]
    for run in runs:
        _check_goal(run, space)
    missing = [_stages_without_model(point, sweep_dir) if ready else list(point.before) for point in points.values()]
    startable = next((run for run, stages in zip(runs, missing, strict=True) if not stages), None)
    if ready and startable is None:
        failed = ", ".join(dict.fromkeys(f"before.{stage}" for stages in missing for stage in stages))
        raise ConfigError(f"{failed}: every trial starts from a run that failed; --retry-failed starts it again")
    first = resolve(startable) if startable else None
    if first:
        if first.dataset.labels == "several" and "metric" not in space.goal.model_fields_set:
            space = space.model_copy(update={"goal": space.goal.model_copy(update={"metric": "val/map"})})
        _check_metric(first.run, space, first.dataset.labels)
        for name, run in zip(points, runs, strict=True):
            if _images_of(run) == _images_of(first.run):  # a trial on other images is checked when it starts
                try:
                    resolve_schedule(run, first.images)
                except ConfigError as error:
                    raise ConfigError(f"the point {name}: {error}") from None
    return SweepPlan(
        base=base,
        space=space,
        has_cpus=has_cpus,
        points=points,
        trials=trials,
        first=first,
        capacity=capacity,
        summary=describe_capacity(capacity, trials, nodes),
    )


def _stages_without_model(point: SweepPoint, sweep_dir: str) -> list[str]:
    folders = stage_models(point.before, sweep_dir)
    return [stage for stage, folder in folders.items() if not storage.exists(storage.join(folder, "run.yaml"))]


def _images_of(run: Run) -> tuple[object, ...]:
    return run.data.url, run.data.train, run.data.held_out


def _check_metric(run: Run, space: Space, *labels: str) -> None:
    """Refuse a goal that no evaluation of images with so many labels measures."""
    metric = space.goal.metric
    measured = ("val/loss",)
    if run.model.num_classes is not None:
        measured = tuple(dict.fromkeys(name for each in labels for name in METRICS[each]))
    known = measured + tuple(f"{name}_ema" for name in measured if run.optim.ema)
    if metric not in known:
        several = ", as an image has several labels" if labels == ("several",) else ""
        raise ConfigError(
            f"goal.metric: got {metric!r}, expected one of {', '.join(known)}{several}{nearest(metric, known)}"
        )


def _check_goal(run: Run, space: Space) -> None:
    """Refuse a goal that no evaluation measures, and a scheduler whose scores would come too late."""
    _check_metric(run, space, *METRICS)  # the dataset decides which
    if run.data.evaluated is None:
        raise ConfigError("data.val: got null, expected a split to score the trials on")
    saves_evaluated = run.checkpoint.is_timed or run.checkpoint.every == run.evaluate.every
    if space.scheduler.traits.is_population and not saves_evaluated:
        raise ConfigError(
            f"checkpoint.every: got {run.checkpoint.every}, expected minutes, or {run.evaluate.every} as in"
            " evaluate.every: a trial of a population continues from the checkpoint of an evaluation"
        )
    if space.scheduler.traits.decides and run.evaluate.where != "workers":
        raise ConfigError(
            f"evaluate.where: got {run.evaluate.where}, expected workers: scheduler {space.scheduler.kind} decides"
            " after each score"
        )


def trial_resources(base: Run, nodes: Sequence[Node]) -> TrialResources:
    """Return the resources of one trial; `auto` is one worker, so that as many trials as possible run at a time."""
    workers = (base.compute.worker_range or (1, 1))[1]
    has_gpus = base.compute.device != "cpu" and any(node.gpus for node in nodes)
    gpus = base.compute.gpus if has_gpus or base.compute.device == "gpu" else 0.0
    if gpus and base.evaluate.where == "gpu" and base.data.evaluated and not evaluation_gpus(base):
        gpus = round(gpus + base.evaluate.gpus, 4)  # worker and evaluation share a GPU
    data_cpus = 1.0 + base.evaluate.has_prober
    if workers == 1 and not gpus and base.data.cache == "none" and base.evaluate.where != "gpu":
        # Its process trains by itself: a worker would start for longer than a short trial trains.
        largest = max((node.cpus for node in nodes), default=0.0) or 1.0
        cpus = base.compute.cpus + data_cpus if base.compute.cpus else min(1.0 + data_cpus, largest)
        return TrialResources(workers, cpus, gpus=0.0, data_cpus=0.0, driver_cpus=0.0, is_alone=True)
    data_cpus += base.evaluate.where != "workers" and bool(base.data.evaluated)
    # A whole CPU per worker if there are enough, less on a small cluster.
    left = sum(node.cpus for node in nodes) - data_cpus - DRIVER_CPUS
    cpus = base.compute.cpus or (1.0 if gpus else max(0.01, min(1.0, int(100 * left / workers) / 100)))
    return TrialResources(workers=workers, cpus=cpus, gpus=gpus, data_cpus=data_cpus, driver_cpus=DRIVER_CPUS)


def trials_that_fit(base: Run, resources: TrialResources, trials: int) -> int:
    """Return how many of the trials fit the cluster as it is now; its nodes come and go during a sweep."""
    return fit_trials(nodes_of_workers(base, cluster_nodes()), resources, trials).concurrent


def own_cpus(resources: TrialResources, concurrent: int) -> int | None:
    """Return the CPUs that a trial's process shares with no other one; None where trials have workers."""
    cpus = [node.cpus for node in cluster_nodes() if node.cpus]
    return max(1, int(min(cpus) // -(-concurrent // len(cpus)))) if resources.is_alone else None


def nodes_of_workers(base: Run, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes without the GPU on which the evaluations of all trials take turns, if they need one."""
    largest = max(range(len(nodes)), key=lambda index: nodes[index].gpus, default=0)
    taken = evaluation_gpus(base)
    return [
        node._replace(gpus=max(0, node.gpus - taken)) if index == largest else node for index, node in enumerate(nodes)
    ]


def _with_absolute_urls(base: Run) -> Run:
    """Return the run with absolute addresses: a trial's process has a working folder of its own."""
    from vitray.weights.addresses import pin_uri

    values = base.dotted()
    changes = {path: pin_uri(values[path]) for path in ADDRESSES if values.get(path) is not None}
    return base.replace(changes) if changes else base


def with_absolute_addresses(point: SweepPoint) -> SweepPoint:
    """Return a point with absolute paths: a trial's process has a working folder of its own."""
    return point._replace(settings=_absolute(point.settings))


def _absolute(settings: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    from vitray.weights.addresses import is_model_uri, pin_uri

    absolute = dict(settings)
    for name, value in settings.items():
        if isinstance(value, Mapping):
            absolute[name] = _absolute(value, f"{section}{name}.")
        elif f"{section}{name}" in ADDRESSES and not (placeholders(value) or is_model_uri(str(value))):
            absolute[name] = pin_uri(value) if isinstance(value, str) else value
    return absolute


def dry_run(base: Run, space: Space, stage_recipes: Mapping[str, Recipe]) -> dict[str, Any]:
    """Print and return the plan, for the cluster at RAY_ADDRESS or for this machine, on which no Ray is started."""
    stages = plan_stages(base, space, stage_recipes, sweep_dir="")
    if "RAY_ADDRESS" in os.environ:
        with session.ray_session():
            plan = plan_sweep(base, space, cluster_nodes(), ready=False)
    else:
        plan = plan_sweep(base, space, [this_machine()], ready=False)
    points = {} if space.search.traits.learns else plan.points
    names = [f"  {name}" for name in points] or [f"  {space.search.kind} draws each point from earlier results"]
    lines = [f"  before: {stage.name} {', '.join(stage.cases)}" for stage in stages]
    print("\n".join([f"  {plan.summary}", *lines, "", *names]), file=sys.stderr)
    return {
        "before": {stage.name: stage.cases for stage in stages},
        "trials": plan.trials,
        "concurrent": min(plan.capacity.concurrent, plan.trials),
        "waves": plan.capacity.waves(plan.trials),
        "points": [dict(point.settings) for point in points.values()],
    }


def this_machine() -> Node:
    """Return the resources of this machine that this process may use."""
    import torch

    return Node(cpus=session.local_cpus(), gpus=torch.cuda.device_count())


def cluster_nodes() -> list[Node]:
    """Return the nodes of the running Ray."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(cpus=resources.get("CPU", 0.0), gpus=resources.get("GPU", 0.0)) for resources in alive]
