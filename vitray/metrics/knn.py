"""Weighted nearest neighbors of frozen features, as in DINOv2's evaluation.

Similarity is the cosine. The weights of an image are the softmax of its largest similarities divided by a temperature;
k neighbors vote with the first k weights. Of equal similarities the lower training row comes first, of equal votes the
lower class.

Memory is bounded for any number of images: blocks of test images meet blocks of training images, of which the nearest
so far are kept. Features may lie in a file. scikit-learn's neighbors leave the order of equal similarities open.

Of several labels an image, a class has the share of the weights of those neighbors, among all of which it is known.

Shapes: B test images of a block, N training images of one, F features, K classes, T the largest k.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from vitray.metrics.arrays import Labeled, ProbeInputs, ProbeScore, ProbeValues, score_predictions, unit_rows
from vitray.metrics.intervals import proportion_values
from vitray.metrics.multilabel import draw_maps, map_values

NEIGHBORS = (10, 20)
TEMPERATURE = 0.07
BLOCK = 4096
"""Images of a block, of training and of test images."""


def knn_scores(inputs: ProbeInputs) -> ProbeValues:
    """Return the scores of the probe `knn`, and the hits of its smallest number of neighbors."""
    images = len(inputs.learned.labels)
    neighbors = [count for count in NEIGHBORS if count <= images] or [images]
    values: dict[str, float] = {}
    if inputs.scored.several:
        found = {
            f"knn{count}_map": draw_maps(scores_NK, inputs.scored.labels)
            for count, scores_NK in label_scores(inputs.learned, inputs.scored.features, neighbors).items()
        }
        for name, drawn_map in found.items():
            values |= map_values(name, drawn_map)
        first = f"knn{neighbors[0]}_map"
        return ProbeValues(values, maps={first: found[first]})
    scores = probe_knn(inputs.learned, inputs.scored, inputs.num_classes, neighbors)
    for count, score in scores.items():
        values |= proportion_values(f"knn{count}", score.hits, score.images)
    first = neighbors[0]
    return ProbeValues(values, {f"knn{first}": scores[first].predictions == inputs.scored.labels})


def probe_knn(
    train: Labeled,
    test: Labeled,
    num_classes: int,
    neighbors: Sequence[int] = NEIGHBORS,
    temperature: float = TEMPERATURE,
) -> dict[int, ProbeScore]:
    """Return {k: score}; each k is at most the number of training images."""
    predictions_kN = {k: np.empty(len(test.labels), np.int64) for k in neighbors}
    for start, rows_BT, weights_BT in _weighted(train.features, test.features, max(neighbors), temperature):
        labels_BT = train.labels[rows_BT]
        for k, predictions_N in predictions_kN.items():
            predictions_N[start : start + BLOCK] = _vote(labels_BT[:, :k], weights_BT[:, :k], num_classes)
    return {k: score_predictions(predictions_N, test.labels) for k, predictions_N in predictions_kN.items()}


def label_scores(
    train: Labeled, test_NF: np.ndarray, neighbors: Sequence[int] = NEIGHBORS, temperature: float = TEMPERATURE
) -> dict[int, np.ndarray]:
    """Return {k: scores (NK)} of several labels an image, from 0 to 1.

    A class of which no neighbor is known has its share of the training images of which it is.
    """
    present_K, known_K = (train.labels == 1).sum(0), (train.labels >= 0).sum(0)
    share_K = present_K / np.maximum(known_K, 1)
    scores_kNK = {k: np.empty((len(test_NF), len(share_K)), np.float64) for k in neighbors}
    for start, rows_BT, weights_BT in _weighted(train.features, test_NF, max(neighbors), temperature):
        present_BK, known_BK = np.zeros((2, len(rows_BT), len(share_K)))
        for place, rows_B in enumerate(rows_BT.T):
            states_BK, weight_B1 = train.labels[rows_B], weights_BT[:, place, None]
            present_BK += weight_B1 * (states_BK == 1)
            known_BK += weight_B1 * (states_BK >= 0)
            if place + 1 in scores_kNK:
                scores_BK = present_BK / np.where(known_BK > 0, known_BK, 1)
                scores_kNK[place + 1][start : start + BLOCK] = np.where(known_BK > 0, scores_BK, share_K)
    return scores_kNK


def _weighted(
    train_NF: np.ndarray, test_NF: np.ndarray, count: int, temperature: float
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield blocks of test images: the first, and the rows and weights (BT) of the nearest training images."""
    for start in range(0, len(test_NF), BLOCK):
        rows_BT, similar_BT = _neighbors(train_NF, test_NF[start : start + BLOCK], count)
        logits_BT = similar_BT.astype(np.float64) / temperature
        weights_BT = np.exp(logits_BT - logits_BT[:, :1])
        yield start, rows_BT, weights_BT / weights_BT.sum(1, keepdims=True)


def _neighbors(train_NF: np.ndarray, test_BF: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the nearest training images of each test image, in order, and their similarities."""
    test_BF = unit_rows(test_BF)
    rows_BT, similar_BT = np.empty((len(test_BF), 0), np.int64), np.empty((len(test_BF), 0), np.float32)
    for start in range(0, len(train_NF), BLOCK):
        similar_BN = test_BF @ unit_rows(train_NF[start : start + BLOCK]).T
        first_BT = nearest_rows(similar_BN, min(count, similar_BN.shape[1]))
        # Of equal similarities those of earlier blocks stand first, so the lower row stays ahead.
        similar_BM = np.concatenate([similar_BT, np.take_along_axis(similar_BN, first_BT, 1)], axis=1)
        rows_BM = np.concatenate([rows_BT, first_BT + start], axis=1)
        kept_BT = nearest_rows(similar_BM, min(count, similar_BM.shape[1]))
        rows_BT, similar_BT = (np.take_along_axis(values_BM, kept_BT, 1) for values_BM in (rows_BM, similar_BM))
    return rows_BT, similar_BT


def nearest_rows(similar_BN: np.ndarray, count: int) -> np.ndarray:
    """Return the columns of the largest values of each row, in order; equal values by column."""
    least_B1 = np.partition(similar_BN, -count, axis=1)[:, -count, None]
    # More columns than `count` may equal the least value: the columns above it come first, then the lowest others.
    above_BN, equal_BN = similar_BN > least_B1, similar_BN == least_B1
    chosen_BN = above_BN | (equal_BN & (equal_BN.cumsum(1) <= count - above_BN.sum(1, keepdims=True)))
    first_BT = np.nonzero(chosen_BN)[1].reshape(-1, count)
    order_BT = np.argsort(-np.take_along_axis(similar_BN, first_BT, 1), axis=1, kind="stable")
    return np.take_along_axis(first_BT, order_BT, 1)


def _vote(labels_BT: np.ndarray, weights_BT: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the class with the largest sum of weights."""
    cells_BT = labels_BT + num_classes * np.arange(len(labels_BT))[:, None]
    votes = np.bincount(cells_BT.ravel(), weights_BT.ravel(), len(labels_BT) * num_classes)
    return votes.reshape(-1, num_classes).argmax(1)
