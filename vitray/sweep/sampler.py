"""Points drawn from what the ones before them scored, by Optuna's samplers.

A sampler is made anew for every point: what it draws is a function of the seed, of how many there are and of their
records, so that a sweep that was interrupted goes on as if nothing had been.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, assert_never

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from vitray.config.sweep import Draw, Nsga2, Tpe
from vitray.sweep.expressions import names_in
from vitray.sweep.space import Space
from vitray.sweep.trial_record import Record

# Draws of a point before a search is given up: constraints, or all points that are left, may be hard to meet.
TRIES = 200


class Told(NamedTuple):
    """What a sampler is told of a point that it drew."""

    asked: dict[str, Any]
    record: Record
    cost: float | None
    """What NSGA-II weighs against the goal; None where it is not known."""


class Drawn(NamedTuple):
    """A point as it was drawn."""

    values: dict[str, Any]
    """By setting or variable."""
    asked: dict[str, Any]


def ask(space: Space, told: Sequence[Told], attempt: int) -> Drawn:
    """The next point after these; another one for another attempt."""
    search = space.search
    assert isinstance(search, Tpe | Nsga2)
    optuna.logging.set_verbosity(logging.WARNING)
    # Any change of the three makes numbers that share nothing.
    seed = int(np.random.SeedSequence((search.seed, len(told), attempt)).generate_state(1)[0])
    goals: list[Literal["maximize", "minimize"]] = ["maximize" if space.goal.mode == "max" else "minimize"]
    match search:
        case Tpe(first=first):
            sampler: optuna.samplers.BaseSampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=first, multivariate=True, constant_liar=True
            )
        case Nsga2(population=population):
            sampler = optuna.samplers.NSGAIISampler(seed=seed, population_size=population)
            goals.append("minimize")
        case _:
            assert_never(search)
    study = optuna.create_study(sampler=sampler, directions=goals)
    distributions = _distributions(space)
    for each in told:
        study.add_trial(_frozen(space, each, distributions))
    trial = study.ask(dict(distributions))
    asked = {"params": trial.params, "notes": study.trials[-1].system_attrs}
    return Drawn(_values(space, trial.params), asked)


def _frozen(space: Space, told: Told, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
    """A known point as Optuna stores it."""
    record = told.record
    goal, two = record.best(space.goal.mode), isinstance(space.search, Nsga2)
    values = None
    match record.state:
        case "finished" if goal is not None and (told.cost is not None or not two):
            state, values = TrialState.COMPLETE, [goal, told.cost] if two else [goal]
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
        params=told.asked["params"],
        distributions=distributions,
        system_attrs=told.asked["notes"],
        intermediate_values=None if two else dict(record.scores),
    )


# ---- what is drawn, as Optuna has it ---------------------------------------------------------------------------------


def _tied(space: Space) -> list[str]:
    """The listed settings and variables of constraints: of them, allowed combinations are drawn, not single values."""
    named = {name for line in space.where for name in names_in(line)}
    return [name for name, draw in space.drawn.items() if name in named and draw.values is not None]


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    tied = _tied(space)
    rows = len(list(space.combinations(tied)))
    found: dict[str, BaseDistribution] = {" ".join(tied): CategoricalDistribution(range(rows))} if tied else {}
    return found | {name: _distribution(draw) for name, draw in space.drawn.items() if name not in tied}


def _distribution(draw: Draw) -> BaseDistribution:
    if draw.values is not None:
        numbers = [value for value in draw.values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) == len(draw.values) and numbers == sorted(numbers):
            return IntDistribution(0, len(numbers) - 1)  # in order, so that a neighbour is as likely to be good
        return CategoricalDistribution(range(len(draw.values)))
    low, high = draw.extremes
    if draw.quniform:
        return FloatDistribution(low, draw.snapped(high), step=draw.quniform[2])
    return FloatDistribution(low, high, log=draw.kind == "loguniform")


def _values(space: Space, params: dict[str, Any]) -> dict[str, Any]:
    tied = _tied(space)
    drawn = dict(list(space.combinations(tied))[params[" ".join(tied)]]) if tied else {}
    for name, draw in space.drawn.items():
        if name not in drawn:
            drawn[name] = params[name] if draw.values is None else draw.values[params[name]]
    return drawn
