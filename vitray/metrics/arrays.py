"""Checked inputs of scores and probes: logits, labels, hits, features.

Shapes: N images, K classes, F features.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from vitray.errors import ConfigError
from vitray.models.probabilities import Probability

# Rows that are checked or predicted at a time: a matrix in a file may be larger than the memory.
CHECKED_ROWS = 2**16


class Labeled(NamedTuple):
    """Features of images and their labels."""

    features: np.ndarray
    """N x F."""
    labels: np.ndarray
    """N classes, from 0; of several labels an image, the states of all classes, NxK: 1, 0, or -1 for unknown."""

    @property
    def several(self) -> bool:
        """Whether an image has several labels."""
        return self.labels.ndim > 1


class ProbeInputs(NamedTuple):
    """What a probe computes its scores from: all outputs of the network that its traits name."""

    scored: Labeled
    num_classes: int
    train: Labeled | None = None
    """What probes that learn learn from."""
    keys: Sequence[str] = ()
    """The keys of the training images."""
    logits: np.ndarray | None = None
    """N x K, of the scored images."""
    probability: Probability = "softmax"
    attention_distances: Callable[[], np.ndarray] | None = None
    """Computes the mean attention distances in pixels: levels x branches x heads x images."""

    @property
    def learned(self) -> Labeled:
        """The training images of a probe that learns."""
        assert self.train is not None, "a probe that learns is given training images"
        return self.train


class ProbeScore(NamedTuple):
    """The hits of a probe on the images of its test split."""

    images: int
    hits: int
    top1: float
    predictions: np.ndarray
    """N classes."""


class DrawnMap(NamedTuple):
    """A mean average precision, and that of each draw of a bootstrap: networks on the same images have equal draws."""

    estimate: float
    drawn: np.ndarray
    images: int


class ProbeValues(NamedTuple):
    """The scores of a probe."""

    scores: dict[str, Any]
    """By name. `_low` and `_high` after a name are the bounds of its interval, `_std` its deviation."""
    hits: Mapping[str, np.ndarray] = {}
    """Whether each of N images is a hit, or how often, of the score by which networks are compared."""
    maps: Mapping[str, DrawnMap] = {}
    """The same of several labels an image."""


def score_predictions(predictions_N: np.ndarray, labels_N: np.ndarray) -> ProbeScore:
    """Return the score of N predicted classes."""
    hits = int((predictions_N == labels_N).sum())
    return ProbeScore(len(labels_N), hits, hits / len(labels_N), predictions_N)


def by_rows(compute: Callable[[np.ndarray], np.ndarray], features_NF: np.ndarray) -> np.ndarray:
    """Return what `compute` makes of the rows, of a part of them at a time."""
    starts = range(0, len(features_NF), CHECKED_ROWS)
    return np.concatenate([compute(features_NF[start : start + CHECKED_ROWS]) for start in starts])


def predict(scores: Callable[[np.ndarray], np.ndarray], features_NF: np.ndarray) -> np.ndarray:
    """Return the class with the highest score of each row."""
    return by_rows(lambda part_BF: scores(part_BF).argmax(1), features_NF)


def check_matrix(name: str, values: Any, columns: str) -> np.ndarray:
    """Return `values` as a finite matrix of numbers with at least one row and one column."""
    matrix = np.asarray(values)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ConfigError(f"{name}: the shape is {matrix.shape}; expected images x {columns}, at least one of each")
    if matrix.dtype.kind not in "fiu":
        raise ConfigError(f"{name}: the type is {matrix.dtype}; expected numbers")
    for start in range(0, len(matrix), CHECKED_ROWS):
        is_finite = np.isfinite(matrix[start : start + CHECKED_ROWS])
        if not is_finite.all():
            row, column = np.argwhere(~is_finite)[0]
            raise ConfigError(f"{name}: row {start + row} holds {matrix[start + row, column]}; expected finite numbers")
    return matrix


def check_labels(labels: Any, images: int, num_classes: int, name: str = "labels") -> np.ndarray:
    """Return N labels as int64, each of them one of the classes."""
    values = np.asarray(labels)
    if values.shape != (images,):
        raise ConfigError(f"{name}: the shape is {values.shape}; expected ({images},), one label for each image")
    if values.dtype.kind not in "iu":
        raise ConfigError(f"{name}: the type is {values.dtype}; expected integers")
    wrong = np.flatnonzero((values < 0) | (values >= num_classes))
    if len(wrong):
        raise ConfigError(f"{name}: row {wrong[0]} has class {values[wrong[0]]}; expected 0 to {num_classes - 1}")
    return values.astype(np.int64)


def check_logits(logits: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return N x K logits and their N labels."""
    logits_NK = check_matrix("logits", logits, "classes")
    return logits_NK, check_labels(labels, *logits_NK.shape)


def unit_rows(features_NF: np.ndarray) -> np.ndarray:
    """Return the rows divided by their length; a row of zeros stays."""
    features_NF = features_NF.astype(np.result_type(features_NF.dtype, np.float32))
    return features_NF / np.maximum(np.linalg.norm(features_NF, axis=1, keepdims=True), 1e-12)


def check_probe(inputs: ProbeInputs) -> ProbeInputs:
    """Return the inputs with their features and labels checked; those of both splits have the same columns."""
    scored = _check_split("test", inputs.scored, inputs.num_classes)
    if inputs.train is None:
        return inputs._replace(scored=scored)
    train = _check_split("train", inputs.train, inputs.num_classes)
    wanted, got = train.features.shape[1], scored.features.shape[1]
    if got != wanted:
        raise ConfigError(f"test features: {got} columns; expected {wanted}, as many as the train features have")
    return inputs._replace(scored=scored, train=train)


def _check_split(split: str, data: Labeled, num_classes: int) -> Labeled:
    features_NF = check_matrix(f"{split} features", data.features, "features")
    if data.several:
        wanted = (len(features_NF), num_classes)
        if data.labels.shape != wanted:
            raise ConfigError(f"{split} labels: the shape is {data.labels.shape}; expected {wanted}, images x classes")
        return Labeled(features_NF, data.labels)
    return Labeled(features_NF, check_labels(data.labels, len(features_NF), num_classes, f"{split} labels"))


def draw_part(keys: Sequence[str], part: int, seed: int) -> np.ndarray:
    """Return N flags, `part` of them True, by a hash of each image's key: the same images in any order of the rows."""
    digests = [sha256(f"{seed}\0{key}".encode("utf-8", "surrogateescape")).digest() for key in keys]
    mask_N = np.zeros(len(keys), dtype=bool)
    mask_N[sorted(range(len(keys)), key=digests.__getitem__)[:part]] = True
    return mask_N


class Examples(NamedTuple):
    """Images with the predictions of one network."""

    images: np.ndarray
    """BHWC, uint8, as the network sees them."""
    labels: np.ndarray
    """B; of several labels an image, the states of all classes, BK."""
    predicted: np.ndarray
    """B; of several labels an image, whether each class is predicted, BK."""
    probabilities: np.ndarray
    """Of the predicted classes, B; of several labels an image, of all classes, BK."""
    attention: np.ndarray | None
    """Attention rollout to each patch, B x rows x columns; None for a network without attention rollout."""
