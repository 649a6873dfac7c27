"""What a few seeds say: the mean and spread of a group, and how far two groups lie apart, by Student's t."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class Summary(NamedTuple):
    """The values of some seeds."""

    mean: float
    sd: float | None
    """Of a sample, by n - 1; None of a single value."""
    n: int


class Interval(NamedTuple):
    """A mean of n differences, and where the true one lies with a confidence of 95 %."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def is_clear(self) -> bool:
        """Whether zero lies outside. Differences that are all the same, as two seeds can be, have no spread to tell."""
        return (self.low > 0 or self.high < 0) and self.high - self.low > 1e-9 * abs(self.mean)


def summary_of(values: Sequence[float]) -> Summary:
    """The summary of one value or more."""
    return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def interval_of(differences: Sequence[float]) -> Interval:
    """The interval of two paired differences or more."""
    mean, sd, n = summary_of(differences)
    assert sd is not None, "one difference has no interval"
    half = student_t(CONFIDENCE, n - 1) * sd / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def student_t(share: float, freedom: int) -> float:
    """The t such that Student's distribution has `share` of its mass between -t and t."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # as far as a float can be halved
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, freedom) < share else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _share_within(angle: float, freedom: int) -> float:
    """Student's mass between -t and t, t being sqrt(freedom) tan(angle): a finite sum, as `freedom` is whole."""
    # Abramowitz and Stegun, 26.7.3 and 26.7.4.
    odd, cos = freedom % 2, math.cos(angle)
    term, total = cos if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        term *= (power - 1) / power * cos**2 if power > 1 else 1
        total += term
    inside = math.sin(angle) * total
    return (angle + inside) * 2 / math.pi if odd else inside
