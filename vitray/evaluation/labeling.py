"""Scores with the label sets that authors of test sets publish: ReaL, ImageNet-V2, -A, -R, -Sketch, ObjectNet."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitray.data.stream.decoding import SplitRows
from vitray.errors import ConfigError
from vitray.inference.images import ImageSet, name_of
from vitray.inference.network_spec import NetworkSpec
from vitray.metrics.intervals import wilson
from vitray.metrics.label_sets import LabelSet, LabelSetScore, read_label_set, score_label_set


def open_label_set(labels: str, spec: NetworkSpec) -> LabelSet:
    """Return the label set of an option KIND=PATH for a network; refuse one that its classes do not fit."""
    kind, equals, path = labels.partition("=")
    if not equals or not path:
        raise ConfigError(f"--labels: got {labels}, expected KIND=PATH, as in real=real.json")
    if spec.classes is None:
        raise ConfigError(f"--labels: {spec.url} has no class names; expected a network with names")
    return read_label_set(kind, path, spec.classes)


def score_labels(logits_NK: np.ndarray, keys: Sequence[str], images: ImageSet, labels: LabelSet) -> LabelSetScore:
    """Return the scores of images by a label set."""
    names = [name_of(key) for key in keys] if isinstance(images.source, SplitRows) else keys
    return score_label_set(logits_NK, labels.ids(names), labels)


def label_values(scored: LabelSetScore) -> dict[str, Any]:
    """Return the top-1 and top-5 by a label set by name, of the images that it counts."""
    values: dict[str, Any] = {"labels": scored.name, "labels_images": scored.images}
    values["labels_not_counted"] = scored.not_counted
    for name, hits in (("labels_top1", scored.hits1), ("labels_top5", scored.hits5)):
        interval = wilson(hits, scored.images)
        values |= {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return values
