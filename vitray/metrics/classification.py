"""Scores of a classifier from its logits: exact counts, per-class scores, confusion, most confident mistakes.

Of equal logits, the lower class comes first, as in training's evaluation (`scores`).

Shapes: N images, K classes, D draws of a bootstrap.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vitray.metrics.arrays import check_logits
from vitray.metrics.scores import MAX_MISTAKES, Mistake
from vitray.models.probabilities import Probability

CHUNK_VALUES = 2**22
TOP = 5


class ClassScore(NamedTuple):
    """The scores of one class."""

    label: int
    images: int
    hits: int
    predicted: int
    """The number of images that are predicted as this class."""
    recall: float | None
    """None without images of the class."""
    precision: float | None
    """None if no image is predicted as this class."""
    confidence: float | None
    """Mean probability of the predicted class over the images of this class; None without images."""


class Classification(NamedTuple):
    """The scores of a classifier on a set of images."""

    images: int
    hits1: int
    hits5: int
    top1: float
    top5: float
    """The label is among the first five classes, or among all of fewer classes."""
    mean_per_class: float
    """Mean recall of the classes that have images."""
    nll: float
    """Mean cross-entropy of the labels by a softmax, for any training loss."""
    classes: Sequence[ClassScore]
    confusion: np.ndarray
    """K x K counts: labels in rows, predictions in columns."""
    mistakes: Sequence[Mistake]
    """The most confident ones; equal ones by row, descending."""
    predictions: np.ndarray
    """N predicted classes."""
    confidences: np.ndarray
    """N probabilities of the predicted classes."""
    ranks: np.ndarray
    """N ranks of the label among the classes, from 0: rank 0 is a hit."""

    @property
    def loss(self) -> float:
        """The mean cross-entropy, under the name that training's evaluation gives it."""
        return self.nll


def classify(
    logits_NK: Any, labels_N: Any, max_mistakes: int = MAX_MISTAKES, probability: Probability = "softmax"
) -> Classification:
    """Return the scores of N images; `probability` decides the confidences."""
    logits_NK, labels_N = check_logits(logits_NK, labels_N)
    images, num_classes = logits_NK.shape
    predictions_N = logits_NK.argmax(1)
    losses_N, ranks_N = np.empty(images), np.empty(images, np.int64)
    confidences_N = confidences(logits_NK, probability)
    for rows, log_BK in log_probability_chunks(logits_NK):
        losses_N[rows] = -np.take_along_axis(log_BK, labels_N[rows, None], 1)[:, 0]
        ranks_N[rows] = label_ranks(logits_NK[rows], labels_N[rows])
    confusion = np.bincount(labels_N * num_classes + predictions_N, minlength=num_classes**2)
    confusion = confusion.reshape(num_classes, num_classes)
    classes = _class_scores(confusion, np.bincount(labels_N, confidences_N, num_classes))
    hits1, hits5 = int((ranks_N == 0).sum()), int((ranks_N < TOP).sum())
    return Classification(
        images=images,
        hits1=hits1,
        hits5=hits5,
        top1=hits1 / images,
        top5=hits5 / images,
        mean_per_class=float(np.mean([each.recall for each in classes if each.recall is not None])),
        nll=float(losses_N.mean()),
        classes=classes,
        confusion=confusion,
        mistakes=_most_confident(confidences_N, labels_N, predictions_N, max_mistakes),
        predictions=predictions_N,
        confidences=confidences_N,
        ranks=ranks_N,
    )


def label_ranks(logits_NK: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
    """Return the number of classes that come before each label: higher logits, and equal ones of lower classes."""
    own_N1 = np.take_along_axis(logits_NK, labels_N[:, None], 1)
    lower_NK = np.arange(logits_NK.shape[1]) < labels_N[:, None]
    return ((logits_NK > own_N1) | ((logits_NK == own_N1) & lower_NK)).sum(1)


def confidences(logits_NK: np.ndarray, probability: Probability = "softmax", temperature: float = 1.0) -> np.ndarray:
    """Return the probability of each predicted class."""
    chunks = log_probability_chunks(logits_NK, temperature, probability)
    return np.concatenate([np.exp(log_BK.max(1)) for _, log_BK in chunks])


def log_probability_chunks(
    logits_NK: np.ndarray, temperature: float = 1.0, probability: Probability = "softmax"
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the rows of each chunk and their log-probabilities in float64."""
    from scipy.special import log_expit, log_softmax  # loads slowly

    images, num_classes = logits_NK.shape
    size = max(1, CHUNK_VALUES // num_classes)
    for start in range(0, images, size):
        rows = slice(start, min(start + size, images))
        scaled_BK = logits_NK[rows].astype(np.float64) / temperature
        yield rows, log_expit(scaled_BK) if probability == "sigmoid" else log_softmax(scaled_BK, axis=1)


def mean_per_class_of(num_classes: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return the statistic of a bootstrap over rows of (label, hit): the mean recall of each draw's classes."""

    def statistic(sample_DN2: np.ndarray) -> np.ndarray:
        draws = len(sample_DN2)
        cells_DN = sample_DN2[..., 0].astype(np.int64) + num_classes * np.arange(draws)[:, None]
        counts_DK, hits_DK = (
            np.bincount(cells_DN.ravel(), weights, draws * num_classes).reshape(draws, num_classes)
            for weights in (None, sample_DN2[..., 1].ravel())
        )
        return (hits_DK / np.maximum(counts_DK, 1)).sum(1) / (counts_DK > 0).sum(1)

    return statistic


def _class_scores(confusion: np.ndarray, confidence_K: np.ndarray) -> list[ClassScore]:
    """Return the score of every class; `confidence_K` are the sums over its images."""
    rows = zip(np.diag(confusion).tolist(), confusion.sum(1).tolist(), confusion.sum(0).tolist(), strict=True)
    return [
        ClassScore(
            label=label,
            images=images,
            hits=hits,
            predicted=predicted,
            recall=hits / images if images else None,
            precision=hits / predicted if predicted else None,
            confidence=float(confidence_K[label]) / images if images else None,
        )
        for label, (hits, images, predicted) in enumerate(rows)
    ]


def _most_confident(
    confidences_N: np.ndarray, labels_N: np.ndarray, predictions_N: np.ndarray, count: int
) -> list[Mistake]:
    wrong_M = np.flatnonzero(labels_N != predictions_N)[::-1]
    first_M = wrong_M[np.argsort(-confidences_N[wrong_M], kind="stable")[:count]]
    return [
        Mistake(float(confidences_N[row]), int(row), int(labels_N[row]), int(predictions_N[row])) for row in first_M
    ]
