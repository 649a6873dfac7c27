"""Differences between the cells of a thing: Dunnett's from a control, or Tukey's of all pairs."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cifar10_texts import Thing
from scipy import stats

from vitray.metrics.groups import GroupDifference, Pooled, dunnett, pool, tukey
from vitray.metrics.intervals import LEVEL

NOT_MEASURED = "not measured"
Scores = Mapping[str, Mapping[int, float]]
"""{cell: {seed: score}}"""


class Difference(NamedTuple):
    """A difference of two cells; without two seeds of both, not measured."""

    one: str
    other: str
    found: GroupDifference | None

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.found is None:
            return NOT_MEASURED
        higher = self.other if self.found.mean < 0 else self.one
        return f"{higher} is higher" if self.found.is_clear else "not significant"


class Interval(NamedTuple):
    """A mean and its 95 % interval by Student."""

    mean: float
    low: float
    high: float


def pooled_cells(thing: Thing, scores: Scores) -> Pooled | None:
    """Return the cells with several seeds under one variance."""
    return pool({label: each for label, each in scores.items() if len(each) > 1}, thing.shares_networks)


def differences(thing: Thing, pairs: Sequence[tuple[str, str]], scores: Scores) -> list[Difference]:
    """Return the differences of pairs of cells; intervals and p hold for all of them together."""
    pooled, found = pooled_cells(thing, scores), dict[tuple[str, str], GroupDifference]()
    if pooled is not None and thing.control is None:
        known = [pair for pair in pairs if {*pair} <= {*pooled.groups}]
        found = dict(zip(known, tukey(pooled, known), strict=True))
    elif pooled is not None and thing.control in pooled.groups:
        found = {(label, thing.control): each for label, each in dunnett(pooled, thing.control).items()}
    return [Difference(*pair, found.get(pair)) for pair in pairs]


def contrast(pooled: Pooled | None, weights: Mapping[str, float]) -> Interval | None:
    """Return a sum of means times weights with Student's interval; None if one of them is not measured."""
    if pooled is None or not weights.keys() <= {*pooled.groups}:
        return None
    mean, error = pooled.contrast(weights)
    half = float(stats.t.ppf((1 + LEVEL) / 2, pooled.freedom)) * error
    return Interval(mean, mean - half, mean + half)


def interval_of(values: Sequence[float]) -> Interval:
    """Return Student's interval of two values or more."""
    mean = statistics.fmean(values)
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return Interval(mean, mean - half, mean + half)
