"""One evaluation by the VTAB-1k protocol: a sweep of fine-tunings, one setting, and final fine-tunings on more images.

Each fine-tuning is a run of `vitray train`. Its score is kept in a file named after everything that decides it, so a
command that was killed continues.
"""

import hashlib
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from vitray.cluster import session
from vitray.config import Run, load_run
from vitray.config.classification import Finetune
from vitray.config.parsing import parse_overrides, split_words
from vitray.data.shards.manifest import Dataset
from vitray.errors import ConfigError
from vitray.evaluation.classes import class_numbers
from vitray.evaluation.evaluate import DEFAULT_FOLDER, MAX_CORRUPT, Network
from vitray.evaluation.vtab.page import write_vtab
from vitray.evaluation.vtab.scores import SWEEP, NetworkResult, Setting, TaskResult, VtabEvaluation, best_setting
from vitray.evaluation.vtab.tasks import (
    BOTH_SPLIT,
    DEVELOPMENT_SPLIT,
    TRAIN,
    TRAIN_SPLIT,
    Task,
    open_tasks,
    write_subset,
)
from vitray.inference.engine import numerics_of
from vitray.inference.models import describe_network, named_networks
from vitray.inference.outputs import BATCH, Work, compute_outputs
from vitray.runs.resolve import check_storage
from vitray.runs.train import train
from vitray.system import storage

FORMAT = 1
# The whole image squeezed to the network's size, as by VTAB's code, without augmentation: a crop or a flip can change
# the label of an image whose objects are counted, or whose position or orientation is asked for.
VIEW = {"crop_ratio": None, "interpolation": "bilinear"}
PROTOCOL: dict[str, Any] = {
    "data.augment": {"crop": {"kind": "center", **VIEW}, "flip": 0.0},
    "data.eval_crop": VIEW,
    "tracking.register_as": None,
    # An epoch of 800 images is a single step.
    "checkpoint.every": "10 minutes",
    "checkpoint.keep": 1,
}
# Settings that the protocol or a fine-tuning of it sets.
TAKEN = (*PROTOCOL, "task", "seed", "data", "optim.lr", "optim.duration", "optim.warmup", "evaluate.every")
# Settings on which the fine-tuned weights do not depend.
WITHOUT_EFFECT = ("data.url", "task.weights", "tracking.", "checkpoint.", "compute.workers", "compute.device")
WITHOUT_EFFECT += ("compute.cpus", "compute.gpus", "compute.max_failures")


class VtabRequest(NamedTuple):
    """One call of `vitray evaluate --vtab`."""

    words: Sequence[str]
    """Networks, and overrides setting=value of the recipe."""
    tasks: Sequence[str]
    """Each GROUP=DATA."""
    recipe: Path
    """The fine-tuning, less the settings of the protocol."""
    split: str = "val"
    """The images to score."""
    train_split: str = "train"
    out: str | None = None
    """None is a folder below `evaluations`, named after the networks."""
    seeds: int = 3
    workers: int | None = None
    max_corrupt: float = MAX_CORRUPT

    @property
    def command(self) -> str:
        """The command line that repeats it."""
        words = ["vitray", "evaluate", *self.words, "--split", self.split]
        words += ["--train-split", self.train_split, "--seeds", str(self.seeds)]
        words += ["--max-corrupt", f"{self.max_corrupt:g}"] if self.max_corrupt != MAX_CORRUPT else []
        words += ["--out", self.out] if self.out else []
        return shlex.join([*words, "--vtab", *self.tasks])


class _Cell(NamedTuple):
    """One fine-tuning of one network on one task."""

    network: Network
    task: Task
    subset: Dataset
    setting: Setting
    run: Run
    is_final: bool
    """On all 1,000 images and scored on the test images; else on 800 and scored on 200."""

    @property
    def name(self) -> str:
        """The name of its run."""
        network, (lr, steps) = self.network.name.replace("/", "-"), self.setting
        part = f"seed{self.run.seed}" if self.is_final else "sweep"
        return f"{network}-{self.task.name}-lr{lr:g}-{steps}-{part}"

    @property
    def identity(self) -> str:
        """A hash of everything that decides its score."""
        settings = {key: value for key, value in self.run.dotted().items() if not key.startswith(WITHOUT_EFFECT)}
        parts = [FORMAT, self.network.spec.identity, self.network.spec.settings, self.subset.identity, settings]
        parts += [self.task.test.identity] if self.is_final else []
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def evaluate_vtab(request: VtabRequest) -> tuple[VtabEvaluation, str]:
    """Score all networks, write the folder, and return the scores and the address of the page."""
    models, overrides = split_words(request.words)
    if not models:
        raise ConfigError("--vtab: got no MODEL, expected one or more before it")
    base = _base_run(request.recipe, overrides)
    networks = [Network(*each) for each in named_networks(models)]
    tasks = open_tasks(request.tasks, request.train_split, request.split)
    _check(networks, tasks, base)
    names = "-".join(network.spec.name for network in networks)
    folder = request.out or storage.join(DEFAULT_FOLDER, f"{names}-vtab".replace("/", "-"))
    check_storage(folder)
    subsets = {task.name: write_subset(task, storage.join(folder, "datasets")) for task in tasks}

    def cell(network: Network, task: Task, setting: Setting, seed: int | None = None) -> _Cell:
        run = _run(base, network, subsets[task.name], setting, seed)
        return _Cell(network, task, subsets[task.name], setting, run, is_final=seed is not None)

    sweep = [cell(network, task, setting) for network in networks for setting in SWEEP for task in tasks]
    development: dict[str, dict[Setting, dict[str, float]]] = {}
    for each, record in zip(sweep, _records(request, folder, sweep), strict=True):
        by_setting = development.setdefault(each.network.name, {}).setdefault(each.setting, {})
        by_setting[each.task.name] = record["top1"]
    best = {network.name: best_setting(development[network.name]) for network in networks}
    seeds = range(request.seeds)
    final = [cell(each, task, best[each.name], seed) for each in networks for seed in seeds for task in tasks]
    records: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each, record in zip(final, _records(request, folder, final), strict=True):
        records.setdefault((each.network.name, each.task.name), []).append(record)
    results = []
    for name, spec, _ in networks:
        scored = [_task_result(task, records[name, task.name]) for task in tasks]
        results.append(NetworkResult(name, spec, best[name], development[name], scored))
    shared = {key: value for key, value in base.dotted().items() if key.startswith(("model.", "optim.", "compute."))}
    evaluation = VtabEvaluation(results, request.seeds, shared, request.command)
    return evaluation, write_vtab(evaluation, folder)


def _base_run(recipe: Path, overrides: Sequence[str]) -> Run:
    """Return the settings that all fine-tunings share."""
    for path in parse_overrides(overrides):
        taken = next((name for name in TAKEN if f"{path}.".startswith(f"{name}.")), None)
        if taken:
            raise ConfigError(
                f"override {path}: the protocol sets {taken}; expected another setting, as in optim.batch=64"
            )
    return load_run(recipe, overrides).replace(PROTOCOL)


def _check(networks: Sequence[Network], tasks: Sequence[Task], base: Run) -> None:
    """Refuse a network that cannot be fine-tuned with these settings, before anything is written."""
    from vitray.weights.pretrained import open_initial_weights

    if base.optim.batch > TRAIN:
        raise ConfigError(
            f"optim.batch: got {base.optim.batch}, expected at most the {TRAIN} training images of a task"
        )
    for network in networks:
        run = base.replace({"task.weights": network.spec.url})
        assert isinstance(run.task, Finetune)
        for task in tasks:
            open_initial_weights(run, run.task, task.train.classes)


def _run(base: Run, network: Network, subset: Dataset, setting: Setting, seed: int | None) -> Run:
    """Return a fine-tuning: of the sweep, or with a seed the final one."""
    is_final, steps = seed is not None, f"{setting.steps} steps"
    return base.replace(
        {
            "seed": seed or 0,
            "task.weights": network.spec.url,
            "data.url": storage.absolute(subset.url),
            "data.train": BOTH_SPLIT if is_final else TRAIN_SPLIT,
            "data.val": None if is_final else DEVELOPMENT_SPLIT,
            "optim.lr": setting.lr,
            "optim.duration": steps,
            "optim.warmup": f"{setting.warmup} steps",
            "evaluate.every": steps,
        }
    )


# ---- the fine-tunings ------------------------------------------------------------------------------------------------


def _records(request: VtabRequest, folder: str, cells: Sequence[_Cell]) -> list[dict[str, Any]]:
    """Return the record of each fine-tuning; train those that have none first."""
    places = {cell.identity: storage.join(folder, "done", f"{cell.identity}.json") for cell in cells}
    todo = [cell for cell in cells if not storage.exists(places[cell.identity])]
    with session.ray_session() if todo else nullcontext():
        for number, cell in enumerate(todo, 1):
            print(f"vtab: fine-tuning {number} of {len(todo)}: {cell.name}", file=sys.stderr, flush=True)
            record = _fine_tune(request, folder, cell)
            storage.write_bytes(places[cell.identity], json.dumps(record).encode())
            if record["mlflow_run"] is not None:  # MLflow has the model; a run of 86 M parameters leaves 1 GB
                storage.remove(storage.join(folder, "runs", cell.identity))
    return [storage.read_json(places[cell.identity]) for cell in cells]


def _fine_tune(request: VtabRequest, folder: str, cell: _Cell) -> dict[str, Any]:
    """Train one cell, or finish it, and return its score."""
    outcome = train(cell.run, cell.name, storage.join(folder, "runs", cell.identity))
    record = {"name": cell.name, "mlflow_run": outcome.mlflow_run, "seconds": outcome.seconds, "ended": time.time()}
    if not cell.is_final:
        return record | {"top1": outcome.val_top1}
    assert outcome.model is not None, "a run without a scheduler ends with a model"
    (spec, vit), test = describe_network(outcome.model), cell.task.test
    named, numerics = spec._replace(name=cell.name), numerics_of(request.workers, BATCH)
    work = Work(named, test, ("logits",), storage.join(folder, "outputs"), numerics, max_corrupt=request.max_corrupt)
    outputs = compute_outputs(work, request.workers, vit)
    assert outputs.logits is not None
    hits = int((outputs.logits.argmax(1) == class_numbers(spec, test)[outputs.labels]).sum())
    return record | {"hits": hits, "images": len(outputs.labels), "left_out": len(outputs.left_out)}


def _task_result(task: Task, records: Sequence[Mapping[str, Any]]) -> TaskResult:
    """Return the scores of a task; each seed counts the same images."""
    [(images, left_out)] = {(record["images"], record["left_out"]) for record in records}
    return TaskResult(
        name=task.name,
        group=task.group,
        url=task.test.url,
        split=task.test.split,
        identity=task.test.identity,
        classes=len(task.train.classes),
        images=images,
        left_out=left_out,
        hits=tuple(record["hits"] for record in records),
    )
