"""Trials that differ in their seed alone, as groups: their names, their means, their pairs, and the front they form."""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from vitray.config.model_names import Name, parse_name
from vitray.sweep.report.intervals import Interval, Summary, interval_of, summary_of
from vitray.sweep.report.trials import Measure, Mode, Sweep, Trial

SEED, MODEL, LR = "seed", "model.name", "optim.lr"
# Settings whose values say enough without their name.
SPEAKING = (MODEL, "task.mode")
# So many groups are compared each with each; more, with the best alone.
MOST_COMPARED = 5


class Group(NamedTuple):
    """Trials with the same settings but for the seed."""

    label: str
    settings: dict[str, Any]
    trials: list[Trial]

    @property
    def scores(self) -> dict[Any, float]:
        """{seed: goal} of the trials that finished; the mean where one seed was run twice, as that is no new sample."""
        found = defaultdict(list)
        for trial in self.trials:
            if trial.state == "finished" and trial.score is not None:
                found[spelled(trial.settings.get(SEED))].append(trial.score)
        return {seed: summary_of(values).mean for seed, values in found.items()}

    @property
    def summary(self) -> Summary | None:
        """Over seeds that finished; None when none has."""
        return summary_of(list(self.scores.values())) if self.scores else None

    @property
    def shape(self) -> Name | None:
        """The network, where that varies and its name can be read."""
        return _shape(self.settings.get(MODEL))

    @property
    def mean(self) -> float:
        """Of a group of which a trial has finished."""
        assert self.summary is not None, f"{self.label} has no finished trial"
        return self.summary.mean

    @property
    def sd(self) -> float | None:
        """The spread over seeds, where several finished."""
        return self.summary and self.summary.sd

    def cost(self, attribute: str) -> float | None:
        """The mean of a number over the trials that finished and have it."""
        found = [getattr(trial, attribute) for trial in self.trials if trial.state == "finished"]
        found = [value for value in found if value is not None]
        return summary_of(found).mean if found else None


class Pair(NamedTuple):
    """How much better one group is than another, over the seeds that both finished."""

    one: Group
    other: Group
    difference: Interval
    """One minus the other."""


class Results(NamedTuple):
    """A sweep as the report reads it: groups best first, those without a finished trial last."""

    sweep: Sweep
    measure: Measure
    groups: list[Group]

    @property
    def scored(self) -> list[Group]:
        """The groups of which a trial has finished."""
        return [group for group in self.groups if group.summary is not None]

    @property
    def is_repeated(self) -> bool:
        """Whether some group has several trials."""
        return any(len(group.trials) > 1 for group in self.groups)

    def said(self, group: Group) -> str:
        """A group's mean, and of several seeds their spread and number."""
        if group.summary is None:
            return "–"
        mean, sd, n = group.summary
        return self.measure.digits(mean) + (
            "" if sd is None else f" ± {self.measure.digits(sd)} (n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{n})"
        )

    @property
    def families(self) -> dict[str, dict[tuple[int, int], Group]]:
        """{networks alike but for depth and branches: {(depth, branches): the best of its groups}}."""
        found: dict[str, dict[tuple[int, int], Group]] = defaultdict(dict)
        for group in self.scored:
            if (shape := group.shape) is not None:
                found[family_of(shape)].setdefault((shape.depth, shape.branches), group)
        return {family: dict(sorted(cells.items())) for family, cells in sorted(found.items())}


def n_is(n: int) -> str:
    """How many, in words that no line break parts."""
    return f"n = {n}".replace(" ", "\N{NO-BREAK SPACE}")


def results_of(sweep: Sweep) -> Results:
    """The groups of a sweep, in order."""
    measure = Measure(sweep.goal, sweep.mode)
    groups = grouped(sweep.trials)
    return Results(sweep, measure, sorted(groups, key=lambda group: measure.rank(group.summary and group.summary.mean)))


def grouped(trials: Sequence[Trial]) -> list[Group]:
    """The groups of some trials, in the order in which they first appear."""
    varied = varied_settings(trials)
    members: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        members[spelled(_without(trial.settings, SEED))].append(trial)
    return [
        Group(label_of(found[0].settings, varied), _without(found[0].settings, SEED), found)
        for found in members.values()
    ]


def varied_settings(trials: Sequence[Trial]) -> dict[str, list[Any]]:
    """{setting: its values} of the settings that have several, without the seed."""
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for trial in trials:
        for path in trial.settings:
            values[path].setdefault(spelled(trial.settings[path]), trial.settings[path])
    absent = {path for path in values if any(path not in trial.settings for trial in trials)}
    return {
        path: list(found.values())
        for path, found in values.items()
        if path != SEED and (len(found) > 1 or path in absent)
    }


def label_of(settings: dict[str, Any], varied: dict[str, list[Any]]) -> str:
    """The settings that vary, as few words: `18x2, lr 0.003, attn`."""
    short = [short_name(path) for path in varied]
    words = []
    for path, last in zip(varied, short, strict=True):
        if path in settings:
            value = say_value(settings[path], varied[path])
            name = "" if path in SPEAKING else path if short.count(last) > 1 else last
            words.append(f"{name} {value}".strip())
    return ", ".join(words) or "all alike"


def short_name(path: str) -> str:
    """The last word of a setting that says something: lr of optim.lr, rule of optim.rule.kind."""
    return path.removesuffix(".kind").rpartition(".")[2]


def say_value(value: Any, among: Sequence[Any] = ()) -> str:
    """A setting's value as people write it; of networks that differ in depth and branches, those alone."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if not isinstance(value, str):
        return spelled(value)
    shape, shapes = _shape(value), [_shape(each) for each in among]
    if shape is None or None in shapes:
        return value
    if len(shapes) > 1 and len({family_of(each) for each in shapes if each}) == 1:
        return f"{shape.depth}x{shape.branches}"
    stem = "" if shape.stem == "linear" else f" {shape.stem}"
    return shape.paper_spelling + stem


def family_of(shape: Name) -> str:
    """All of a network but depth and branches: ViT-S/16."""
    stem = "" if shape.stem == "linear" else f" {shape.stem}"
    return f"ViT-{shape.width.capitalize()}/{shape.patch}{stem}"


def pairs_of(results: Results) -> list[Pair]:
    """The better of two groups against the other, over the seeds that both finished, where that is two or more."""
    groups = results.scored
    pairs = combinations(groups, 2) if len(groups) <= MOST_COMPARED else ((groups[0], other) for other in groups[1:])
    found = []
    for one, other in pairs:
        seeds = [seed for seed in one.scores if seed in other.scores]
        if len(seeds) > 1:
            found.append(Pair(one, other, interval_of([one.scores[seed] - other.scores[seed] for seed in seeds])))
    return found


def pareto_front(costs: Sequence[float], values: Sequence[float], mode: Mode) -> list[int]:
    """The points to which no other is better in one and at least as good in the other, by cost; lower costs are better.

    Equal points are all on the front, or none is.
    """
    sign = -1 if mode == "max" else 1
    front: list[int] = []
    for place in sorted(range(len(costs)), key=lambda place: (costs[place], sign * values[place])):
        same = front and (costs[place], values[place]) == (costs[front[-1]], values[front[-1]])
        if not front or same or sign * values[place] < sign * values[front[-1]]:
            front.append(place)
    return front


def _shape(name: Any) -> Name | None:
    try:
        return parse_name(name) if isinstance(name, str) else None
    except ValueError:
        return None


def _without(settings: dict[str, Any], path: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != path}


def spelled(value: Any) -> str:
    """One text for equal values: what groups are told apart by."""
    return json.dumps(value, sort_keys=True, default=str)
