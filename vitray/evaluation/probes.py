"""The images and labels of `--probes`: those that the probes learn from, and those that they are scored on."""

from collections.abc import Sequence

import numpy as np

from vitray.config.evaluation import feature_probes
from vitray.errors import ConfigError, nearest
from vitray.evaluation.classes import check_distinct
from vitray.inference.images import ImageSet, open_images
from vitray.inference.outputs import Outputs
from vitray.metrics.arrays import Labeled


def check_probes(names: Sequence[str]) -> None:
    """Refuse unknown probes."""
    known = feature_probes()
    for name in names:
        if name not in known:
            raise ConfigError(f"--probes: got {name}, expected some of {', '.join(known)}{nearest(name, known)}")


def open_training(images: ImageSet, train_split: str) -> ImageSet:
    """Return the training images beside those of a split; refuse a source that has only the latter."""
    train = open_images(images.url, train_split)
    if train.identity == images.identity:
        raise ConfigError(
            f"--train-split: got {train_split}, whose images are those of --split {images.split} in {images.url};"
            " expected other images than the scored ones, as of a source with splits"
        )
    return train


def all_classes(train: ImageSet | None, test: ImageSet) -> list[str]:
    """Return the class names of both splits: a source lists only the classes that a split has."""
    if train is None or train.classes == test.classes:
        return list(test.classes)
    check_distinct(train.url, train.classes)
    check_distinct(test.url, test.classes)
    return list(dict.fromkeys([*train.classes, *test.classes]))


def numbered(outputs: Outputs, images: ImageSet, classes: Sequence[str]) -> Labeled:
    """Return the features with labels as places among `classes`."""
    assert outputs.features is not None
    if images.classes == tuple(classes):  # two classes may have one name
        return Labeled(outputs.features, outputs.labels)
    places = {name: place for place, name in enumerate(classes)}
    return Labeled(outputs.features, np.array([places[name] for name in images.classes], np.int64)[outputs.labels])
