"""Facts about a sweep that the driver's parts share, and its outcome."""

from typing import NamedTuple

from vitray.sweep.plan import Recipe
from vitray.sweep.space import Space


class SweepInfo(NamedTuple):
    """A sweep with its name and identity."""

    name: str
    recipe: Recipe
    space: Space
    command: str
    """The command line that repeats or resumes the sweep."""
    uid: str
    starts: int
    """How many times the sweep was started, this time included."""
    began: float
    """The first start, in seconds since 1970."""


class SweepOutcome(NamedTuple):
    """How a sweep ended."""

    name: str
    home: str
    """The sweep folder."""
    trials: int
    finished: int
    stopped_early: int
    failed: int
    best: str | None
    best_goal: float | None
    report: str
    mlflow_run: str | None
    """None while the tracking server is unreachable."""
