"""Groups of trials that differ only in their seed: means, paired differences, and the Pareto front."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from vitray.sweeps.report.labels import MODEL, SEED, canonical, family_of, label_of, varied_settings
from vitray.sweeps.report.trials import GoalMode, Measure, SweepResult, TrialResult
from vitray.sweeps.space import shape_of

CONFIDENCE = 0.95
# Up to this number of groups, each is compared with each; more are compared with the best one.
MOST_COMPARED = 5


class Group(NamedTuple):
    """Trials with the same settings except for the seed."""

    label: str
    settings: dict[str, Any]
    trials: list[TrialResult]

    @property
    def scores(self) -> dict[Any, float]:
        """{seed: goal} of the finished trials. A repeated seed is no new sample, so it counts once, by its mean."""
        by_seed = defaultdict(list)
        for trial in self.trials:
            if trial.state == "finished" and trial.score is not None:
                by_seed[canonical(trial.settings.get(SEED))].append(trial.score)
        return {seed: statistics.fmean(values) for seed, values in by_seed.items()}

    @property
    def mean(self) -> float:
        """Over the finished seeds, of which there must be one."""
        return statistics.fmean(self.scores.values())

    @property
    def sd(self) -> float | None:
        """The standard deviation, by n - 1, over several finished seeds; None for a single one."""
        return statistics.stdev(self.scores.values()) if len(self.scores) > 1 else None

    def cost(self, field: str) -> float | None:
        """The mean of a cost over the finished trials that have it; the lowest latency, as other load adds to some."""
        costs = [getattr(trial, field) for trial in self.trials if trial.state == "finished"]
        costs = [cost for cost in costs if cost is not None]
        summary = min if field == "latency_ms" else statistics.fmean
        return summary(costs) if costs else None


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

    def verdict(self, mode: GoalMode) -> str:
        """Whether the first of two groups is clearly better or worse."""
        if not self.is_clear:
            return "no clear difference"
        return "better" if (self.mean > 0) == (mode == "max") else "worse"


class Pair(NamedTuple):
    """The difference of two groups over the seeds that both finished."""

    one: Group
    other: Group
    difference: Interval
    """One minus the other."""


class Results(NamedTuple):
    """A sweep with its groups, the best first, those without a finished trial last."""

    sweep: SweepResult
    measure: Measure
    groups: list[Group]

    @property
    def scored(self) -> list[Group]:
        """The groups with a finished trial."""
        return [group for group in self.groups if group.scores]

    @property
    def is_repeated(self) -> bool:
        """Whether some group has several trials."""
        return any(len(group.trials) > 1 for group in self.groups)

    @property
    def families(self) -> dict[str, dict[tuple[int, int], Group]]:
        """{networks that differ in depth and branches only: {(depth, branches): the best group}}."""
        families: dict[str, dict[tuple[int, int], Group]] = defaultdict(dict)
        for group in self.scored:
            if (shape := shape_of(group.settings.get(MODEL))) is not None:
                families[family_of(shape)].setdefault((shape.depth, shape.branches), group)
        return {family: dict(sorted(cells.items())) for family, cells in sorted(families.items())}

    @property
    def families_note(self) -> str:
        """The end of a caption about families, if a network has several groups."""
        networks = {group.settings.get(MODEL) for group in self.scored}
        return " Each network is shown with its best settings." if len(networks) < len(self.scored) else ""

    def score_text(self, group: Group) -> str:
        """A group's mean; of several seeds also their spread and number."""
        if not group.scores:
            return "–"
        if group.sd is None:
            return self.measure.digits(group.mean)
        count = f"n = {len(group.scores)}".replace(" ", "\N{NO-BREAK SPACE}")
        return f"{self.measure.digits(group.mean)} ± {self.measure.digits(group.sd)} ({count})"


def results_of(sweep: SweepResult) -> Results:
    """Return the groups of a sweep, the best first."""
    measure = Measure(sweep.goal, sweep.mode)
    groups = grouped(sweep.trials)
    return Results(sweep, measure, sorted(groups, key=lambda group: measure.rank(group.mean if group.scores else None)))


def grouped(trials: Sequence[TrialResult]) -> list[Group]:
    """Return the groups of some trials, in the order of their first trials."""
    varied = varied_settings(trials)
    by_settings: dict[str, list[TrialResult]] = defaultdict(list)
    for trial in trials:
        by_settings[canonical(_without_seed(trial.settings))].append(trial)
    return [
        Group(label_of(members[0].settings, varied), _without_seed(members[0].settings), members)
        for members in by_settings.values()
    ]


def _without_seed(settings: dict[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in settings.items() if path != SEED}


def pairs_of(results: Results) -> list[Pair]:
    """Return pairs of groups with at least two common finished seeds, the better group first."""
    groups = results.scored
    candidates = (
        combinations(groups, 2) if len(groups) <= MOST_COMPARED else ((groups[0], other) for other in groups[1:])
    )
    pairs = []
    for one, other in candidates:
        seeds = [seed for seed in one.scores if seed in other.scores]
        if len(seeds) > 1:
            pairs.append(Pair(one, other, interval_of([one.scores[seed] - other.scores[seed] for seed in seeds])))
    return pairs


def interval_of(differences: Sequence[float]) -> Interval:
    """Return Student's interval of two paired differences or more."""
    from scipy.special import stdtrit  # loads slowly, and only sweeps that repeat seeds use it

    mean, n = statistics.fmean(differences), len(differences)
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * statistics.stdev(differences) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def pareto_front(costs: Sequence[float], values: Sequence[float], mode: GoalMode) -> list[int]:
    """Return the places of the points that no other point dominates, by rising cost; equal points stay together."""
    sign = -1 if mode == "max" else 1
    front: list[int] = []
    for place in sorted(range(len(costs)), key=lambda place: (costs[place], sign * values[place])):
        same = front and (costs[place], values[place]) == (costs[front[-1]], values[front[-1]])
        if not front or same or sign * values[place] < sign * values[front[-1]]:
            front.append(place)
    return front
