"""Paired differences between the cells of a thing, with Holm's correction for their number."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy import stats

from vitray.metrics.intervals import holm
from vitray.sweeps.report.results import CONFIDENCE, Interval, interval_of

NOT_MEASURED = "not measured"
Scores = Mapping[str, Mapping[int, float]]
"""{cell: {seed: score}}"""


class Difference(NamedTuple):
    """The mean difference of two cells over their common seeds; without two of them, not measured."""

    one: str
    other: str
    interval: Interval | None
    p: float | None
    """Student's, for no difference, after Holm's correction."""

    @property
    def is_clear(self) -> bool:
        """Whether it is significant among all differences of its thing."""
        return self.p is not None and self.p < 1 - CONFIDENCE

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.interval is None:
            return NOT_MEASURED
        higher = f"{self.other if self.interval.mean < 0 else self.one} is higher"
        return higher if self.is_clear else f"{higher}, if taken alone" if self.interval.is_clear else "not significant"


def differences(pairs: Sequence[tuple[str, str]], scores: Scores) -> list[Difference]:
    """Return the differences of pairs of cells, corrected for their number."""
    intervals = [paired(scores[one], scores[other]) for one, other in pairs]
    adjusted = iter(holm([p_of(interval) for interval in intervals if interval]))
    return [
        Difference(*pair, interval, next(adjusted) if interval else None)
        for pair, interval in zip(pairs, intervals, strict=True)
    ]


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Interval | None:
    """Return the mean paired difference over common seeds with Student's interval; None below two seeds."""
    seeds = sorted(one.keys() & other.keys())
    return interval_of([one[seed] - other[seed] for seed in seeds]) if len(seeds) > 1 else None


def change(pairs: Sequence[tuple[str, str]], scores: Scores) -> Interval | None:
    """Return by how much a first difference of two cells is above a second one, paired by seed."""
    first, second = (
        {seed: scores[a][seed] - scores[b][seed] for seed in scores[a] if seed in scores[b]} for a, b in pairs
    )
    return paired(first, second)


def p_of(interval: Interval) -> float:
    """Return Student's two-sided p of a mean of zero; 1 without a spread, which gives no verdict."""
    half, freedom = (interval.high - interval.low) / 2, interval.n - 1
    if half <= 1e-9 * abs(interval.mean) or math.isnan(half):
        return 1.0
    error = half / stats.t.ppf((1 + CONFIDENCE) / 2, freedom)
    return float(2 * stats.t.sf(abs(interval.mean) / error, freedom))
