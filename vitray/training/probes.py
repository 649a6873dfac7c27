"""The probes of a run: scores of its weights on fixed images, the same during training and from a checkpoint.

The network computes in float32, whatever the precision of the run. Shapes: N images, H x W pixels, C colors.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitray.config import Run
from vitray.config.evaluation import PROBE_TRAITS
from vitray.data.augment.keyed_random import raw_draws
from vitray.data.augment.mixing import normalized
from vitray.data.augment.views import View
from vitray.data.shards.manifest import Dataset
from vitray.data.stream.decoding import locate_rows, read_labels
from vitray.errors import ConfigError
from vitray.inference.images import split_images
from vitray.inspection.attention import attention_distances
from vitray.metrics.arrays import Labeled, ProbeInputs
from vitray.metrics.probes import probe_scores
from vitray.models.adapters import merge_lora
from vitray.models.network import AnyNetwork, build_network, vit_of
from vitray.models.probabilities import probability_of

# Images of a forward pass. A fixed number: the last bits of an output depend on it.
BATCH = 64
# Images whose attention is measured; the ViT paper has as many.
ATTENTION_IMAGES = 128


class ProbedSplit(NamedTuple):
    """The chosen images of a split that can be decoded."""

    views: np.ndarray
    """NHWC, uint8, as an evaluation sees them."""
    labels: np.ndarray


class ProbeImages(NamedTuple):
    """The images of the probes."""

    train: ProbedSplit | None
    """None without a probe that learns."""
    val: ProbedSplit
    classes: int


class NetworkOutputs(NamedTuple):
    """The outputs of a network for the images of a split."""

    features: np.ndarray
    logits: np.ndarray


def read_probe_images(run: Run, dataset: Dataset, holdout_mask: np.ndarray | None) -> ProbeImages:
    """Read and decode the images; `holdout_mask` marks the rows of train that are evaluated."""
    assert run.data.evaluated is not None
    learns = any(PROBE_TRAITS[name].learns for name in run.evaluate.probes)
    train = _read_split(run, dataset, run.data.train, None if holdout_mask is None else ~holdout_mask)
    val = _read_split(run, dataset, run.data.evaluated, holdout_mask)
    return ProbeImages(train if learns else None, val, len(dataset.classes))


def read_probe_labels(run: Run, dataset: Dataset, holdout_mask: np.ndarray | None) -> np.ndarray:
    """Return the labels of the images that probes learn from, also of those that cannot be decoded."""
    rows = locate_rows(dataset, run.data.train)
    mask = None if holdout_mask is None else ~holdout_mask
    return read_labels(_choose_images(run, run.data.train, int(rows.starts[-1]), mask), rows)


def choose_rows(split: str, used: np.ndarray, number: int) -> np.ndarray:
    """Return `number` of the rows in `used`, at random; a function of the split's name and of the rows."""
    draws = raw_draws(f"probed {split}", int(used.max(initial=-1)) + 1)[used]
    return np.sort(used[np.argsort(draws, kind="stable")[:number]])


@torch.no_grad()
def probe_weights(run: Run, weights: Mapping[str, Tensor], images: ProbeImages, device: torch.device) -> dict[str, Any]:
    """Return the scores of a network's weights by name."""
    vit = build_network(run.model)
    vit.load_state_dict(weights)
    vit.to(device).eval().requires_grad_(False)
    outputs, labels = _run_network(vit, run, images.val, device), images.val.labels
    train = images.train and Labeled(_run_network(vit, run, images.train, device).features, images.train.labels)

    def measure_distances() -> np.ndarray:
        views, attentive = images.val.views[:ATTENTION_IMAGES], vit_of(vit, "evaluate.probes: attention distances")
        parts = [
            attention_distances(attentive, _prepare(views[at : at + BATCH], run, device)).distance.cpu().numpy()
            for at in range(0, len(views), BATCH)
        ]
        return np.concatenate(parts, axis=-1)

    inputs = ProbeInputs(
        scored=Labeled(outputs.features, labels),
        num_classes=images.classes,
        train=train,
        logits=outputs.logits,
        probability=probability_of(run),
        attention_distances=measure_distances,
    )
    values = probe_scores(run.evaluate.probes, inputs).scores
    counts = {"images": len(labels)} | ({} if train is None else {"train_images": len(train.labels)})
    return counts | {name: value for name, value in values.items() if value is not None}


def network_weights(parts: Mapping[str, Mapping[str, Tensor]], module: str = "vit") -> dict[str, Tensor]:
    """Return the network's tensors of a task's `model`, with LoRA merged.

    `module` is where the task has it. Where the run averages, they are those of its `average`.
    """
    tensors = {**parts["model"], **parts.get("average", {})}  # frozen weights have no average
    return merge_lora(tensors_of(module, tensors))


def tensors_of(module: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a module of a task, by their names in it."""
    return {name.removeprefix(f"{module}."): each for name, each in tensors.items() if name.startswith(f"{module}.")}


def _choose_images(run: Run, split: str, total: int, mask: np.ndarray | None) -> np.ndarray:
    used = np.arange(total) if mask is None else np.flatnonzero(mask)
    return choose_rows(split, used, run.evaluate.probe_images)


def _read_split(run: Run, dataset: Dataset, split: str, mask: np.ndarray | None) -> ProbedSplit:
    images = split_images(dataset, split)
    chosen = _choose_images(run, split, len(images), mask)
    views_NHWC, labels = images.read_views(chosen.tolist(), View(run.data.eval_crop, run.model.image_shape))
    if not len(views_NHWC):
        raise ConfigError(f"{dataset.url}: {split}: none of {len(chosen)} images for the probes can be decoded")
    return ProbedSplit(views_NHWC, labels)


def _run_network(vit: AnyNetwork, run: Run, split: ProbedSplit, device: torch.device) -> NetworkOutputs:
    features, logits = [], []
    for at in range(0, len(split.views), BATCH):
        features_BD, logits_BK = vit.features_and_logits(_prepare(split.views[at : at + BATCH], run, device))
        features.append(features_BD.cpu().numpy())
        logits.append(logits_BK.cpu().numpy())
    return NetworkOutputs(np.concatenate(features), np.concatenate(logits))


def _prepare(views_NHWC: np.ndarray, run: Run, device: torch.device) -> Tensor:
    return normalized(torch.from_numpy(views_NHWC).to(device), run.data.normalize)
