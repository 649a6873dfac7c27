"""Sampled points: allowed, reproducible, better than chance, and available for every state of the trials."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitray.errors import ConfigError
from vitray.sweeps import sampler
from vitray.sweeps.report.results import pareto_front
from vitray.sweeps.sampler import _optuna_trial, ask
from vitray.sweeps.space import draw_point, name_of, random_points, read_space
from vitray.sweeps.trial_store import Trial, TrialEntry, TrialRecord

SPACE = """
space:
  depth: {grid: [12, 6, 4, 3]}
  branches: {grid: [1, 2, 3, 4]}
  model.name: vit_u{depth}x{branches}_8
  optim.lr: {loguniform: [1.0e-5, 1.0]}
  optim.weight_decay: {quniform: [0.0, 0.3, 0.1]}
  data.mix.mixup: {uniform: [0.0, 0.8]}
  optim.rule: {choice: [adamw, {kind: sgd, momentum: 0.8}]}
where: [depth * branches == 12]
"""
TPE = "search: {kind: tpe, trials: 40, first: 10, seed: 3}\n"
NSGA2 = "search: {kind: nsga2, trials: 60, population: 10, second_goal: device_seconds}\n"


def space_of(folder, search, text=SPACE):
    (folder / "space.yaml").write_text(text + search)
    return read_space(folder / "space.yaml")


def finished(score):
    return TrialRecord("finished", ((10, score),))


def observed(space, suggestion, record, cost=None):
    costs = {} if cost is None else {space.search.second_goal: cost}
    return Trial(TrialEntry(draw_point(space, suggestion.values), suggestion.asked), record, costs)


def searched(space, number, score, cost=None):
    """Observations and values of this many points, drawn one after another."""
    observations, sampled = [], []
    for _ in range(number):
        new = ask(space, observations, 0)
        observations.append(observed(space, new, finished(score(new.values)), cost and cost(new.values)))
        sampled.append(new.values)
    return observations, sampled


@pytest.mark.parametrize("search", [TPE, NSGA2])
def test_every_point_is_allowed_and_a_run(tmp_path, search):
    space = space_of(tmp_path, search)
    _, sampled = searched(space, 25, lambda values: values["optim.lr"], lambda values: float(values["depth"]))
    for values in sampled:
        assert values["depth"] * values["branches"] == 12
        point = draw_point(space, values)
        assert point is not None
        assert point.settings["model.name"] == f"vit_u{values['depth']}x{values['branches']}_8"
        assert point.settings["optim.weight_decay"] in (0.0, 0.1, 0.2, 0.3)
        assert 1e-5 <= point.settings["optim.lr"] <= 1
    assert len({values["depth"] for values in sampled}) == 4
    assert len({name_of(draw_point(space, values), space) for values in sampled}) > 15


@pytest.mark.parametrize("search", [TPE, NSGA2])
def test_a_point_depends_only_on_earlier_observations(tmp_path, search):
    space = space_of(tmp_path, search)
    observations, sampled = searched(space, 24, lambda values: -abs(math.log(values["optim.lr"] / 1e-2)), lambda _: 1.0)
    for number in (0, 5, 13, 23):
        assert ask(space, observations[:number], 0).values == sampled[number]
    assert ask(space, observations, 1).values != ask(space, observations, 0).values


@given(st.lists(st.sampled_from(["finished", "stopped early", "failed", "running", "waiting"]), max_size=14))
@settings(max_examples=25, deadline=None)
def test_every_state_of_the_trials_allows_a_next_point(tmp_path_factory, states):
    for search in (TPE.replace("first: 10", "first: 2"), NSGA2.replace("population: 10", "population: 2")):
        space, observations = space_of(tmp_path_factory.mktemp("space"), search), []
        for number, state in enumerate(states):
            scores = ((5, 0.1), (10, 0.01 * number)) if state in ("finished", "stopped early", "running") else ()
            cost = float(number) if state == "finished" and number % 2 else None
            observations.append(observed(space, ask(space, observations, 0), TrialRecord(state, scores), cost))
        assert draw_point(space, ask(space, observations, 0).values) is not None


@pytest.mark.parametrize("search", [TPE, NSGA2])
def test_a_goal_that_is_not_finite_allows_a_next_point(tmp_path, search):
    space = space_of(tmp_path, search)
    observations, _ = searched(space, 3, lambda _: math.nan, lambda _: 1.0)
    assert draw_point(space, ask(space, observations, 0).values) is not None


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        (
            "[adamw, {kind: sgd, momentum: 0.8}]",
            "[{kind: sgd, momentum: 0.8}]",
            lambda drawn: "a" in drawn["optim.rule"],
        ),
        ("[12, 6, 4, 3]", "[6, 4, 3]", lambda drawn: drawn["depth"] == 12),
        ("[1.0e-5, 1.0]", "[1.0e-5, 1.0e-3]", lambda drawn: drawn["optim.lr"] > 1e-3),
        ("[0.0, 0.3, 0.1]", "[0.0, 0.3, 0.15]", lambda drawn: drawn["optim.weight_decay"] in (0.1, 0.2)),
        ("[1, 2, 3, 4]", "[1, 2, 3, 4, 12]", lambda _: False),
    ],
)
def test_a_changed_space_forgets_only_the_points_that_it_has_lost(tmp_path, monkeypatch, old, new, lost):
    known = []
    monkeypatch.setattr(sampler, "_optuna_trial", lambda *args: known.append(args) or _optuna_trial(*args))
    observations, _ = searched(space_of(tmp_path, TPE), 12, lambda values: values["optim.lr"])
    known.clear()
    space = space_of(tmp_path, TPE, SPACE.replace(old, new))
    ask(space, observations, 0)
    assert [args[1] for args in known] == [each for each in observations if not lost(each.entry.point.drawn)]
    for _, observation, params, _ in known:
        assert draw_point(space, sampler._values(space, params)).drawn == observation.entry.point.drawn


def test_tpe_learns(tmp_path):
    space = space_of(tmp_path, TPE)

    def score(values):
        return -abs(math.log10(values["optim.lr"]) + 2) - 0.5 * (values["branches"] != 2)

    _, sampled = searched(space, 40, score)
    by_chance, learned = ([score(values) for values in some] for some in (sampled[:10], sampled[30:]))
    assert statistics.mean(learned) > statistics.mean(by_chance) + 0.5


def test_tpe_minimizes(tmp_path):
    space = space_of(tmp_path, TPE + "goal: {metric: val/loss, mode: min}\n")
    _, sampled = searched(space, 40, lambda values: abs(math.log10(values["optim.lr"]) + 2))
    errors = [abs(math.log10(values["optim.lr"]) + 2) for values in sampled]
    assert statistics.mean(errors[30:]) < statistics.mean(errors[:10]) - 0.3


@pytest.mark.slow
def test_nsga2_finds_the_trade_off(tmp_path):
    space = space_of(tmp_path, NSGA2)

    def score(values):  # good learning rates and large models
        return math.log2(values["depth"]) - abs(math.log10(values["optim.lr"]) + 2)

    def cost(values):
        return values["depth"] + 10 * values["data.mix.mixup"]

    def spread(points):
        """The area between the worst corner and the front."""
        values, costs = [score(point) for point in points], [cost(point) for point in points]
        area, reached = 0.0, -5.0
        for place in pareto_front(costs, values, "max"):
            area += (20 - costs[place]) * max(0.0, values[place] - reached)
            reached = max(reached, values[place])
        return area

    _, sampled = searched(space, 120, score, cost)
    random_values = [point.drawn for point in random_points(space, 60)]
    assert spread(sampled[60:]) > spread(random_values)
    for better in (score, lambda values: -cost(values)):
        assert statistics.mean(map(better, sampled[60:])) > statistics.mean(map(better, random_values))


def test_nsga2_with_a_scheduler_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="scheduler: got asha, expected none: search nsga2"):
        space_of(tmp_path, NSGA2 + "scheduler: asha\n")


def test_an_unknown_second_goal_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"space.yaml.*search.*second_goal: got 'flops'.*did you mean gflops"):
        space_of(tmp_path, NSGA2.replace("device_seconds", "flops"))
