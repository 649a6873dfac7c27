"""Collapse and separation of features: RankMe, effective rank, and the distance of class means.

Shapes: N images, F features, K classes.

RankMe: Garrido et al., 2023. Effective rank: Roy and Vetterli, 2007. Cosine separation: Kornblith et al., 2021.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vitray.metrics.arrays import ProbeInputs, ProbeValues, unit_rows

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


def rank_scores(inputs: ProbeInputs) -> ProbeValues:
    """Return the scores of the probe `rank`; the separation of classes is of one label an image."""
    features_NF, labels_N = inputs.scored
    values: dict[str, float | None] = {"rankme": rankme(features_NF), "effective_rank": effective_rank(features_NF)}
    if not inputs.scored.several:
        separation = class_separation(features_NF, labels_N)
        values |= {
            "separation_variance_share": separation.variance_share,
            "separation_cosine": separation.cosine,
        }
    return ProbeValues(values)


def rankme(features_NF: np.ndarray) -> float:
    """Return exp of the entropy of the singular values, as shares of their sum plus 1e-7; 0 for features of zero."""
    values = singular_values(features_NF)
    if not values.any():
        return 0.0
    shares = values / values.sum() + EPSILON
    return float(np.exp(-(shares * np.log(shares)).sum()))


def effective_rank(features_NF: np.ndarray) -> float:
    """Return exp of the entropy of the singular values of the centered features; 0 if all images have the same."""
    mean_F = features_NF.mean(0, dtype=np.float64)
    # Equal rows leave rounding errors of the mean.
    peak = max(float(np.abs(part_BF - mean_F).max()) for _, part_BF in _parts(features_NF))
    if peak <= 8 * np.finfo(np.float64).eps * max(float(np.abs(part_BF).max()) for _, part_BF in _parts(features_NF)):
        return 0.0
    values = singular_values(features_NF, mean_F)
    shares = values[values > 0] / values.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def class_separation(features_NF: np.ndarray, labels_N: np.ndarray) -> Separation:
    """Return the separation of the classes that have images."""
    present, index_N, counts_K = np.unique(labels_N, return_inverse=True, return_counts=True)
    mean_F, width = features_NF.mean(0, dtype=np.float64), features_NF.shape[1]
    total, means_KF, directions_KF = 0.0, np.zeros((len(present), width)), np.zeros((len(present), width))
    for rows, part_BF in _parts(features_NF):
        total += float(((part_BF - mean_F) ** 2).sum())
        np.add.at(means_KF, index_N[rows], part_BF - mean_F)
        np.add.at(directions_KF, index_N[rows], unit_rows(part_BF))
    means_KF, directions_KF = means_KF / counts_K[:, None], directions_KF / counts_K[:, None]
    share = float(counts_K @ (means_KF**2).sum(1)) / total if total else None
    # The mean cosine of all pairs is the squared length of the mean of unit vectors.
    within = 1 - float((directions_KF**2).sum(1).mean())
    between = 1 - float((directions_KF.mean(0) ** 2).sum())
    return Separation(share, 1 - within / between if between > 1e-12 else None, len(present))


def singular_values(features_NF: np.ndarray, mean_F: np.ndarray | float = 0.0) -> np.ndarray:
    """Return the min(N, F) singular values in float64, less the mean; rows are reduced part by part to a triangle."""
    rest_MF = np.empty((0, features_NF.shape[1]))
    for _, part_BF in _parts(features_NF):
        rest_MF = np.concatenate([rest_MF, part_BF - mean_F])
        if len(rest_MF) > rest_MF.shape[1]:
            rest_MF = np.linalg.qr(rest_MF, mode="r")
    return np.linalg.svd(rest_MF, compute_uv=False)


def _parts(features_NF: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the rows in float64, a part at a time: a matrix in a file may be larger than the memory."""
    for start in range(0, len(features_NF), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        yield rows, features_NF[rows].astype(np.float64)
