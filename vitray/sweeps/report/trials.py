"""A sweep and its trials as values, their costs, and the format of the goal's values."""

import math
from typing import Any, Literal, NamedTuple, get_args

from vitray.sweeps.report.papers import PaperResult

TrialState = Literal["finished", "stopped early", "failed", "running", "waiting"]
STATES: tuple[TrialState, ...] = get_args(TrialState)
GoalMode = Literal["max", "min"]


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
        return self.goal.rpartition("/")[2].startswith(("top1", "top5", "accuracy"))

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


def best_first(trials: list[TrialResult], measure: Measure) -> list[TrialResult]:
    """Return trials by their goal; those without one come last, in the order of their states."""
    return sorted(trials, key=lambda trial: (measure.rank(trial.score), STATES.index(trial.state), trial.name))


def leader(trials: list[TrialResult], measure: Measure) -> TrialResult | None:
    """Return the best finished trial; the best of all while none has finished; None while there is no value."""
    ranked = [trial for trial in best_first(trials, measure) if trial.score is not None]
    return next((trial for trial in ranked if trial.state == "finished"), ranked[0] if ranked else None)
