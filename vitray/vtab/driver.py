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
from vitray.evaluation.evaluate import DEFAULT_FOLDER, MAX_CORRUPT, Network, open_networks
from vitray.inference.engine import numerics_of
from vitray.inference.models import describe_network
from vitray.inference.outputs import BATCH, Work, compute_outputs
from vitray.runs.resolve import check_storage
from vitray.runs.train import train
from vitray.system import storage
from vitray.vtab.protocol import SWEEP, TRAIN, Setting, best_setting
from vitray.vtab.report import write_vtab
from vitray.vtab.results import NetworkResult, TaskResult, VtabEvaluation
from vitray.vtab.tasks import BOTH_SPLIT, DEVELOPMENT_SPLIT, TRAIN_SPLIT, Task, open_tasks, write_subset

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
    def models(self) -> list[str]:
        """The addresses of the networks."""
        return split_words(self.words)[0]

    @property
    def overrides(self) -> list[str]:
        """The settings of all fine-tunings."""
        return split_words(self.words)[1]

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
    if not request.models:
        raise ConfigError("--vtab: got no MODEL, expected one or more before it")
    base = _base_run(request)
    networks = open_networks(request.models)
    tasks = open_tasks(request.tasks, request.train_split, request.split)
    for network in networks:
        for task in tasks:
            _check(network, task, base)
    names = "-".join(network.spec.name for network in networks)
    folder = request.out or storage.join(DEFAULT_FOLDER, f"{names}-vtab".replace("/", "-"))
    check_storage(folder)
    subsets = {task.name: write_subset(task, storage.join(folder, "datasets")) for task in tasks}

    def cells(network: Network, setting: Setting, seed: int | None = None) -> list[_Cell]:
        runs = [_run(base, network, subsets[task.name], setting, seed) for task in tasks]
        return [
            _Cell(network, task, subsets[task.name], setting, run, seed is not None)
            for task, run in zip(tasks, runs, strict=True)
        ]

    sweep = [cell for network in networks for setting in SWEEP for cell in cells(network, setting)]
    records = _records(request, folder, sweep)
    development: dict[str, dict[Setting, dict[str, float]]] = {}
    for cell, record in zip(sweep, records, strict=True):
        by_setting = development.setdefault(cell.network.name, {}).setdefault(cell.setting, {})
        by_setting[cell.task.name] = record["top1"]
    best = {network.name: best_setting(development[network.name]) for network in networks}
    final = [
        cell
        for network in networks
        for seed in range(request.seeds)
        for cell in cells(network, best[network.name], seed)
    ]
    pairs = list(zip(final, _records(request, folder, final), strict=True))
    results = []
    for network in networks:
        own = {task.name: [record for cell, record in pairs if _is_of(cell, network, task)] for task in tasks}
        scored = [_task_result(task, own[task.name]) for task in tasks]
        results.append(NetworkResult(network.name, network.spec, best[network.name], development[network.name], scored))
    shared = {key: value for key, value in base.dotted().items() if key.startswith(("model.", "optim.", "compute."))}
    evaluation = VtabEvaluation(results, request.seeds, shared, request.command)
    return evaluation, write_vtab(evaluation, folder)


def _base_run(request: VtabRequest) -> Run:
    """Return the settings that all fine-tunings share."""
    for path in parse_overrides(request.overrides):
        taken = next((name for name in TAKEN if f"{path}.".startswith(f"{name}.")), None)
        if taken:
            raise ConfigError(
                f"override {path}: the protocol sets {taken}; expected another setting, as in optim.batch=64"
            )
    return load_run(request.recipe, request.overrides).replace(PROTOCOL)


def _check(network: Network, task: Task, base: Run) -> None:
    """Refuse a network that cannot be fine-tuned with these settings, before anything is written."""
    from vitray.weights.pretrained import open_initial_weights

    if base.optim.batch > TRAIN:
        raise ConfigError(
            f"optim.batch: got {base.optim.batch}, expected at most the {TRAIN} training images of a task"
        )
    run = base.replace({"task.weights": network.spec.url})
    assert isinstance(run.task, Finetune)
    open_initial_weights(run, run.task, task.train.classes)


def _run(base: Run, network: Network, subset: Dataset, setting: Setting, seed: int | None) -> Run:
    """Return a fine-tuning: of the sweep, or with a seed the final one."""
    is_final, steps = seed is not None, f"{setting.steps} steps"
    changes = {"seed": seed or 0, "task.weights": network.spec.url, "data.url": storage.absolute(subset.url)}
    changes |= {"data.train": BOTH_SPLIT, "data.val": None} if is_final else {"data.train": TRAIN_SPLIT}
    changes |= {} if is_final else {"data.val": DEVELOPMENT_SPLIT}
    changes |= {"optim.lr": setting.lr, "optim.duration": steps, "optim.warmup": f"{setting.warmup} steps"}
    return base.replace(changes | {"evaluate.every": steps})


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


def _is_of(cell: _Cell, network: Network, task: Task) -> bool:
    return cell.network.name == network.name and cell.task.name == task.name


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
