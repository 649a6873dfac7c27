"""Predictions of a family: decoded images in, probabilities and the most probable classes out.

Shapes: B images, H x W pixels, C colors, K classes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitray.config import Run
from vitray.data.augment.crops import crop_center
from vitray.data.augment.mixing import normalized
from vitray.errors import ConfigError
from vitray.models.precision import tf32_products
from vitray.models.probabilities import present_labels, probabilities_of, probability_of
from vitray.weights.family import Family, Member


def is_classifier(run: Run) -> bool:
    """Whether the network of a run has classes."""
    return run.model.num_classes is not None and run.classification is not None


def check_classifier(run: Run, url: str) -> None:
    """Refuse a network that has no classes."""
    if not is_classifier(run):
        raise ConfigError(f"{url}: a network of task {run.task.kind} without classes; expected a classifier")


def class_names(member: Member) -> list[str]:
    """Return the class names of a classifier; the labels if it has none."""
    return member.classes or [str(label) for label in range(member.run.model.num_classes or 0)]


def view_of(image_HWC: np.ndarray, member: Member) -> np.ndarray:
    """Return the pixels of an image, cropped as in the evaluation of the member's run."""
    return crop_center(image_HWC, member.run.data.eval_crop, member.run.model.image_shape)


@torch.inference_mode()
def probabilities(family: Family, views: Sequence[np.ndarray], members: Sequence[Member]) -> list[np.ndarray]:
    """Return the probabilities (K) of each view by its member; NaN for a view whose logits are not all finite."""
    images: list[Tensor] = [torch.empty(0)] * len(views)
    groups: dict[Any, list[int]] = {}
    for row, member in enumerate(members):
        groups.setdefault((member.run.data.normalize, views[row].shape), []).append(row)
    for (normalize, _), rows in groups.items():
        views_BHWC = torch.from_numpy(np.stack([views[row] for row in rows])).to(family.device)
        for row, image in zip(rows, normalized(views_BHWC, normalize), strict=True):
            images[row] = image
    with tf32_products(family.device, all(member.run.compute.tf32 for member in members)):
        logits = family.outputs(images, members)
    results: list[np.ndarray] = [np.empty(0)] * len(views)
    alike: dict[Any, list[int]] = {}
    for row, member in enumerate(members):
        alike.setdefault((probability_of(member.run), logits[row].shape), []).append(row)
    for (kind, _), rows in alike.items():  # one copy from the GPU for all of them
        values_BK = probabilities_of(torch.stack([logits[row] for row in rows]), kind).cpu().numpy()
        for row, values_K in zip(rows, values_BK, strict=True):
            results[row] = values_K
    return results


def answer(probabilities_K: np.ndarray, member: Member, top_k: int | None) -> dict[str, Any]:
    """Return the most probable class, and all probabilities or the `top` k classes.

    Of a network of several labels an image, also the `labels` that it takes as present, and their `scores`.
    """
    classes, thresholds = class_names(member), member.run.thresholds
    order = np.argsort(-probabilities_K, kind="stable")  # among equals the lowest label is first
    best = _class_answer(probabilities_K, classes, order[0])
    if thresholds is not None:
        present = present_labels(probabilities_K, thresholds)
        best |= {"labels": [classes[label] for label in present], "scores": probabilities_K[present].tolist()}
    if top_k is None:
        return {**best, "probabilities": probabilities_K.tolist()}
    return {**best, "top": [_class_answer(probabilities_K, classes, label) for label in order[:top_k]]}


def _class_answer(probabilities_K: np.ndarray, classes: Sequence[str], label: int) -> dict[str, Any]:
    return {"label": int(label), "class": classes[label], "probability": float(probabilities_K[label])}
