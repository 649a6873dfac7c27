"""Evaluations as runs in MLflow: one for each network, linked to its training run and its registered version."""

import hashlib
import json
import math

from vitray.evaluation.results import Evaluation, Result
from vitray.evaluation.texts import fixed_titles, score_text
from vitray.system import host_facts, storage
from vitray.tracking.lineage import ModelScores, TrackedDataset, experiment_of
from vitray.tracking.tracker import TrackedRun, Tracker


def track_evaluation(evaluation: Evaluation, folder: str) -> None:
    """Log the scores of each network with the page in a folder; a repeated evaluation continues its run."""
    files = {name: storage.read_bytes(storage.join(folder, name)).decode() for name in ("index.html", "results.json")}
    for result in evaluation.results:
        tags = {"vitray.kind": "evaluation", "vitray.home": storage.absolute(folder)} | host_facts.facts()
        dataset, description = _dataset(evaluation), _description(evaluation, result)
        with Tracker(_identity(evaluation, result, folder), _params(evaluation, result), tags, description) as tracker:
            tracker.datasets([dataset])
            scores = ModelScores(0, _metrics(evaluation, result), dataset)
            tracker.scores(result.spec.url, scores, description)
            for name, text in files.items():
                tracker.text(f"evaluation/{name}", text)


def _identity(evaluation: Evaluation, result: Result, folder: str) -> TrackedRun:
    images = evaluation.images
    parts = [storage.absolute(folder), result.spec.url, result.spec.key, images.identity, evaluation.command]
    uid = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    return TrackedRun(uid, f"{result.name} on {images.name}/{images.split}", experiment_of(result.spec.url))


def _dataset(evaluation: Evaluation) -> TrackedDataset:
    images = evaluation.images
    name = f"{images.name}/{images.split}"
    return TrackedDataset(name, images.identity, images.url, "evaluation", len(images), len(images.classes))


def _params(evaluation: Evaluation, result: Result) -> dict[str, str]:
    spec, images = result.spec, evaluation.images
    params = {"model": spec.url, "network": spec.network, "identity": spec.identity, "data": images.url}
    return params | {"split": images.split, "data_identity": images.identity, "command": evaluation.command}


def _metrics(evaluation: Evaluation, result: Result) -> dict[str, float]:
    """Return the numbers under the names that training gives them: val/top1."""
    numbers = {name: value for name, value in result.flat().items() if type(value) in (int, float)}
    return {f"{evaluation.images.split}/{name}": value for name, value in numbers.items() if math.isfinite(value)}


def _description(evaluation: Evaluation, result: Result) -> str:
    rows = [f"| {title} | {text} |" for name, title in fixed_titles().items() if (text := score_text(result, name))]
    table = "\n".join(["| score | with its 95 % interval |", "|---|---|", *rows])
    images = evaluation.images
    head = f"`{result.spec.url}` on {len(result.outputs.labels):,} images of `{images.url}`, {images.split}"
    return f"{head}\n\n{table}\n\n`{evaluation.command}`"
