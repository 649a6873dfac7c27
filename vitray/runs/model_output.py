"""The networks that a run leaves: its model folder, those of its checkpoints, and the probes of these."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitray.config import Run
from vitray.config.classification import Finetune
from vitray.data.shards import held_out
from vitray.errors import ConfigError
from vitray.metrics.probes import PROBES
from vitray.models.network import build_network
from vitray.models.tokenizer import VisualTokenizer
from vitray.runs.run_dir import OUTCOME, RUN_META, run_dataset, stored_run
from vitray.system import storage
from vitray.training import checkpoints
from vitray.training.probes import network_weights, probe_weights, read_probe_images, tensors_of
from vitray.training.resolved import ResolvedRun
from vitray.weights import SavedModel, save_model, save_tokenizer
from vitray.weights.addresses import resolve_uri
from vitray.weights.freezing import Tuned, prepare
from vitray.weights.pretrained import InitialWeights

# The folder of a student beside that of its teacher, which is the model.
STUDENT = "student"
_CHECKPOINT = re.compile(r"(.+)/checkpoints/step-\d+/?")


def last_weights(run_dir: str) -> dict[str, Tensor]:
    """Return the task's weights at the last checkpoint, averaged where the run averages."""
    return _weights_at(run_dir, checkpoints.complete_steps(run_dir)[-1])


def initial_weights(resolved: ResolvedRun, source: str | None) -> dict[str, Tensor] | None:
    """Return the task's weights at the start of a run, or of a fork of the run in folder `source`; None draws them."""
    if resolved.initial:
        return resolved.initial.task_state(resolved.run)
    return last_weights(source) if source else None


def save_weights(run: Run, run_dir: str, classes: Sequence[str], start: InitialWeights | None) -> SavedModel:
    """Write the model folder: a network without decoder, a delta for partial fine-tuning, or a whole tokenizer.

    Where a teacher is the result, write its student, too.
    """
    is_delta = start is not None and isinstance(run.task, Finetune) and run.task.save_delta and run.task.mode != "full"
    url, weights = storage.join(run_dir, "model"), last_weights(run_dir)
    storage.remove(url)
    if run.task.traits.network != "vit":
        student = storage.join(run_dir, STUDENT)
        storage.remove(student)
        _save(student, run, weights, classes, module="vit")
    return _save(url, run, weights, classes, start.url if start and is_delta else None)


def save_checkpoint(url: str, target: str) -> SavedModel:
    """Write a checkpoint as a whole model folder; of a run folder, the checkpoint of the best evaluation."""
    location = storage.absolute(resolve_uri(url))
    run_dir, steps = find_checkpoints(location)
    step = steps[0] if _CHECKPOINT.fullmatch(location) else _best_step(run_dir, steps)
    run = stored_run(run_dir)
    classes = () if run.model.num_classes is None else _classes_of(run, run_dir)
    saved = _save(target, run, _weights_at(run_dir, step), classes)
    print(f"{checkpoints.folder_of(run_dir, step)} -> {target}")
    return saved


def find_checkpoints(url: str) -> tuple[str, list[int]]:
    """Return the run folder and the steps of the checkpoints at an address: of a run, or a single one."""
    named = _CHECKPOINT.fullmatch(url)
    folder = named[1] if named else url
    if storage.exists(storage.join(folder, RUN_META)):
        steps = checkpoints.complete_steps(folder)
        if not steps:
            raise ConfigError(f"{url}: the run has no complete checkpoint yet")
        if not named:
            return folder, steps
        if chosen := [step for step in steps if checkpoints.folder_of(folder, step) == url.rstrip("/")]:
            return folder, chosen
        raise ConfigError(f"{url}: no complete checkpoint; expected one of the steps {', '.join(map(str, steps))}")
    raise ConfigError(f"{url}: no run folder; expected one, as runs/NAME, or runs/NAME/checkpoints/step-00001200")


def probe_checkpoints(urls: Sequence[str], names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Print and return the scores of each checkpoint of some runs, or of single ones, as training computes them.

    `names` replace the run's own probes.
    """
    opened = [find_checkpoints(storage.absolute(url)) for url in urls]
    return [row for run_dir, steps in opened for row in _probe_run(run_dir, steps, names)]


def _best_step(run_dir: str, steps: Sequence[int]) -> int:
    """Return the step of the best evaluation; without any evaluation, the last one."""
    state = checkpoints.read_meta(run_dir, steps[-1])["state"]["train_state"]
    best, pending = state["best_step"], state.get("pending", [])
    # Evaluations that ended after the last checkpoint was written.
    ended = storage.read_json(outcome) if storage.exists(outcome := storage.join(run_dir, OUTCOME)) else {}
    if ended.get("steps", -1) >= steps[-1] and "best_step" in ended:
        best, pending = ended["best_step"], []
    if pending:
        print(f"not evaluated when the run was interrupted, so not compared: steps {', '.join(map(str, pending))}")
    if best is not None and best not in steps:
        raise ConfigError(
            f"{run_dir}: its best evaluation, of step {best}, has no checkpoint; expected"
            f" {checkpoints.folder_of(run_dir, steps[-1])}, or another of the steps {', '.join(map(str, steps))}"
        )
    return steps[-1] if best is None else best


def _classes_of(run: Run, run_dir: str) -> Sequence[str]:
    """Return the class names, of the finished model or else of the images."""
    known = storage.join(run_dir, "model", "classes.json")
    return storage.read_json(known) if storage.exists(known) else run_dataset(run, run_dir).classes


def _weights_at(run_dir: str, step: int) -> dict[str, Tensor]:
    parts = checkpoints.read_checkpoint(run_dir, step).parts
    return parts["model"] | parts.get("average", {})  # frozen weights have no average


def _save(
    url: str,
    run: Run,
    weights: dict[str, Tensor],
    classes: Sequence[str],
    base: str | None = None,
    module: str | None = None,
) -> SavedModel:
    """Write the network of a task; `module` is another one than the task names."""
    if run.task.traits.saves == "tokenizer":
        tokenizer = VisualTokenizer(run)
        tokenizer.load_state_dict(weights)
        return save_tokenizer(url, tokenizer)
    vit = build_network(run.model)
    if isinstance(run.task, Tuned) and run.weights:
        prepare(vit, run.task)
    vit.load_state_dict(tensors_of(module or run.task.traits.network, weights))
    class_names = classes if run.model.num_classes is not None else None
    return save_model(url, run, vit, class_names, relative_to=base)


def _probe_run(run_dir: str, steps: Sequence[int], names: Sequence[str]) -> list[dict[str, Any]]:
    run = stored_run(run_dir)
    run = run.replace({"evaluate.probes": list(names)}) if names else run
    if not run.evaluate.probes:
        raise ConfigError(f"{run_dir}: its evaluate.probes are empty; expected --probes, as in --probes knn,rank")
    dataset = run_dataset(run, run_dir)
    images = read_probe_images(run, dataset, held_out(dataset, run.data))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for step in steps:
        weights = network_weights(checkpoints.read_checkpoint(run_dir, step).parts, run.task.traits.network)
        values, place = probe_weights(run, weights, images, device), checkpoints.folder_of(run_dir, step)
        shown = [name for probe in PROBES.values() for name in probe.headlines if name in values]
        print(" ".join([place, *(f" {name} {values[name]:.4f}" for name in shown)]), flush=True)
        rows.append({"checkpoint": place, "step": step, **values})
    return rows
