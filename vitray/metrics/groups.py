"""Groups of runs that differ in their seeds: their differences under one variance, and how many seeds would tell.

All groups share the variance of their seeds (analysis of variance), so that a difference of two groups does not hang on
a spread that few seeds of these two happen to have. Seeds are independent samples, unless runs of one seed begin with
the same network or are of one fold: then each seed has an effect of its own, which cancels in differences.

Shapes: G groups, S seeds, R runs.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vitray.metrics.intervals import LEVEL, POWER

# More seeds than that are not named.
MOST_SEEDS = 1_000
# Draws for Dunnett's test: the error of a p of 0.05 is then 2e-4. So many at once take 200 MB with 250 groups.
DRAWS, DRAWS_AT_ONCE = 1_000_000, 100_000

Scores = Mapping[str, Mapping[Hashable, float]]
"""{group: {seed: score}}"""


class GroupDifference(NamedTuple):
    """The mean of one group less that of another; interval and p hold for all differences of a comparison together."""

    mean: float
    low: float
    high: float
    p: float

    @property
    def is_clear(self) -> bool:
        """Whether the groups differ; without any spread there is no verdict."""
        return self.p < 1 - LEVEL and self.high - self.low > 1e-9 * abs(self.mean)


class Pooled(NamedTuple):
    """The effects of groups, and the variance that they share."""

    groups: tuple[str, ...]
    effects: np.ndarray
    """Their means; with effects of seeds, as if each group had all seeds."""
    factors: np.ndarray
    """The covariances of the effects are these times the variance."""
    variance: float
    freedom: int
    """Runs less the numbers that describe them."""
    by_seed: bool

    def contrast(self, weights: Mapping[str, float]) -> tuple[float, float]:
        """Return a sum of effects times weights, of which the sum is 0, and its standard error."""
        own = np.array([weights.get(name, 0.0) for name in self.groups])
        return float(own @ self.effects), math.sqrt(self.variance * float(own @ self.factors @ own))

    def difference(self, one: str, other: str) -> tuple[float, float]:
        """Return the difference of two groups and its standard error."""
        return self.contrast({one: 1.0, other: -1.0})


def pool(scores: Scores, by_seed: bool, overlap: float = 1.0) -> Pooled | None:
    """Return the groups under one variance; None where the runs are too few for one, or share too few seeds.

    `by_seed`: runs of a seed have something in common beyond chance, so each seed has an effect. Only groups that a
    chain of common seeds joins are compared: the most of them. `overlap`: how much more the means scatter than those
    of independent runs.
    """
    scores = _joined(scores) if by_seed else scores
    groups = tuple(scores)
    runs = [(place, seed, score) for place, name in enumerate(groups) for seed, score in scores[name].items()]
    seeds = list(dict.fromkeys(seed for _, seed, _ in runs)) if by_seed else []
    design = np.zeros((len(runs), len(groups) + len(seeds)))
    for row, (place, seed, _) in enumerate(runs):
        design[row, place] = 1
        if by_seed:
            design[row, len(groups) + seeds.index(seed)] = 1
    rank = int(np.linalg.matrix_rank(design)) if runs else 0
    if len(groups) < 2 or len(runs) <= rank:
        return None
    values_R = np.array([score for _, _, score in runs])
    inverse = np.linalg.pinv(design.T @ design)
    fitted = inverse @ design.T @ values_R
    freedom = len(runs) - rank
    variance = float(np.square(values_R - design @ fitted).sum()) / freedom
    count = len(groups)
    effects = fitted[:count] + (fitted[count:].mean() if by_seed else 0.0)
    return Pooled(groups, effects, overlap * inverse[:count, :count], variance, freedom, by_seed)


def _joined(scores: Scores) -> Scores:
    """Return the most groups that a chain of common seeds joins."""
    parts: list[tuple[set[str], set[Hashable]]] = []
    for name, each in scores.items():
        met = [part for part in parts if part[1] & each.keys()]
        whole = {name}.union(*(names for names, _ in met)), {*each}.union(*(seeds for _, seeds in met))
        parts = [*(part for part in parts if part not in met), whole]
    most = max((names for names, _ in parts), key=len, default=set())
    return {name: each for name, each in scores.items() if name in most}


def scatter_p(scores: Scores) -> float | None:
    """Return the p of Bartlett's test that seeds scatter alike in all groups; None where those of one do not."""
    from scipy.stats import bartlett  # loads slowly

    samples = [[*each.values()] for each in scores.values()]
    if len(samples) < 2 or any(len({*sample}) < 2 for sample in samples):
        return None
    return float(bartlett(*samples).pvalue)


def overlap_of_folds(folds: int, runs: int) -> float:
    """Return how much more the mean of a group's runs scatters than that of independent runs (Nadeau and Bengio).

    Each run learned from all folds but one, so that two of them have most of their images in common.
    """
    return 1 + runs / (folds - 1)


def tukey(pooled: Pooled, pairs: Sequence[tuple[str, str]]) -> list[GroupDifference]:
    """Return Tukey's differences, which hold for all pairs of the groups, also for those that the data chose."""
    from scipy.stats import studentized_range  # loads slowly

    shape = len(pooled.groups), pooled.freedom
    reach = float(studentized_range.ppf(LEVEL, *shape)) / math.sqrt(2)
    return [
        difference_of(*pooled.difference(*pair), reach, lambda t: float(studentized_range.sf(t * math.sqrt(2), *shape)))
        for pair in pairs
    ]


def dunnett(pooled: Pooled, control: str) -> dict[str, GroupDifference]:
    """Return {group: its difference from the control} by Dunnett's test, which holds for all these groups."""
    others = [name for name in pooled.groups if name != control]
    if len(others) == 1:  # Student's test, and no draws
        return {others[0]: tukey(pooled, [(others[0], control)])[0]}
    contrasts = np.array([[(name == one) - (name == control) for name in pooled.groups] for one in others], float)
    factors = contrasts @ pooled.factors @ contrasts.T
    largest = _largest(factors / np.sqrt(np.outer(factors.diagonal(), factors.diagonal())), pooled.freedom)
    reach = float(np.quantile(largest, LEVEL))
    return {
        name: difference_of(*pooled.difference(name, control), reach, lambda t: float((largest > t).mean()))
        for name in others
    }


def _largest(correlation: np.ndarray, freedom: float, draws: int = DRAWS) -> np.ndarray:
    """Draw how many standard errors the largest of some contrasts is from zero where no group differs.

    scipy's `dunnett` knows neither effects of seeds nor folds, and its integral is slow for many groups.
    """
    rng, parts = np.random.default_rng(0), []
    values, vectors = np.linalg.eigh(correlation)
    root = vectors * np.sqrt(np.clip(values, 0, None))
    for start in range(0, draws, DRAWS_AT_ONCE):
        number = min(DRAWS_AT_ONCE, draws - start)
        largest = np.abs(rng.standard_normal((number, len(correlation))) @ root.T).max(1)
        parts.append(largest if freedom == math.inf else largest / np.sqrt(rng.chisquare(freedom, number) / freedom))
    return np.concatenate(parts)


def seeds_to_tell(pooled: Pooled, difference: float, control: str | None = None) -> int | None:
    """Return the seeds a group with which a test finds a difference with a chance of `POWER`; None: over 1,000.

    The test is Tukey's, or with a control Dunnett's. The variance is taken as it is.
    """
    from scipy.special import ndtri  # loads slowly
    from scipy.stats import studentized_range

    count, strength = len(pooled.groups), float(ndtri(POWER))
    of_control = (np.eye(count - 1) + 1) / 2  # two differences share half of their variance, that of the control

    def wanted(freedom: float) -> float:
        if control is None:
            reach = float(studentized_range.ppf(LEVEL, count, freedom)) / math.sqrt(2)
        else:
            reach = float(np.quantile(_largest(of_control, freedom, DRAWS_AT_ONCE), LEVEL))
        return 2 * pooled.variance * ((reach + strength) / difference) ** 2

    # The limit of many seeds, from below, is nearly reached where the test has some degrees of freedom.
    seeds = max(2, math.ceil(least)) if (least := wanted(math.inf)) <= MOST_SEEDS else None
    while seeds is not None and seeds < wanted((count - 1 if pooled.by_seed else count) * (seeds - 1)):
        seeds += 1
    return seeds


def difference_of(mean: float, error: float, reach: float, tail: Callable[[float], float]) -> GroupDifference:
    """Return a difference whose interval reaches some standard errors, with p as the tail of its number of them."""
    p = float(np.clip(tail(abs(mean) / error), 0, 1)) if error > 0 else 1.0
    return GroupDifference(mean, mean - reach * error, mean + reach * error, p)
