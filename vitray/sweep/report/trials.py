"""A sweep and its trials as values, and how the values of their goal read."""

import math
from typing import Any, Literal, NamedTuple, get_args

from vitray.sweep.report.intervals import Interval
from vitray.sweep.report.papers import Point

State = Literal["finished", "stopped early", "failed", "running", "waiting"]
STATES: tuple[State, ...] = get_args(State)
Mode = Literal["max", "min"]


class Trial(NamedTuple):
    """One cell of a sweep: what it was given, and what came of it."""

    name: str
    settings: dict[str, Any]
    """What varies over the sweep, by dotted path; `seed` among them."""
    state: State
    reason: str | None
    """Why it failed, or was stopped early."""
    goal: float | None
    """The best value of the sweep's goal so far."""
    curves: dict[str, list[tuple[int, float]]]
    """{metric: (step, value) pairs}."""
    device_seconds: float | None
    """Seconds times devices."""
    params: int | None
    gflops: float | None
    """Of one image, forward."""
    command: str
    """Reproduces the cell exactly."""
    run_url: str | None = None
    paper: Point | None = None
    """The cell of a paper's table that this is, as `point_of` says."""
    latency_ms: float | None = None
    """Of one image, forward, where it was trained."""
    peak_memory_bytes: float | None = None
    """Of the worker that took most."""

    @property
    def score(self) -> float | None:
        """The goal where it is a number: a loss that became NaN is none."""
        return self.goal if self.goal is not None and math.isfinite(self.goal) else None


class Sweep(NamedTuple):
    """Trials of one question, and what they belong with."""

    name: str
    goal: str
    """The metric that trials are compared by, as in val/top1."""
    mode: Mode
    recipe: str
    space_text: str
    """The space as YAML."""
    plan: str
    """One sentence: what is tried, and how it is searched."""
    began: str
    command: str
    circumstances: dict[str, str]
    """Hardware, versions, the code's commit."""
    trials: list[Trial]


class Measure(NamedTuple):
    """How values of a goal read: shares as percent with two digits, anything else with four."""

    goal: str
    mode: Mode

    @property
    def is_top1(self) -> bool:
        """Whether the papers' numbers are of the same kind."""
        return self.goal.rpartition("/")[2] in ("top1", "top1_ema")

    @property
    def is_share(self) -> bool:
        """Whether values lie between 0 and 1 and read as percent."""
        return self.goal.rpartition("/")[2].startswith(("top1", "top5", "accuracy"))

    @property
    def title(self) -> str:
        """The goal with its unit, as a picture is headed."""
        return f"{self.goal}, %" if self.is_share else self.goal

    def scaled(self, value: float) -> float:
        """The value in the unit that is shown."""
        return 100 * value if self.is_share else value

    def digits(self, value: float) -> str:
        """A value without its unit."""
        return f"{100 * value:.2f}" if self.is_share else f"{value:.4g}"

    def say(self, value: float) -> str:
        """A value with its unit."""
        return f"{self.digits(value)}\N{NO-BREAK SPACE}%" if self.is_share else self.digits(value)

    def signed(self, value: float) -> str:
        """A difference, in points where values are percent."""
        return f"{'−' if value < 0 else '+'}{self.digits(abs(value))}"

    def verdict(self, difference: Interval) -> Literal["better", "worse", "not told apart"]:
        """What an interval of differences says of the first against the second."""
        if not difference.is_clear:
            return "not told apart"
        return "better" if self.rank(difference.mean) < 0 else "worse"

    def rank(self, value: float | None) -> float:
        """Sorts the best first, and no value last."""
        if value is None:
            return math.inf
        return -value if self.mode == "max" else value


def best_first(trials: list[Trial], measure: Measure) -> list[Trial]:
    """Trials by their goal, those without one last, in the order of their states."""
    return sorted(trials, key=lambda trial: (measure.rank(trial.score), STATES.index(trial.state), trial.name))


def leader(trials: list[Trial], measure: Measure) -> Trial | None:
    """The best of the finished trials; of all while none has finished; None while there is no value."""
    ranked = [trial for trial in best_first(trials, measure) if trial.score is not None]
    return next((trial for trial in ranked if trial.state == "finished"), ranked[0] if ranked else None)
