"""Collapse and separation of features: RankMe, effective rank, and the distance of class means.

Shapes: N images, F features, K classes.

RankMe: Garrido et al., 2023. Effective rank: Roy and Vetterli, 2007. Cosine separation: Kornblith et al., 2021.
"""

from typing import Any, NamedTuple

import numpy as np

from vitray.evaluation.arrays import Labelled, check_features, check_matrix, unit_rows

EPSILON = 1e-7
CHUNK_ROWS = 8192


class Separation(NamedTuple):
    """The distance between class means compared with the spread of the features; None where nothing varies."""

    variance_share: float | None
    """The variance of the class means, weighted by images, as a share of all variance: 1 if classes are points."""
    cosine: float | None
    """1 - the mean cosine distance within classes / the mean between all images, classes weighted equally."""
    classes: int
    """The number of classes that have images."""


def rankme(features_NF: Any) -> float:
    """Return exp of the entropy of the singular values, as shares of their sum plus 1e-7; 0 for features of zero."""
    values = singular_values(features_NF)
    if not values.any():
        return 0.0
    shares = values / values.sum() + EPSILON
    return float(np.exp(-(shares * np.log(shares)).sum()))


def effective_rank(features_NF: Any) -> float:
    """Return exp of the entropy of the singular values of the centred features; 0 if all images have the same."""
    features_NF = check_matrix("features", features_NF, "features")
    centred_NF = features_NF - features_NF.mean(0, dtype=np.float64)
    # Equal rows leave rounding errors of the mean.
    if np.abs(centred_NF).max() <= 8 * np.finfo(np.float64).eps * np.abs(features_NF).max():
        return 0.0
    values = singular_values(centred_NF)
    shares = values[values > 0] / values.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def class_separation(features_NF: Any, labels_N: Any, num_classes: int) -> Separation:
    """Return the separation of the classes that have images."""
    features_NF, labels_N = check_features("class", Labelled(features_NF, labels_N), num_classes)
    features_NF = features_NF.astype(np.float64)
    present, index_N, counts_K = np.unique(labels_N, return_inverse=True, return_counts=True)
    centred_NF = features_NF - features_NF.mean(0)
    total = float((centred_NF**2).sum())
    means_KF = _class_means(centred_NF, index_N, counts_K)
    share = float(counts_K @ (means_KF**2).sum(1)) / total if total else None
    # The mean cosine of all pairs is the squared length of the mean of unit vectors.
    directions_KF = _class_means(unit_rows(features_NF), index_N, counts_K)
    within = 1 - float((directions_KF**2).sum(1).mean())
    between = 1 - float((directions_KF.mean(0) ** 2).sum())
    return Separation(share, 1 - within / between if between > 1e-12 else None, len(present))


def singular_values(features_NF: Any) -> np.ndarray:
    """Return the min(N, F) singular values in float64; large N are reduced chunk by chunk to a triangle."""
    features_NF = check_matrix("features", features_NF, "features")
    rest_MF = np.empty((0, features_NF.shape[1]))
    for start in range(0, len(features_NF), CHUNK_ROWS):
        rest_MF = np.concatenate([rest_MF, features_NF[start : start + CHUNK_ROWS].astype(np.float64)])
        if len(rest_MF) > rest_MF.shape[1]:
            rest_MF = np.linalg.qr(rest_MF, mode="r")
    return np.linalg.svd(rest_MF, compute_uv=False)


def _class_means(features_NF: np.ndarray, index_N: np.ndarray, counts_K: np.ndarray) -> np.ndarray:
    sums_KF = np.zeros((len(counts_K), features_NF.shape[1]))
    np.add.at(sums_KF, index_N, features_NF)
    return sums_KF / counts_K[:, None]
