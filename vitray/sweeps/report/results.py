"""A sweep as values: its trials, and the groups of those that differ only in their seed, with their differences."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

from vitray.config.model_names import Name
from vitray.metrics.groups import GroupDifference, dunnett, overlap_of_folds, pool, scatter_p, seeds_to_tell, tukey
from vitray.metrics.intervals import Interval, wilson
from vitray.sweeps.report.papers import PaperResult
from vitray.sweeps.space import FOLD, REPEATS, SEED, shape_of

TrialState = Literal["finished", "stopped early", "failed", "running", "waiting"]
STATES: tuple[TrialState, ...] = get_args(TrialState)
GoalMode = Literal["max", "min"]

MODEL, LR = "model.name", "optim.lr"
# Settings whose values need no name beside them.
UNNAMED = (MODEL, "task.mode")
# Up to this number of groups, each is compared with each; more are compared with the best one.
MOST_COMPARED = 5


# ---- trials ----------------------------------------------------------------------------------------------------------


class TrialResult(NamedTuple):
    """One trial of a sweep: its settings and its results."""

    name: str
    settings: dict[str, Any]
    """The settings that vary over the sweep, by dotted path; `seed` among them."""
    state: TrialState
    reason: str | None
    """Of a failure or an early stop."""
    goal: float | None
    """The latest value of the sweep's goal."""
    curves: dict[str, list[tuple[int, float]]]
    """{metric: (step, value) pairs}."""
    device_seconds: float | None
    """Seconds times devices."""
    params: int | None
    gflops: float | None
    """Of one image, forward."""
    command: str
    """Repeats the trial exactly."""
    run_url: str | None = None
    paper: PaperResult | None = None
    latency_ms: float | None = None
    """Of one image, forward, on the training device (a CPU: one thread): the fastest of some passes."""
    peak_memory_bytes: float | None = None
    """The highest of all workers."""
    val_images: int | None = None
    """The evaluated images."""

    @property
    def score(self) -> float | None:
        """The goal if it is finite: a loss of NaN is None."""
        return self.goal if self.goal is not None and math.isfinite(self.goal) else None


class SweepResult(NamedTuple):
    """The trials of a sweep and their circumstances."""

    name: str
    goal: str
    """The metric that trials are compared by, as in val/top1."""
    mode: GoalMode
    recipe: str
    space_text: str
    """The search space as YAML."""
    plan: str
    """One sentence: the searched settings and the search algorithm."""
    began: str
    command: str
    circumstances: dict[str, str]
    """Hardware, versions, the code's commit."""
    trials: list[TrialResult]
    shared_stage: str | None = None
    """The stage from which all trials of a seed start, whatever their other settings; None: they share nothing."""
    control: dict[str, Any] | None = None
    """Settings of the group that the others are compared with."""


class Cost(NamedTuple):
    """A cost of a trial: its field, its names on an axis and above a column, and the size of a shown unit."""

    field: str
    unit: str
    column: str
    scale: float = 1

    def text(self, value: float | None) -> str:
        """A value in the shown unit."""
        if value is None:
            return "–"
        return hours_text(value) if self.field == "device_seconds" else f"{value / self.scale:.3g}"


COSTS = (
    Cost("device_seconds", "device hours", "device hours", 3600),
    Cost("latency_ms", "ms an image", "latency, ms"),
    Cost("peak_memory_bytes", "GiB", "memory, GiB", 2**30),
    Cost("gflops", "GFLOPs an image", "GFLOPs"),
    Cost("params", "million parameters", "params, M", 1e6),
)


def hours_text(seconds: float) -> str:
    """Seconds as hours, with about two digits."""
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2g}"


class Measure(NamedTuple):
    """The format of a goal's values: shares as percent with two digits, other values with four digits."""

    goal: str
    mode: GoalMode

    @property
    def is_top1(self) -> bool:
        """Whether the goal is top-1 accuracy, as in the papers' tables."""
        return self.goal.rpartition("/")[2] in ("top1", "top1_ema")

    @property
    def is_share(self) -> bool:
        """Whether values lie between 0 and 1 and are shown as percent."""
        return self.goal.rpartition("/")[2].startswith(("top1", "top5", "map", "accuracy"))

    @property
    def title(self) -> str:
        """The goal with its unit, for titles and column heads."""
        return f"{self.goal}, %" if self.is_share else self.goal

    def scaled(self, value: float) -> float:
        """A value in the shown unit."""
        return 100 * value if self.is_share else value

    def digits(self, value: float) -> str:
        """A value as text without its unit."""
        return f"{100 * value:.2f}" if self.is_share else f"{value:.4g}"

    def text(self, value: float) -> str:
        """A value as text with its unit."""
        return f"{self.digits(value)}\N{NO-BREAK SPACE}%" if self.is_share else self.digits(value)

    def signed(self, value: float) -> str:
        """A difference, in points where values are percent."""
        return f"{'−' if value < 0 else '+'}{self.digits(abs(value))}"

    def rank(self, value: float | None) -> float:
        """A sort key: the best value first, None last."""
        if value is None:
            return math.inf
        return -value if self.mode == "max" else value


class Ranked(Protocol):
    """A trial, as far as its rank needs it."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> TrialState: ...
    @property
    def score(self) -> float | None: ...


AnyTrial = TypeVar("AnyTrial", bound=Ranked)


def best_first(trials: list[AnyTrial], measure: Measure) -> list[AnyTrial]:
    """Return trials by their goal; those without one come last, in the order of their states."""
    return sorted(trials, key=lambda trial: (measure.rank(trial.score), STATES.index(trial.state), trial.name))


def leader(trials: list[AnyTrial], measure: Measure) -> AnyTrial | None:
    """Return the best finished trial; the best of all while none has finished; None while there is no value."""
    ranked = [trial for trial in best_first(trials, measure) if trial.score is not None]
    return next((trial for trial in ranked if trial.state == "finished"), ranked[0] if ranked else None)


# ---- settings as text ------------------------------------------------------------------------------------------------


def varied_settings(trials: Sequence[TrialResult]) -> dict[str, list[Any]]:
    """Return {setting: its distinct values} of the settings that vary, without those that repeat a group."""
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for trial in trials:
        for path, value in trial.settings.items():
            values[path].setdefault(canonical(value), value)
    absent = {path for path in values if any(path not in trial.settings for trial in trials)}
    return {
        path: list(distinct.values())
        for path, distinct in values.items()
        if path not in REPEATS and (len(distinct) > 1 or path in absent)
    }


def label_of(settings: dict[str, Any], varied: dict[str, list[Any]]) -> str:
    """Return the varied settings as a short label: `18x2, lr 0.003, attn`."""
    names = [short_name(path) for path in varied]
    parts = []
    for path, name in zip(varied, names, strict=True):
        if path in settings:
            value = value_text(settings[path], varied[path])
            prefix = "" if path in UNNAMED else path if names.count(name) > 1 else name
            parts.append(f"{prefix} {value}".strip())
    return ", ".join(parts) or "all alike"


def short_name(path: str) -> str:
    """Return the last telling part of a path: lr of optim.lr, rule of optim.rule.kind."""
    return path.removesuffix(".kind").rpartition(".")[2]


def value_text(value: Any, among: Sequence[Any] = ()) -> str:
    """Return a setting's value as people write it; networks that differ in depth and branches show only those."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if not isinstance(value, str):
        return canonical(value)
    shape, shapes = shape_of(value), [shape_of(each) for each in among]
    if shape is None or None in shapes:
        return value
    if len(shapes) > 1 and len({family_of(each) for each in shapes if each}) == 1:
        return f"{shape.depth}x{shape.branches}"
    return shape.paper_spelling + _stem(shape)


def family_of(shape: Name) -> str:
    """Return a network's name without depth and branches: ViT-S/16."""
    return f"ViT-{shape.width.capitalize()}/{shape.patch}{_stem(shape)}"


def _stem(shape: Name) -> str:
    return "" if shape.stem == "linear" else f" {shape.stem}"


def canonical(value: Any) -> str:
    """Return the same text for equal values, and different texts for different ones."""
    return json.dumps(value, sort_keys=True, default=str)


# ---- groups ----------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Trials with the same settings except for the seed and the fold."""

    label: str
    settings: dict[str, Any]
    trials: list[TrialResult]

    @property
    def scores(self) -> dict[Any, float]:
        """{seed and fold: goal} of the finished trials; equal ones are one sample, and count by their mean."""
        found = defaultdict(list)
        for trial in self.trials:
            if trial.state == "finished" and trial.score is not None:
                found[canonical([trial.settings.get(path) for path in REPEATS])].append(trial.score)
        return {name: statistics.fmean(values) for name, values in found.items()}

    def out_of_fold(self, folds: Sequence[Any]) -> tuple[Interval, int] | None:
        """Return the share of the images of all these folds that the network which did not learn them has right, and
        their number; None unless each fold has one finished trial."""
        done = [trial for trial in self.trials if trial.state == "finished" and trial.score is not None]
        counts = [
            (round((trial.score or 0) * trial.val_images), trial.val_images) for trial in done if trial.val_images
        ]
        if len(counts) < len(done) or sorted(canonical(trial.settings[FOLD]) for trial in done) != sorted(
            map(canonical, folds)
        ):
            return None
        hits, images = (sum(each) for each in zip(*counts, strict=True))
        return wilson(hits, images), images

    @property
    def mean(self) -> float:
        """Over the finished seeds and folds, of which there must be one."""
        return statistics.fmean(self.scores.values())

    @property
    def sd(self) -> float | None:
        """The standard deviation, by n - 1, over several finished seeds or folds; None for a single one."""
        return statistics.stdev(self.scores.values()) if len(self.scores) > 1 else None

    def cost(self, field: str) -> float | None:
        """The mean of a cost over the finished trials that have it; the lowest latency, as other load adds to some."""
        costs = [getattr(trial, field) for trial in self.trials if trial.state == "finished"]
        costs = [cost for cost in costs if cost is not None]
        summary = min if field == "latency_ms" else statistics.fmean
        return summary(costs) if costs else None


class Pair(NamedTuple):
    """The difference of two groups; the intervals and p of all pairs hold together."""

    one: Group
    other: Group
    difference: GroupDifference
    """One minus the other."""

    def verdict(self, mode: GoalMode) -> str:
        """Whether the first of the groups is clearly better or worse."""
        if not self.difference.is_clear:
            return "no clear difference"
        return "better" if (self.difference.mean > 0) == (mode == "max") else "worse"


class Results(NamedTuple):
    """A sweep with its groups, the best first, those without a finished trial last."""

    sweep: SweepResult
    measure: Measure
    groups: list[Group]
    pairs: list[Pair]
    """Of groups with several finished seeds or folds: the better group first, or a group and the control."""
    seeds_to_tell: int | None
    """The seeds a group with which a difference of one point would be found; None: too many, no shares, or folds."""
    scatter_p: float | None
    """Of the test that seeds scatter alike in all groups; None where each seed or fold has an effect of its own."""

    @property
    def scored(self) -> list[Group]:
        """The groups with a finished trial."""
        return [group for group in self.groups if group.scores]

    @property
    def folds(self) -> list[Any]:
        """The folds of the sweep; none for one without."""
        return folds_of(self.sweep.trials)

    @property
    def repeats(self) -> str:
        """What repeats a group, in words."""
        trials = self.sweep.trials
        values = {path: {canonical(trial.settings.get(path)) for trial in trials} for path in REPEATS}
        return " and ".join(word for path, word in REPEATS.items() if len(values[path]) > 1) or REPEATS[SEED]

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
        """A group's mean; of several seeds or folds also their spread and number."""
        if not group.scores:
            return "–"
        if group.sd is None:
            return self.measure.digits(group.mean)
        count = f"n = {len(group.scores)}".replace(" ", "\N{NO-BREAK SPACE}")
        return f"{self.measure.digits(group.mean)} ± {self.measure.digits(group.sd)} ({count})"


def results_of(sweep: SweepResult) -> Results:
    """Return the groups of a sweep, the best first, and their differences."""
    measure = Measure(sweep.goal, sweep.mode)
    known = {str(place): group for place, group in enumerate(grouped(sweep.trials))}
    scores = {name: group.scores for name, group in known.items() if len(group.scores) > 1}
    folds = folds_of(sweep.trials)
    # A fold is as hard for one group as for another.
    shares = sweep.shared_stage is not None or bool(folds)
    overlap = overlap_of_folds(len(folds), max(map(len, scores.values()))) if len(folds) > 1 and scores else 1.0
    pooled = pool(scores, shares, overlap)
    means = {name: group.mean for name, group in known.items() if group.scores}
    means |= {} if pooled is None else dict(zip(pooled.groups, pooled.effects.tolist(), strict=True))
    order = sorted(known, key=lambda name: measure.rank(means.get(name)))
    groups = [known[name] for name in order]
    if pooled is None:
        return Results(sweep, measure, groups, [], None, None)
    compared = [name for name in order if name in pooled.groups]
    control = None
    if sweep.control is not None:
        control = next((name for name in compared if sweep.control.items() <= known[name].settings.items()), None)
        if control is None:  # it has no two seeds yet
            return Results(sweep, measure, groups, [], None, None)
        of_control = dunnett(pooled, control)
        found = [Pair(known[name], known[control], of_control[name]) for name in compared if name != control]
    else:
        first, *rest = compared
        pairs = [*combinations(compared, 2)] if len(rest) < MOST_COMPARED else [(first, other) for other in rest]
        found = [
            Pair(known[one], known[other], difference)
            for (one, other), difference in zip(pairs, tukey(pooled, pairs), strict=True)
        ]
    seeds = seeds_to_tell(pooled, 0.01, control) if measure.is_share and not folds else None
    return Results(sweep, measure, groups, found, seeds, None if shares else scatter_p(scores))


def folds_of(trials: Sequence[TrialResult]) -> list[Any]:
    """Return the different folds of some trials."""
    folds = (trial.settings.get(FOLD) for trial in trials)
    return list({canonical(fold): fold for fold in folds if fold is not None}.values())


def grouped(trials: Sequence[TrialResult]) -> list[Group]:
    """Return the groups of some trials, in the order of their first trials."""
    varied = varied_settings(trials)
    by_settings: dict[str, list[TrialResult]] = defaultdict(list)
    for trial in trials:
        by_settings[canonical(_without_repeats(trial.settings))].append(trial)
    return [
        Group(label_of(members[0].settings, varied), _without_repeats(members[0].settings), members)
        for members in by_settings.values()
    ]


def _without_repeats(settings: dict[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in settings.items() if path not in REPEATS}


def pareto_front(costs: Sequence[float], values: Sequence[float], mode: GoalMode) -> list[int]:
    """Return the places of the points that no other point dominates, by rising cost; equal points stay together."""
    sign = -1 if mode == "max" else 1
    front: list[int] = []
    for place in sorted(range(len(costs)), key=lambda place: (costs[place], sign * values[place])):
        same = front and (costs[place], values[place]) == (costs[front[-1]], values[front[-1]])
        if not front or same or sign * values[place] < sign * values[front[-1]]:
            front.append(place)
    return front
