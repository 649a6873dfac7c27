"""`vitray evaluate RUN --training-probes`: the probes of checkpoints, computed as training computes them."""

import json
from collections.abc import Sequence
from typing import Any

import torch

from vitray import storage
from vitray.data.shards import holdout_mask, open_dataset
from vitray.errors import ConfigError
from vitray.runs.run_dir import RUN_META, stored_run
from vitray.training import checkpoints
from vitray.training.probes import network_weights, probe_weights, read_probe_images

# The printed scores, as far as they are computed.
SHOWN = ("knn10", "few_shot5", "ece", "rankme", "attention_distance")


def probe_checkpoints(urls: Sequence[str], names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Print and return the scores of each checkpoint of some runs, or of single ones.

    `names` replace the run's own probes.
    """
    opened = [_find(storage.absolute(url)) for url in urls]
    return [row for run_dir, steps in opened for row in _probe_run(run_dir, steps, names)]


def _find(url: str) -> tuple[str, list[int]]:
    """Return the run folder and the steps of the checkpoints at an address."""
    folder, _, name = url.partition("/checkpoints/")
    if storage.exists(storage.join(folder, RUN_META)):
        steps = checkpoints.complete_steps(folder)
        if not steps:
            raise ConfigError(f"{url}: the run has no complete checkpoint yet")
        if not name:
            return folder, steps
        if chosen := [step for step in steps if checkpoints.folder_of(folder, step) == url.rstrip("/")]:
            return folder, chosen
        raise ConfigError(f"{url}: no complete checkpoint; wanted one of the steps {', '.join(map(str, steps))}")
    raise ConfigError(f"{url}: no run folder; wanted one, as runs/NAME, or runs/NAME/checkpoints/step-00001200")


def _probe_run(run_dir: str, steps: Sequence[int], names: Sequence[str]) -> list[dict[str, Any]]:
    run = stored_run(run_dir)
    run = run.replace({"evaluate.probes": list(names)}) if names else run
    if not run.evaluate.probes:
        raise ConfigError(f"{run_dir}: its evaluate.probes are empty; wanted --probes, as in --probes knn,rank")
    assert run.data.url is not None
    dataset = open_dataset(run.data.url)
    wanted = json.loads(storage.read_bytes(storage.join(run_dir, RUN_META)))["dataset_identity"]
    if dataset.identity != wanted:
        raise ConfigError(f"{dataset.url}: the images have changed since {run_dir} started; wanted those of the run")
    mask = holdout_mask(dataset, run.data.train, run.data.development) if run.data.development else None
    images, device = read_probe_images(run, dataset, mask), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for step in steps:
        weights = network_weights(checkpoints.read_checkpoint(run_dir, step).parts)
        values, place = probe_weights(run, weights, images, device), checkpoints.folder_of(run_dir, step)
        print(" ".join([place, *(f" {name} {values[name]:.4f}" for name in SHOWN if name in values)]), flush=True)
        rows.append({"checkpoint": place, "step": step, **values})
    return rows
