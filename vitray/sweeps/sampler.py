"""Points drawn by Optuna's samplers from the scores of earlier points.

Each point gets a new sampler, which depends only on the seed and on earlier results: an interrupted search resumes
exactly.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, assert_never

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from vitray.config.sweep import Distribution, Grid, Nsga2, Tpe
from vitray.sweeps.space import Space
from vitray.sweeps.space.expressions import names_in
from vitray.sweeps.trial_store import Trial, TrialEntry

# Attempts to draw a new point before the search ends.
TRIES = 200
# One row for each kind of search that learns: its sampler with a seed.
SAMPLERS: dict[type, Callable[[Any, int], optuna.samplers.BaseSampler]] = {
    Tpe: lambda search, seed: optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=search.first, multivariate=True, constant_liar=True
    ),
    Nsga2: lambda search, seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=search.population),
}


class Suggestion(NamedTuple):
    """A drawn point."""

    values: dict[str, Any]
    """{setting or variable: value}."""
    asked: dict[str, Any]
    """The sampler's own parameters and notes."""


def ask(space: Space, trials: Sequence[Trial], attempt: int) -> Suggestion:
    """Return the next point after these trials, whose points it drew; each attempt gives another one."""
    search = space.search
    assert type(search) in SAMPLERS, f"search {search.kind} has no sampler in {__name__}"
    assert not isinstance(search, Grid), "it has no seed"
    optuna.logging.set_verbosity(logging.WARNING)
    # Any change of the three gives an unrelated seed.
    seed = int(np.random.SeedSequence((search.seed, len(trials), attempt)).generate_state(1)[0])
    sampler = SAMPLERS[type(search)](search, seed)
    goals: list[Literal["maximize", "minimize"]] = ["maximize" if space.goal.mode == "max" else "minimize"]
    if search.second_goal:
        goals.append("minimize")
    study = optuna.create_study(sampler=sampler, directions=goals)
    distributions = _distributions(space)
    for trial in trials:
        if params := _params(space, trial.entry):  # without points that the space has lost
            study.add_trial(_optuna_trial(space, trial, params, distributions))
    params = study.ask(dict(distributions)).params
    return Suggestion(_values(space, params), {"params": params, "notes": study.trials[-1].system_attrs})


def _optuna_trial(
    space: Space, trial: Trial, params: dict[str, Any], distributions: dict[str, BaseDistribution]
) -> FrozenTrial:
    """Return a trial, of a point with these parameters, as a trial of Optuna."""
    assert trial.entry.asked is not None, "the sampler drew its point"
    record, goal, second = trial.record, trial.record.score, space.search.second_goal
    cost, values = second and trial.cost(second), None
    match record.state:
        case "finished" if goal is not None and (cost is not None or not second):
            state, values = TrialState.COMPLETE, [goal, cost] if second else [goal]
        case "finished" | "failed":
            state = TrialState.FAIL
        case "stopped early":
            state = TrialState.PRUNED
        case "waiting" | "running":
            state = TrialState.RUNNING
        case _:
            assert_never(record.state)
    return optuna.create_trial(
        state=state,
        values=values,
        params=params,
        distributions=distributions,
        system_attrs=trial.entry.asked["notes"],
        intermediate_values=None if second else dict(record.scores),
    )


# ---- distributions of Optuna -----------------------------------------------------------------------------------------


def _tied(space: Space) -> list[str]:
    """Return the listed names in constraints, which are drawn together as one allowed combination."""
    constrained = {name for line in space.where for name in names_in(line)}
    return [name for name, each in space.drawn.items() if name in constrained and each.values is not None]


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    tied = _tied(space)
    rows = len(list(space.combinations(tied)))
    joint: dict[str, BaseDistribution] = {" ".join(tied): CategoricalDistribution(range(rows))} if tied else {}
    return joint | {name: _distribution(each) for name, each in space.drawn.items() if name not in tied}


def _distribution(ours: Distribution) -> BaseDistribution:
    if ours.values is not None:
        numbers = [value for value in ours.values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) == len(ours.values) and numbers == sorted(numbers):
            return IntDistribution(0, len(numbers) - 1)  # ordered, so that neighbors count as similar
        return CategoricalDistribution(range(len(ours.values)))
    low, high = ours.extremes
    if ours.quniform:
        return FloatDistribution(low, ours.snap(high), step=ours.quniform[2])
    return FloatDistribution(low, high, log=ours.kind == "loguniform")


def _values(space: Space, params: dict[str, Any]) -> dict[str, Any]:
    tied = _tied(space)
    drawn = dict(list(space.combinations(tied))[params[" ".join(tied)]]) if tied else {}
    for name, each in space.drawn.items():
        if name not in drawn:
            drawn[name] = params[name] if each.values is None else each.values[params[name]]
    return drawn


def _params(space: Space, entry: TrialEntry) -> dict[str, Any] | None:
    """Return the sampler's parameters of a point in this space; None if the space no longer has the point.

    Stored parameters are indices of the listed values, which may have changed since; in a range, unrounded values.
    """
    tied, drawn, params = _tied(space), entry.point.drawn, dict[str, Any]()
    asked = entry.asked["params"] if entry.asked else {}
    try:
        if tied:
            params[" ".join(tied)] = list(space.combinations(tied)).index({name: drawn[name] for name in tied})
        for name, each in space.drawn.items():
            if name in tied:
                continue
            if each.values is not None:
                params[name] = each.values.index(drawn[name])
                continue
            exact = asked.get(name, drawn[name])
            params[name] = value = exact if each.snap(exact) == drawn[name] else drawn[name]
            low, high = each.extremes
            if not low <= value <= high or (each.quniform and each.snap(value) != drawn[name]):
                return None
    except (KeyError, ValueError):  # another name, or another value
        return None
    return params
