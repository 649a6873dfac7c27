"""Calibration of probabilities: reliability bins, ECE, Brier score, NLL, and a temperature fitted on one half.

Logits are finite and labels are classes, as `classify` checks. All numbers are float64.
Shapes: N images, K classes, D draws, B bins.

ECE: Guo et al., "On Calibration of Modern Neural Networks", 2017.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitray.metrics.arrays import draw_part
from vitray.metrics.classification import confidences, log_probability_chunks
from vitray.metrics.intervals import CHUNK_VALUES, DRAWS, LEVEL, Interval
from vitray.models.probabilities import Probability

BINS = 15
# Draws of a calibrated network, each of all images.
CALIBRATED_DRAWS = 1_000
COLDEST, HOTTEST = 1e-3, 1e3
"""The bounds of a fitted temperature."""
MAX_STEPS = 100


class Bin(NamedTuple):
    """The images of one interval of confidence; an empty one has neither accuracy nor confidence."""

    low: float
    high: float
    images: int
    hits: int
    accuracy: float | None
    confidence: float | None


class Calibration(NamedTuple):
    """The calibration of a classifier on a set of images."""

    images: int
    ece: float
    adaptive_ece: float
    brier: float
    nll: float


class CalibrationError(NamedTuple):
    """The ECE of some images, and whether it is that of a calibrated network."""

    interval: Interval
    """It covers the error of infinitely many images, in the same bins, with a probability of at least its level."""
    calibrated: float
    """The mean ECE of a calibrated network with the same confidences."""
    p: float
    """Of calibration: how often a calibrated network would have as large an ECE."""


class Temperature(NamedTuple):
    """The temperature with the lowest NLL on one half of the images, and the calibration of the other half."""

    temperature: float
    at_bound: bool
    """The NLL falls up to a bound of the search, as it does if every prediction is right."""
    fitted: int
    """The number of images that the temperature is fitted on."""
    before: Calibration
    after: Calibration


def reliability(
    logits_NK: np.ndarray,
    labels_N: np.ndarray,
    bins: int = BINS,
    equal_mass: bool = False,
    probability: Probability = "softmax",
) -> list[Bin]:
    """Return the bins of a reliability diagram of the predicted class.

    Bins of equal width contain their upper bound. Bins of equal mass have as many images each, except that images of
    equal confidence share a bin; their bounds are the lowest and the highest confidence.
    """
    return _bins(*_confidences(logits_NK, labels_N, probability), bins, equal_mass)


def adaptive_ece(logits_NK: np.ndarray, labels_N: np.ndarray, probability: Probability = "softmax") -> float:
    """Return the expected calibration error of the predicted class with bins of equal mass."""
    return _gap(reliability(logits_NK, labels_N, equal_mass=True, probability=probability))


def brier(
    logits_NK: np.ndarray, labels_N: np.ndarray, temperature: float = 1.0, probability: Probability = "softmax"
) -> float:
    """Return the mean over images of the squared errors of all K probabilities: from 0 to 2, or to K for sigmoids."""
    total = 0.0
    for rows, log_BK in log_probability_chunks(logits_NK, temperature, probability):
        error_BK = np.exp(log_BK)
        error_BK[np.arange(len(error_BK)), labels_N[rows]] -= 1
        total += float((error_BK**2).sum())
    return total / len(labels_N)


def calibration_scores(
    logits_NK: np.ndarray, labels_N: np.ndarray, temperature: float = 1.0, probability: Probability = "softmax"
) -> Calibration:
    """Return all scores of calibration, of logits that are divided by a temperature; the NLL is that of a softmax."""
    confidences_N, hits_N = _confidences(logits_NK, labels_N, probability, temperature)
    chunks = log_probability_chunks(logits_NK, temperature)
    total = sum(float(np.take_along_axis(log_BK, labels_N[rows, None], 1).sum()) for rows, log_BK in chunks)
    return Calibration(
        images=len(labels_N),
        ece=_gap(_bins(confidences_N, hits_N, BINS, False)),
        adaptive_ece=_gap(_bins(confidences_N, hits_N, BINS, True)),
        brier=brier(logits_NK, labels_N, temperature, probability),
        nll=-total / len(labels_N),
    )


def fit_temperature(logits_NK: np.ndarray, labels_N: np.ndarray, keys: Sequence[str]) -> Temperature:
    """Return the temperature of one half of the images, with the calibration of the other half before and after.

    A hash of the keys chooses the half. There are at least two images.
    """
    half_N = draw_part(keys, len(keys) // 2, seed=0)
    temperature = best_temperature(logits_NK[half_N], labels_N[half_N])
    rest = logits_NK[~half_N], labels_N[~half_N]
    return Temperature(
        temperature=temperature,
        at_bound=temperature in (COLDEST, HOTTEST),
        fitted=len(keys) // 2,
        before=calibration_scores(*rest),
        after=calibration_scores(*rest, temperature),
    )


def best_temperature(logits_NK: np.ndarray, labels_N: np.ndarray) -> float:
    """Return the temperature with the lowest NLL, within the bounds.

    The NLL is convex in the inverse temperature: Newton's steps, and bisection where one leaves the bracket.
    """
    low, high, inverse = 1 / HOTTEST, 1 / COLDEST, 1.0
    for bound, sign, temperature in ((high, -1, COLDEST), (low, 1, HOTTEST)):
        if sign * _slope(logits_NK, labels_N, bound)[0] >= 0:
            return temperature
    for _ in range(MAX_STEPS):
        slope, curvature = _slope(logits_NK, labels_N, inverse)
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        step = inverse - slope / curvature if curvature > 0 else high
        step = step if low < step < high else (low * high) ** 0.5
        if abs(step - inverse) <= 1e-10 * inverse:
            break
        inverse = step
    return 1 / inverse


def calibration_error(
    logits_NK: np.ndarray, labels_N: np.ndarray, probability: Probability = "softmax"
) -> CalibrationError:
    """Return the ECE with its interval and a test.

    ECE is a sum of distances, so noise adds to it: near calibration a bootstrap's interval lies above the true error.
    But an error is at most the sum of the distances of the noise, of which the interval has the 95 % quantile on both
    sides: by the triangle inequality it never covers less.
    """
    confidences_N, hits_N = _confidences(logits_NK, labels_N, probability)
    images, bins_N = len(labels_N), _equal_width(confidences_N, BINS)
    gaps_N, spread_N = hits_N - confidences_N, confidences_N * (1 - confidences_N)
    estimate = float(np.abs(np.bincount(bins_N, gaps_N, BINS)).sum()) / images
    rng = np.random.default_rng(0)
    # Some images without a mistake seem to have no noise: a bin has at least that of calibrated ones.
    variance_B = np.maximum(np.bincount(bins_N, gaps_N**2, BINS), np.bincount(bins_N, spread_N, BINS))
    noise_DB = rng.standard_normal((DRAWS, BINS)) * np.sqrt(variance_B)
    reach = float(np.quantile(np.abs(noise_DB).sum(1), LEVEL)) / images
    errors_D = _calibrated_errors(confidences_N, bins_N, rng)
    # 1e-12: errors that are equal but for rounding.
    p = (1 + int((errors_D >= estimate - 1e-12).sum())) / (1 + len(errors_D))
    interval = Interval(estimate, max(0.0, estimate - reach), estimate + reach, LEVEL)
    return CalibrationError(interval, float(errors_D.mean()), p)


def _calibrated_errors(confidences_N: np.ndarray, bins_N: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the ECE of draws in which each image is a hit with the probability of its confidence."""
    order_N = np.argsort(bins_N, kind="stable")
    sorted_N, starts = confidences_N[order_N], np.flatnonzero(np.diff(bins_N[order_N], prepend=-1))
    rows, errors = max(1, CHUNK_VALUES // len(sorted_N)), list[np.ndarray]()
    for start in range(0, CALIBRATED_DRAWS, rows):
        drawn = (min(rows, CALIBRATED_DRAWS - start), len(sorted_N))
        gaps_DB = np.add.reduceat((rng.random(drawn) < sorted_N) - sorted_N, starts, axis=1)
        errors.append(np.abs(gaps_DB).sum(1) / len(sorted_N))
    return np.concatenate(errors)


def _slope(logits_NK: np.ndarray, labels_N: np.ndarray, inverse: float) -> tuple[float, float]:
    """Return the first and second derivative of the NLL by the inverse temperature."""
    slope = curvature = 0.0
    for rows, log_BK in log_probability_chunks(logits_NK, 1 / inverse):
        # Logits less the highest of a row: their products with probabilities stay exact for large ones.
        values_BK = logits_NK[rows].astype(np.float64)
        values_BK -= values_BK.max(1, keepdims=True)
        shares_BK = np.exp(log_BK)
        means_B = np.einsum("bk,bk->b", shares_BK, values_BK)
        slope += float((means_B - np.take_along_axis(values_BK, labels_N[rows, None], 1)[:, 0]).sum())
        curvature += float((np.einsum("bk,bk,bk->b", shares_BK, values_BK, values_BK) - means_B**2).sum())
    return slope / len(labels_N), curvature / len(labels_N)


def _confidences(
    logits_NK: np.ndarray, labels_N: np.ndarray, probability: Probability = "softmax", temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of each predicted class, and whether it is the label."""
    return confidences(logits_NK, probability, temperature), logits_NK.argmax(1) == labels_N


def _equal_width(confidences: np.ndarray, bins: int) -> np.ndarray:
    """Return the bin of each confidence, of `bins` intervals without their lower bound."""
    return np.clip(np.searchsorted(np.linspace(0, 1, bins + 1), confidences, side="left") - 1, 0, bins - 1)


def _equal_mass(confidences_N: np.ndarray, bins: int) -> np.ndarray:
    """Return the bin of each confidence by its rank; equal ones have the rank of the first of them."""
    return np.searchsorted(np.sort(confidences_N), confidences_N, side="left") * bins // len(confidences_N)


def _bins(confidences_N: np.ndarray, hits_N: np.ndarray, bins: int, equal_mass: bool) -> list[Bin]:
    index_N = (_equal_mass if equal_mass else _equal_width)(confidences_N, bins)
    edges, found = np.linspace(0, 1, bins + 1).tolist(), []
    for index in range(bins):
        inside_B, hits = confidences_N[index_N == index], int(hits_N[index_N == index].sum())
        if len(inside_B):
            low, high = (inside_B.min(), inside_B.max()) if equal_mass else edges[index : index + 2]
            means = hits / len(inside_B), float(np.sort(inside_B).mean())
            found.append(Bin(float(low), float(high), len(inside_B), hits, *means))
        elif not equal_mass:
            found.append(Bin(edges[index], edges[index + 1], 0, 0, None, None))
    return found


def _gap(bins: list[Bin]) -> float:
    """Return the mean distance of accuracy and confidence, weighted by the images of a bin."""
    gaps = [
        each.images * abs(each.accuracy - each.confidence)
        for each in bins
        if each.accuracy is not None and each.confidence is not None
    ]
    return sum(gaps) / sum(each.images for each in bins)
