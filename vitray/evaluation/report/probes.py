"""Probes of a network's features: they learn from one split and are scored on another."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitray.errors import ConfigError, nearest
from vitray.evaluation.arrays import Labelled, ProbeScore
from vitray.evaluation.feature_rank import class_separation, effective_rank, rankme
from vitray.evaluation.few_shot import mean_of_seeds, probe_few_shot
from vitray.evaluation.intervals import wilson
from vitray.evaluation.knn import NEIGHBOURS, probe_knn
from vitray.evaluation.linear_probe import is_too_large, probe_linear, probe_linear_sgd
from vitray.evaluation.report.classes import check_distinct
from vitray.inference.images import ImageSet, open_images
from vitray.inference.outputs import Outputs

PROBES = ("knn", "few_shot", "linear", "rank")


def check_probes(names: Sequence[str]) -> None:
    """Refuse unknown probes."""
    for name in names:
        if name not in PROBES:
            raise ConfigError(f"--probes: got {name}, wanted some of {', '.join(PROBES)}{nearest(name, PROBES)}")


def needs_training(names: Sequence[str]) -> bool:
    """Whether some of the probes learn from another split."""
    return bool(set(names) - {"rank"})


def open_training(images: ImageSet, train_split: str) -> ImageSet:
    """Return the training images beside those of a split; refuse a source that has only the latter."""
    train = open_images(images.url, train_split)
    if train.identity == images.identity:
        raise ConfigError(
            f"--train-split: got {train_split}, whose images are those of --split {images.split} in {images.url};"
            " wanted other images than the scored ones, as of a source with splits"
        )
    return train


def all_classes(train: ImageSet | None, test: ImageSet) -> list[str]:
    """Return the class names of both splits: a source lists only the classes that a split has."""
    if train is None or train.classes == test.classes:
        return list(test.classes)
    check_distinct(train.url, train.classes)
    check_distinct(test.url, test.classes)
    return list(dict.fromkeys([*train.classes, *test.classes]))


def numbered(outputs: Outputs, images: ImageSet, classes: Sequence[str]) -> Labelled:
    """Return the features with labels as places among `classes`."""
    assert outputs.features is not None
    if images.classes == tuple(classes):  # two classes may have one name
        return Labelled(outputs.features, outputs.labels)
    places = {name: place for place, name in enumerate(classes)}
    return Labelled(outputs.features, np.array([places[name] for name in images.classes], np.int64)[outputs.labels])


def probe_features(
    names: Sequence[str], train: Labelled | None, test: Labelled, num_classes: int, keys: Sequence[str]
) -> dict[str, Any]:
    """Return the scores of the probes by name; `keys` are those of the training images."""
    values: dict[str, Any] = {}
    if train is not None and "knn" in names:
        neighbours = [count for count in NEIGHBOURS if count <= len(train.labels)] or [len(train.labels)]
        for count, each in probe_knn(train, test, num_classes, neighbours).items():
            values |= _with_interval(f"knn{count}", each)
    if train is not None and "few_shot" in names:
        for shots, mean in mean_of_seeds(probe_few_shot(train, test, num_classes)).items():
            values |= {f"few_shot{shots}": mean.top1, f"few_shot{shots}_std": mean.std}
    if train is not None and "linear" in names:
        values |= _linear(train, test, num_classes, keys)
    if "rank" in names:
        separation = class_separation(*test, num_classes)
        values |= {"rankme": rankme(test.features), "effective_rank": effective_rank(test.features)}
        values |= {"separation_variance_share": separation.variance_share, "separation_cosine": separation.cosine}
    return values


def _linear(train: Labelled, test: Labelled, num_classes: int, keys: Sequence[str]) -> dict[str, Any]:
    """Return the score of a linear probe, and how it was fitted: by SGD where L-BFGS needs too much memory."""
    if is_too_large(len(train.labels), train.features.shape[1], num_classes):
        by_sgd = probe_linear_sgd(train, test, num_classes, keys)
        how = {"linear_fit": "sgd", "linear_lr": by_sgd.lr, "linear_epochs": by_sgd.epochs}
        return _with_interval("linear", by_sgd.score) | how
    fitted = probe_linear(train, test, num_classes, keys=keys)
    how = {"linear_fit": "l-bfgs", "linear_l2": fitted.l2, "linear_converged": fitted.converged}
    return _with_interval("linear", fitted.score) | how


def _with_interval(name: str, score: ProbeScore) -> dict[str, float]:
    interval = wilson(score.hits, score.images)
    return {name: score.top1, f"{name}_low": interval.low, f"{name}_high": interval.high}
