"""Uncertainty of scores: Wilson's and Bonett and Price's intervals, the bootstrap, and comparisons of two models.

Of scipy's functions for these, `scipy.stats` loads for seconds, its Wilson interval takes no mean of hits, and its
bootstrap draws rows where counts of few values suffice; so the three formulas are here, and tests compare them.

Shapes: N images, D draws, M models.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vitray.metrics.arrays import check_matrix

LEVEL = 0.95
DRAWS = 10_000
CHUNK_VALUES = 2**22
FEW_VALUES = 64
# The chance to find a difference that is there, for the number of images that would tell.
POWER = 0.8
# A smaller difference, in shares of the images, is not worth more of them.
LEAST_DIFFERENCE = 0.01


class Interval(NamedTuple):
    """An estimate and its two-sided interval."""

    estimate: float
    low: float
    high: float
    level: float


class Difference(NamedTuple):
    """The mean of a less the mean of b over the same images, and its interval."""

    difference: float
    low: float
    high: float
    level: float
    images: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.low > 0 or self.high < 0


class McNemar(NamedTuple):
    """McNemar's exact two-sided test that an image which only one model has right is equally likely to be either's.

    Of means of hits over repetitions, as few-shot scores have them: an image which one model has right more often.
    """

    only_a: int
    only_b: int
    p_value: float


class Comparison(NamedTuple):
    """Two models on the same images."""

    difference: Difference
    p_value: float
    mcnemar: McNemar | None = None
    """The test that p is of, of hits; None of a score that no image has by itself, whose p is the bootstrap's."""
    tests: int = 1
    """The number of comparisons that p is corrected for."""
    corrected_p: float = 1.0
    """p by Holm's correction; with one test, the same."""

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero and the test rejects equality; of few images an interval misleads."""
        return self.difference.excludes_zero and self.corrected_p < 1 - self.difference.level

    @property
    def images_to_tell(self) -> int:
        """The images on which a difference as large as this one, or of one point if it is smaller, would be found.

        With a chance of `POWER`, among as many tests; the spread is that of these images.
        """
        from scipy.special import ndtri  # loads slowly

        _, low, high, level, images = self.difference
        error = (high - low) / (2 * float(ndtri((1 + level) / 2)))
        wanted = float(ndtri(1 - (1 - level) / (2 * self.tests)) + ndtri(POWER)) * error
        return math.ceil(images * (wanted / max(abs(self.difference.difference), LEAST_DIFFERENCE)) ** 2)

    def sentence(self) -> str:
        """Return the verdict in plain words."""
        difference, test = self.difference, self.mcnemar
        verdict = "is significant" if self.significant else "is not significant"
        corrected = f", corrected for {self.tests} comparisons" if self.tests > 1 else ""
        how = "bootstrap over images:"
        if test is not None:
            how = f"McNemar's exact test: {test.only_a:,} images right only for the first, {test.only_b:,} only for the"
            how += " second,"
        return (
            f"The difference of {100 * difference.difference:+.2f} points on {difference.images:,} images {verdict} "
            f"({100 * difference.level:g} % interval {100 * difference.low:+.2f} to {100 * difference.high:+.2f}; "
            f"{how} p = {self.corrected_p:.2g}{corrected})."
        )


def proportion_values(name: str, hits: int, images: int) -> dict[str, float]:
    """Return a proportion under a name, and the bounds of its Wilson interval under `_low` and `_high`."""
    interval = wilson(hits, images)
    return {name: hits / images, f"{name}_low": interval.low, f"{name}_high": interval.high}


def wilson(hits: float, n: int, level: float = LEVEL) -> Interval:
    """Return Wilson's score interval of a proportion; hits may be a mean over repetitions."""
    from scipy.special import ndtri  # loads slowly

    assert 0 <= hits <= n, f"{hits} hits of {n} images"
    z, share = float(ndtri((1 + level) / 2)), hits / n
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # The bounds of no hits and of only hits are exact; rounding would leave 1e-17.
    return Interval(share, float(center - half) if hits else 0.0, float(center + half) if hits < n else 1.0, level)


def bootstrap(
    values: Any,
    statistic: Callable[[np.ndarray], np.ndarray] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Interval:
    """Return the percentile interval of a statistic of N values, or of N rows of values.

    `statistic` takes D draws (D x N, or D x N x columns) and returns D numbers. Without it, the statistic is the mean.
    Draws are made in chunks, so the memory is bounded.
    """
    array = np.asarray(values, dtype=np.float64)
    rng, images = np.random.default_rng(seed), len(array)
    if statistic is None:
        distinct, counts = np.unique(array, return_counts=True)
        estimate = float(distinct @ counts) / images
        if len(distinct) <= FEW_VALUES:  # a draw is a multinomial count of each value
            drawn_D = rng.multinomial(images, counts / images, draws) @ distinct / images
            return _percentiles(estimate, drawn_D, level)
    else:
        estimate = float(statistic(array[None])[0])
    size = max(1, CHUNK_VALUES // array.size)
    drawn_D = np.empty(draws)
    for start in range(0, draws, size):
        stop = min(start + size, draws)
        sample = array.take(rng.integers(0, images, (stop - start, images), dtype=np.uint32), axis=0)
        drawn_D[start:stop] = sample.mean(1) if statistic is None else statistic(sample)
    return _percentiles(estimate, drawn_D, level)


def compare_hits(hits_a: Any, hits_b: Any) -> Comparison:
    """Return the mean difference a - b of two models on the same N images, and McNemar's test.

    The interval is Bonett and Price's: that of the mean with two more images, one right only for a and one only for b.
    Thus models that differ on none of few images are not certain to be equal, as they are by a bootstrap.
    """
    from scipy.special import bdtr, ndtri  # loads slowly

    a_N, b_N = np.asarray(hits_a, dtype=np.float64), np.asarray(hits_b, dtype=np.float64)
    assert a_N.shape == b_N.shape, f"hits of {a_N.shape} and {b_N.shape}: other images"
    apart_N, images = a_N - b_N, len(a_N)
    center = float(apart_N.sum()) / (images + 2)
    variance = (float(apart_N @ apart_N) + 2) / (images + 2) - center**2
    reach = float(ndtri((1 + LEVEL) / 2)) * math.sqrt(variance / (images + 2))
    low, high = max(center - reach, -1.0), min(center + reach, 1.0)
    difference = Difference(float(apart_N.mean()), low, high, LEVEL, images)
    only_a, only_b = int((a_N > b_N).sum()), int((b_N > a_N).sum())
    tail = float(bdtr(min(only_a, only_b), only_a + only_b, 0.5)) if only_a + only_b else 1.0
    p_value = min(1.0, 2 * tail)
    return Comparison(difference, p_value, McNemar(only_a, only_b, p_value), 1, p_value)


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons with the p values that hold for all of them together."""
    p_values = holm([each.p_value for each in comparisons])
    return [each._replace(tests=len(comparisons), corrected_p=p) for each, p in zip(comparisons, p_values, strict=True)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values that hold for all of them together: the smallest times n, the next times n - 1, ..."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def agreement(predictions_MN: Any) -> np.ndarray:
    """Return the M x M shares of images on which two models predict the same class."""
    predictions_MN = check_matrix("predictions", predictions_MN, "images")
    return np.stack([(predictions_MN == row_N).mean(1) for row_N in predictions_MN])


def _percentiles(estimate: float, drawn_D: np.ndarray, level: float) -> Interval:
    low, high = np.quantile(drawn_D, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return Interval(estimate, low, high, level)
