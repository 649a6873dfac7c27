"""`vitray evaluate RUN --training-probes`: the probes of checkpoints, computed as training computes them."""

from collections.abc import Sequence
from typing import Any

import torch

from vitray.data.shards import holdout_mask
from vitray.errors import ConfigError
from vitray.metrics.probes import PROBES
from vitray.runs.model_output import find_checkpoints
from vitray.runs.run_dir import run_dataset, stored_run
from vitray.system import storage
from vitray.training import checkpoints
from vitray.training.probes import network_weights, probe_weights, read_probe_images


def probe_checkpoints(urls: Sequence[str], names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Print and return the scores of each checkpoint of some runs, or of single ones.

    `names` replace the run's own probes.
    """
    opened = [find_checkpoints(storage.absolute(url)) for url in urls]
    return [row for run_dir, steps in opened for row in _probe_run(run_dir, steps, names)]


def _probe_run(run_dir: str, steps: Sequence[int], names: Sequence[str]) -> list[dict[str, Any]]:
    run = stored_run(run_dir)
    run = run.replace({"evaluate.probes": list(names)}) if names else run
    if not run.evaluate.probes:
        raise ConfigError(f"{run_dir}: its evaluate.probes are empty; expected --probes, as in --probes knn,rank")
    dataset = run_dataset(run, run_dir)
    mask = holdout_mask(dataset, run.data.train, run.data.holdout) if run.data.holdout else None
    images, device = read_probe_images(run, dataset, mask), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for step in steps:
        weights = network_weights(checkpoints.read_checkpoint(run_dir, step).parts)
        values, place = probe_weights(run, weights, images, device), checkpoints.folder_of(run_dir, step)
        shown = [PROBES[name].headline for name in PROBES if PROBES[name].headline in values]
        print(" ".join([place, *(f" {name} {values[name]:.4f}" for name in shown)]), flush=True)
        rows.append({"checkpoint": place, "step": step, **values})
    return rows
