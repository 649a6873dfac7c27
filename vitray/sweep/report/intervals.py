"""Statistics of a few seeds: mean and spread of a group, and Student's interval of paired differences."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class Summary(NamedTuple):
    """Mean and spread of one value or more."""

    mean: float
    sd: float | None
    """Of a sample, by n - 1; None for a single value."""
    n: int


class Interval(NamedTuple):
    """A mean of n differences and its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def is_clear(self) -> bool:
        """Whether zero lies outside. Equal differences, which two seeds can have, give no spread and so no verdict."""
        return (self.low > 0 or self.high < 0) and self.high - self.low > 1e-9 * abs(self.mean)


def summary_of(values: Sequence[float]) -> Summary:
    """Return the summary of one value or more."""
    return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def interval_of(differences: Sequence[float]) -> Interval:
    """Return the interval of two paired differences or more."""
    from scipy.special import stdtrit  # loads slowly, and only sweeps that repeat seeds use it

    mean, sd, n = summary_of(differences)
    assert sd is not None, "one difference has no interval"
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * sd / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)
