"""The report of a sweep: its statistics against scipy, its page in a real browser, and only supported statements."""

import csv
import html
import io
import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image, ImageColor
from test_layers import ROOT
from test_recipes import EXPECTATIONS

from vitray.config import load_run
from vitray.config.model_names import parse_name
from vitray.config.parsing import parse_overrides
from vitray.metrics.groups import dunnett, pool, tukey
from vitray.pages.files import csv_text
from vitray.pages.plotting import DARK, LIGHT, to_png
from vitray.pages.rendering import ENVIRONMENT, Column, Table
from vitray.sweeps.report import SweepResult, TrialResult, charts, is_imagenet, paper_result, write_report
from vitray.sweeps.report.charts import smooth
from vitray.sweeps.report.drawing import Label, column_axis, label_points, spread_out
from vitray.sweeps.report.page import drawings_of, render, table_of
from vitray.sweeps.report.papers import PAPER, TITLE
from vitray.sweeps.report.results import (
    COSTS,
    Measure,
    grouped,
    leader,
    pareto_front,
    results_of,
)

HOSTILE = "<script>alert(1)</script> $x_{ \"quoted\" & 'single' 猫\n" + "x" * 200


def trial(name="a", goal: float | None = 0.5, state="finished", **other) -> TrialResult:
    unset = {"settings": {}, "reason": None, "curves": {}, "device_seconds": None, "params": None, "gflops": None}
    return TrialResult(**{"name": name, "state": state, "goal": goal, "command": "vitray train demo", **unset, **other})


def sweep(trials, **other) -> SweepResult:
    texts = dict.fromkeys(("name", "recipe", "space_text", "plan", "began", "command"), "text")
    return SweepResult(**{"goal": "val/top1", "mode": "max", "circumstances": {}, **texts, **other}, trials=trials)


def cell(name, mode, lr, seed, top, state="finished", reason=None) -> TrialResult:
    """A trial of the example, in which the network, the mode and the learning rate vary."""
    shape, rng = parse_name(name), random.Random(f"{name} {mode} {lr} {seed}")
    last_step = {"finished": 1500, "stopped early": 450, "failed": 300, "running": 750, "waiting": 0}[state]
    gaps = [(step, 0.75 * (math.exp(-step / 330) - math.exp(-1500 / 330))) for step in range(150, last_step + 1, 150)]
    top1 = [(step, top * (1 - share)) for step, share in gaps]
    loss = [(step, 2 * math.exp(-step / 470) + 0.3 + 0.03 * rng.random()) for step in range(10, last_step + 1, 10)]
    blocks = shape.depth * shape.branches
    return trial(
        f"{shape.depth}x{shape.branches} {mode} lr={lr:g} seed={seed}",
        max((value for _, value in top1), default=None) if state != "failed" else None,
        state,
        reason=reason,
        settings={"model.name": name, "task.mode": mode, "optim.lr": lr, "seed": seed},
        curves={"val/top1": top1, "train/loss": loss},
        device_seconds=last_step * blocks * (0.8 if mode == "attn" else 1) * (0.1 + 0.005 * rng.random()),
        params=50_000 * blocks,
        gflops=0.002 * blocks,
        command=f"vitray train demo_finetune model.name={name} task.mode={mode} optim.lr={lr:g} seed={seed}",
        run_url=f"http://127.0.0.1:5000/#/experiments/1/runs/{rng.getrandbits(128):032x}",
    )


def example() -> SweepResult:
    """Four networks with two seeds, other modes and learning rates of the best one, one failure and one early stop."""
    accuracies = {"vit_u12x1_8": 0.823, "vit_u6x2_8": 0.829, "vit_u24x1_8": 0.842, "vit_u12x2_8": 0.858}
    trials = [cell(name, "full", 3e-3, 0, top) for name, top in accuracies.items()]
    trials += [cell(name, "full", 3e-3, 1, top + 0.002 + 0.001 * ("x2" in name)) for name, top in accuracies.items()]
    trials += [cell("vit_u12x2_8", "full", lr, 0, top) for lr, top in ((3e-4, 0.801), (1e-3, 0.836), (1e-2, 0.817))]
    trials += [cell("vit_u12x2_8", "attn", lr, 0, top) for lr, top in ((1e-3, 0.811), (3e-3, 0.839), (1e-2, 0.847))]
    trials += [cell("vit_u12x2_8", "full", 3e-2, 0, 0.6, "failed", "Traceback\n  in worker\nRunError: the loss is nan")]
    trials += [cell("vit_u24x1_8", "full", 3e-4, 0, 0.76, "stopped early", "in the lower half of 9 at step 500")]
    return sweep(trials, name="depth-branches", space_text="seed: [0, 1]\n", circumstances={"hardware": "2 CPUs"})


def hostile() -> SweepResult:
    trials = [
        trial(
            HOSTILE,
            0.1 * place,
            settings={HOSTILE: f"{HOSTILE}{place // 2}", "model.name": HOSTILE, "seed": place % 2},
            curves={"val/top1": [(1, 0.1), (2, 0.2)]},
            device_seconds=place + 1.0,
            run_url="javascript:alert(1)",
        )
        for place in range(4)
    ]
    trials.append(trial(HOSTILE, float("nan"), "failed", reason=f"{HOSTILE}\n{HOSTILE}", command=HOSTILE))
    texts = dict.fromkeys(("name", "recipe", "space_text", "plan", "began", "command"), HOSTILE)
    return sweep(trials, **texts, circumstances={HOSTILE: HOSTILE})


def figure_1() -> SweepResult:
    """Every split of two sizes into branches, with two widths and three seeds."""
    trials = []
    for width, blocks in (("s", 36), ("s", 60), ("b", 36)):
        for branches, gain in ((1, 0.0), (2, 0.006), (3, 0.004), (4, -0.003)):
            name = f"vit_{width}{blocks // branches}x{branches}_16"
            for seed in range(3):
                top = 0.8 + 0.02 * (width == "b") + blocks / 6000 + gain + 0.0007 * ((seed + branches) % 3)
                settings = {"model.name": name, "seed": seed}
                paper = next((each for each in PAPER if each[:2] == (name, "300 epochs")), None)
                trials.append(trial(f"{name} {seed}", top, settings=settings, paper=paper, gflops=float(blocks)))
    return sweep(trials)


SWEEPS = {"example": example, "hostile": hostile, "figure 1": figure_1}


# ---- statistics ------------------------------------------------------------------------------------------------------


VALUES = st.lists(st.floats(-100, 100).map(lambda value: round(value, 3)), min_size=2, max_size=9)


@given(VALUES)
def test_mean_and_deviation_of_a_group_agree_with_numpy(values):
    [group] = grouped([trial("", value, settings={"seed": seed}) for seed, value in enumerate(values)])
    assert (group.mean, group.sd) == pytest.approx((np.mean(values), np.std(values, ddof=1)), abs=1e-9)
    assert len(group.scores) == len(values)


def repeated(scores, **other) -> SweepResult:
    """A sweep of {value of a setting: {seed: score}}."""
    settings = [
        ({"optim.rule.kind": rule, "seed": seed}, goal) for rule, each in scores.items() for seed, goal in each.items()
    ]
    return sweep([trial("", goal, settings=each) for each, goal in settings], **other)


@pytest.mark.parametrize(
    ("a", "b", "mode", "verdict"),
    [
        ([1.0, 1.1], [0.0, 0.1], "max", "better"),
        ([1.0, 1.1], [2.0, 2.1], "min", "better"),
        ([1.0, 2.1], [0.0, 1.9], "max", "no clear difference"),
        ([0.5, 0.5], [0.3, 0.3], "max", "no clear difference"),  # no spread
    ],
)
def test_a_verdict_needs_an_interval_on_one_side_of_zero(a, b, mode, verdict):
    [pair] = results_of(repeated({"a": dict(enumerate(a)), "b": dict(enumerate(b))}, goal="val/loss", mode=mode)).pairs
    assert (pair.one.label, pair.verdict(mode)) == ("rule a", verdict)


def test_one_value_has_no_spread():
    [group] = grouped([trial("", 0.5)])
    assert (group.mean, group.sd, len(group.scores)) == (0.5, None, 1)


# ---- groups ----------------------------------------------------------------------------------------------------------

RATES, NAMES = st.sampled_from([1e-3, 3e-3, 0.0030000001]), st.sampled_from(["s12x1", "s6x2"])
SETTINGS = st.fixed_dictionaries({"seed": st.integers(0, 2)}, optional={"optim.lr": RATES, "model.name": NAMES})


@given(st.lists(st.builds(lambda settings, goal: trial("", goal, settings=settings), SETTINGS, st.floats(0, 1))))
def test_a_group_has_all_trials_with_its_settings(trials):
    groups = grouped(trials)
    assert sorted(id(each) for group in groups for each in group.trials) == sorted(map(id, trials))
    for group in groups:
        assert all({**each.settings, "seed": 0} == {**group.settings, "seed": 0} for each in group.trials)
    assert len({group.label for group in groups}) == len(groups)
    assert len({json.dumps(group.settings, sort_keys=True) for group in groups}) == len(groups)


def test_each_finished_seed_counts_once():
    settings = [{"optim.lr": 0.1, "seed": seed} for seed in (0, 1, 1, 2, 3, 4)]
    states = ["finished", "finished", "finished", "failed", "stopped early", "finished"]
    goals = [0.2, 0.4, 0.6, 0.9, 0.9, float("nan")]
    trials = [trial("", goal, state, settings=each) for goal, state, each in zip(goals, states, settings, strict=True)]
    [group] = grouped(trials)
    assert list(group.scores.values()) == [0.2, 0.5]
    assert (group.mean, group.sd) == pytest.approx((0.35, np.std([0.2, 0.5], ddof=1)))


def test_different_values_with_the_same_text_are_separate_groups():
    trials = [
        trial("", 0.1, settings={"a": value, "optim.lr": lr}, gflops=lr) for value in (True, "yes") for lr in (1, 2)
    ]
    results = results_of(sweep(trials))
    assert [group.label for group in results.groups] == ["a yes, lr 1", "a yes, lr 2"] * 2
    [axis] = drawings_of(results)["lr"][0].draw(LIGHT).axes
    assert [text.get_text() for text in axis.texts] == ["a yes"] * 2


def test_groups_come_best_first_in_both_modes():
    trials = [trial(str(goal), goal, settings={"optim.lr": goal}) for goal in (0.3, 0.1, 0.2)]
    trials.append(trial("failed", 0.9, "failed", settings={"optim.lr": 0.9}))
    for mode, order in (("max", [0.3, 0.2, 0.1, 0.9]), ("min", [0.1, 0.2, 0.3, 0.9])):
        groups = results_of(sweep(trials, goal="val/loss", mode=mode)).groups
        assert [group.settings["optim.lr"] for group in groups] == order


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        (["vit_s36x1_16", "vit_s18x2_16"], ["36x1", "18x2"]),
        (["vit_s36x1_16", "vit_b18x2_16_hmlp"], ["ViT-S36x1/16", "ViT-B18x2/16 hmlp_bn"]),
        (["vit_s36x1_16", "mine"], ["vit_s36x1_16", "mine"]),
    ],
)
def test_network_labels_show_only_differences(settings, labels):
    assert [group.label for group in grouped([trial(settings={"model.name": name}) for name in settings])] == labels


def test_a_label_has_only_the_varied_settings():
    paths = ("task.mode", "optim.lr", "optim.rule.kind", "model.drop", "data.url", "seed")
    values = [("attn", 1e-5, "sgd", None, "data/demo", 0), ("full", 3e-3, "lamb", 0.1, "data/demo", 1)]
    settings = [dict(zip(paths, each, strict=True)) for each in values]
    labels = [group.label for group in grouped([trial(settings=each) for each in settings])]
    assert labels == ["attn, lr 1e-05, rule sgd, drop none", "full, lr 0.003, rule lamb, drop 0.1"]


SCORES = {"a": {0: 0.9, 1: 0.8, 2: 0.7}, "b": {1: 0.5, 2: 0.6, 3: 0.1}, "c": {0: 0.1}}


@pytest.mark.parametrize("stage", [None, "pretrained"])
def test_differences_are_of_groups_with_several_seeds(stage):
    [pair] = results_of(repeated(SCORES, shared_stage=stage)).pairs
    assert (pair.one.label, pair.other.label) == ("rule a", "rule b")
    pooled = pool({name: SCORES[name] for name in "ab"}, by_seed=stage is not None)
    assert pooled is not None
    assert [pair.difference] == tukey(pooled, [("a", "b")])


def test_the_page_says_what_seeds_have_in_common_and_how_many_would_tell():
    near = {"a": {0: 0.58, 1: 0.62, 2: 0.67}, "b": {0: 0.56, 1: 0.6, 2: 0.64}}
    texts = {}
    for stage in (None, "pretrained"):
        results = results_of(repeated(near, shared_stage=stage))
        texts[stage] = html.unescape(render(results, {}, b""))
        assert f"takes {results.seeds_to_tell} seeds a group" in texts[stage]
        assert f"{results.seeds_to_tell - 3} more than there are," in texts[stage]
    assert "the effect that each has on all of them through pretrained" in texts["pretrained"]
    assert "has on all of them" not in texts[None]
    assert "is better than rule b: +2.33" in texts["pretrained"]
    assert "is not clearly different from rule b: +2.33" in texts[None]
    loss = results_of(repeated(near, goal="val/loss", mode="min"))
    assert loss.seeds_to_tell is None
    assert "seeds a group" not in render(loss, {}, b"")


def test_groups_are_compared_with_the_control_that_a_space_names():
    near = {"a": {0: 0.58, 1: 0.62, 2: 0.67}, "b": {0: 0.56, 1: 0.6, 2: 0.64}, "c": {0: 0.51, 1: 0.5, 2: 0.53}}
    results = results_of(repeated(near, control={"optim.rule.kind": "b"}))
    assert [(pair.one.label, pair.other.label) for pair in results.pairs] == [
        ("rule a", "rule b"),
        ("rule c", "rule b"),
    ]
    pooled = pool(near, by_seed=False)
    assert pooled is not None
    assert [pair.difference for pair in results.pairs] == [*dunnett(pooled, "b").values()]
    text = html.unescape(render(results, {}, b""))
    assert "p are Dunnett's: they hold for all differences from the control together." in text
    assert "is not clearly different from rule b" in text
    # Until the control has two seeds, there is nothing to compare with.
    assert results_of(repeated(near | {"b": {0: 0.56}}, control={"optim.rule.kind": "b"})).pairs == []


def test_groups_are_ordered_by_their_means_as_if_each_had_all_seeds():
    scores = {"a": {0: 0.50, 1: 0.61}, "b": {0: 0.61, 1: 0.70, 2: 0.21}, "c": {0: 0.40, 1: 0.51, 2: 0.0}}
    for stage, order in ((None, "abc"), ("pretrained", "bac")):
        results = results_of(repeated(scores, shared_stage=stage))
        assert [group.label for group in results.groups] == [f"rule {name}" for name in order]
        assert all(pair.difference.mean > 0 for pair in results.pairs)


def test_groups_that_scatter_unequally_are_said_to():
    wide = {"a": {0: 0.58, 1: 0.62, 2: 0.67}, "b": {0: 0.5600, 1: 0.5601, 2: 0.5602}}
    alike = {"a": wide["a"], "b": {0: 0.56, 1: 0.6, 2: 0.64}}
    assert "They do not (Bartlett's test, p <0.0001)" in html.unescape(render(results_of(repeated(wide)), {}, b""))
    assert "Bartlett" not in render(results_of(repeated(alike)), {}, b"")
    assert "Bartlett" not in render(results_of(repeated(wide, shared_stage="pretrained")), {}, b"")


@pytest.mark.parametrize(("groups", "pairs"), [(2, 1), (5, 10), (6, 5), (20, 19)])
def test_many_groups_are_compared_only_with_the_best(groups, pairs):
    settings = [{"optim.lr": lr, "seed": seed} for lr in range(groups) for seed in (0, 1)]
    trials = [trial("", each["optim.lr"] + 0.1 * each["seed"], settings=each) for each in settings]
    compared = results_of(sweep(trials)).pairs
    assert len(compared) == pairs
    assert all(pair.difference.mean > 0 for pair in compared)


COORDINATE = st.integers(0, 6)


@given(st.lists(st.tuples(COORDINATE, COORDINATE), max_size=12), st.sampled_from(["max", "min"]))
def test_the_front_has_every_undominated_point(points, mode):
    def dominates(one, other):
        better = one[1] >= other[1] if mode == "max" else one[1] <= other[1]
        return one[0] <= other[0] and better and one != other

    expected = [place for place, point in enumerate(points) if not any(dominates(other, point) for other in points)]
    front = pareto_front([cost for cost, _ in points], [value for _, value in points], mode)
    assert sorted(front) == expected
    assert [points[place][0] for place in front] == sorted(points[place][0] for place in front)


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_leader_is_a_finished_trial_if_there_is_one(mode):
    trials = [trial("running", 0.9, "running"), trial("low", 0.2), trial("high", 0.4), trial("broken", None, "failed")]
    measure = Measure("val/top1", mode)
    assert leader(trials, measure) == trials[2 if mode == "max" else 1]
    assert leader(trials[:1], measure) == trials[0]
    assert leader(trials[3:], measure) is None


# ---- papers ----------------------------------------------------------------------------------------------------------


def test_paper_numbers_are_quoted_exactly():
    """Cells of Three things, Tables 1, 2, 3 and 7, typed a second time."""
    cells = {
        ("vit_ti12x1_16", "400 epochs, LayerScale"): 73.5,
        ("vit_b36x1_16", "300 epochs, LayerScale"): 83.9,
        ("vit_b18x2_16", "300 epochs"): 83.3,
        ("vit_s24x2_16", "300 epochs"): 82.6,
        ("vit_b12x1_16_hmlp_ln", "300 epochs"): 82.50,
    }
    assert {each[:2]: each.top1 for each in PAPER if each[:2] in cells} == cells
    assert len({each[:2] for each in PAPER}) == len(PAPER) == 27
    assert all(str(parse_name(each.model)) == each.model for each in PAPER)


def test_the_recipes_expectations_are_the_papers_numbers():
    checked = 0
    for path, expected in (each.values for each in EXPECTATIONS):
        if path.stem.startswith("a2_"):
            paper = paper_result(load_run(path, expected.overrides))
            assert paper is not None
            assert paper.top1 == float(expected.result.split(" ")[0])
            checked += 1
    assert checked >= 27


@pytest.mark.parametrize(
    ("overrides", "top1"),
    [
        ([], 82.2),
        (["optim.lr=0.3"], 82.2),
        (["model.name=ViT-B18x2/16"], 83.3),
        (["model.name=ViT-B18x2/16", "model.layerscale=1e-4", "optim.duration=400 epochs"], 84.1),
        (["model.name=ViT-B17x2/16"], None),
        (["optim.duration=200 epochs"], None),
        (["task.loss=softmax"], None),
        (["model.image_size=384"], None),
        (["data.holdout=0.01"], None),
        (["task.kind=finetune", "task.weights=w"], None),
    ],
)
def test_a_run_matches_the_paper_by_network_and_training(overrides, top1):
    run = load_run(overrides=["model.name=ViT-B/16", "model.image_size=224", "task.loss=bce"])
    paper = paper_result(run.replace({"optim.duration": "300 epochs", **parse_overrides(overrides)}))
    assert (None if paper is None else paper.top1) == top1


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1_281_167, 50_000, 1000), True),
        ((1_280_000, 50_000, 1000), True),  # without the images that are also in val
        ((1_000_000, 50_000, 1000), False),
        ((1_281_168, 50_000, 1000), False),
        ((50_000, 10_000, 10), False),  # CIFAR-10
        ((4800, 1200, 10), False),  # the demo
    ],
)
def test_imagenet_is_identified_by_its_sizes(sizes, expected):
    assert is_imagenet(*sizes) == expected


# ---- the page --------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """A parsed page: its elements, its text, the rows of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inside = ""
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.inside = ""
        if tag == "table":
            self.rows.append([])

    def handle_data(self, data):
        if self.inside != "style":
            self.texts.append(data)
        if self.rows and self.rows[-1] and data.strip():
            self.rows[-1][-1] += data

    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def anchors(self) -> list[str]:
        return [attrs["id"] or "" for tag, attrs in self.elements if tag == "section"]

    def attributes(self, name: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.elements if name in attrs]


def page_of(swept: SweepResult, folder: Path) -> Page:
    write_report(swept, folder)
    return Page((folder / "index.html").read_text())


def test_a_hostile_name_is_rendered_as_text(tmp_path):
    page = page_of(hostile(), tmp_path)
    assert {tag for tag, _ in page.elements} & {"script", "iframe", "object", "form"} == set()
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert all(url.startswith(("#", "data:text/csv")) for url in page.attributes("href"))
    assert " ".join(HOSTILE.split()) in page.text()
    assert "default-src 'none'" in page.attributes("content")[1]


def test_templates_escape_all_text():
    parts: Any = ENVIRONMENT.get_template("parts.html").module
    table = parts.table(Table('"><i>', [Column("<"), Column("", True)], [['<"&', "'"]]))
    assert ' aria-label="&#34;&gt;&lt;i&gt;"' in table
    assert '<th scope="col">&lt;</th>' in table
    assert '<td>&lt;&#34;&amp;</td><td class="number">&#39;</td>' in table
    assert parts.link("https://host/?a=1&b", "x").startswith('<a href="https://host/?a=1&amp;b" ')
    assert parts.link("javascript:alert(1)", "<x").strip() == "&lt;x"
    assert ENVIRONMENT.loader is not None
    for name in ENVIRONMENT.list_templates():
        assert not re.search(r"\bsafe\b|autoescape|Markup", ENVIRONMENT.loader.get_source(ENVIRONMENT, name)[0])
    with pytest.raises(UndefinedError):
        ENVIRONMENT.from_string("{{ unknown }}").render()


@pytest.fixture(scope="module")
def example_page(tmp_path_factory) -> Page:
    return page_of(example(), tmp_path_factory.mktemp("example"))


def test_the_page_needs_nothing_beside_it(example_page):
    page = example_page
    assert all(url.startswith("data:image/png;base64,") for url in page.attributes("src") + page.attributes("srcset"))
    assert len(page.attributes("src")) == len(page.attributes("srcset")) == 11
    assert all(len(alt) > 20 for alt in page.attributes("alt"))
    assert [tag for tag, _ in page.elements if tag in ("h1", "h2")] == ["h1"] + ["h2"] * 9


def test_the_headline_has_the_best_trial_and_the_difference_over_seeds(example_page):
    page = example_page.text()
    assert "86.10 % highest val/top1 12x2 full lr=0.003 seed=1" in page
    assert "Best on average: 12x2, full, lr 0.003, 85.95 ± 0.21 (n = 2)." in page
    assert "It is better than 24x1, full, lr 0.003: +1.65, with a 95 % interval from +0.92 to +2.38." in page
    assert "16 trials 14 finished 1 stopped early 1 failed" in page
    assert "RunError: the loss is nan" in page
    assert "in the lower half of 9 at step 500" in page


def test_a_better_unfinished_trial_is_named_beside_the_leader(tmp_path):
    page = page_of(sweep([trial("done", 0.5), trial("cut", 0.75, "stopped early")]), tmp_path).text()
    assert "50.00 % highest val/top1 done cut, stopped early, had reached 75.00 %." in page


def test_trials_are_sorted_by_their_goal_and_have_commands(example_page):
    swept, page = example(), example_page
    header = next(place for place, row in enumerate(page.rows) if row[:2] == ["trial", "val/top1, %"])
    rows = page.rows[header + 1 : header + 17]
    goals = [float(row[1]) for row in rows if row[1] != "–"]
    assert goals == sorted(goals, reverse=True)
    assert len(goals) == 15
    assert {row[0] for row in rows} == {each.name + each.command for each in swept.trials}
    assert {each.run_url for each in swept.trials} <= set(page.attributes("href"))


def test_numbers_of_a_paper_have_a_separate_column(tmp_path):
    page = page_of(figure_1(), tmp_path)
    header = next(place for place, row in enumerate(page.rows) if "ours, top1 %" in row)
    assert page.rows[header][3] == f"printed in {TITLE}"
    assert [row[0] for row in page.rows[header + 1 : header + 3]] == ["ViT-B18x2/16", "ViT-B36x1/16"]
    assert [row[3] for row in page.rows[header + 1 : header + 3]] == ["83.3 Table 2", "82.9 Table 2"]
    # The number appears once, and never with another metric.
    assert sum("83.3 Table 2" in cell for row in page.rows for cell in row) == 1
    assert "papers" not in page_of(figure_1()._replace(goal="val/loss", mode="min"), tmp_path).anchors()


def varied(**settings) -> SweepResult:
    """A sweep over the product of some settings."""
    products = [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]
    paths = [{key.replace("__", "."): value for key, value in each.items()} for each in products]
    return sweep([trial(str(each), 0.1 + 0.01 * place, settings=each) for place, each in enumerate(paths)])


SQUARE = ["vit_s12x1_16", "vit_s6x1_16", "vit_s6x2_16"]
ALWAYS = ["trials", "origin"]


@pytest.mark.parametrize(
    ("swept", "anchors", "names"),
    [
        (sweep([]), ALWAYS, []),
        (sweep([trial(goal=None, state="waiting")]), ALWAYS, []),
        (sweep([trial()]), ALWAYS, []),
        (sweep([trial(goal=None, state="failed", reason="why")]), ["trials", "unfinished", "origin"], []),
        (varied(seed=[0, 1, 2]), ["groups", *ALWAYS], []),
        (varied(optim__lr=[1e-3, 1e-2]), ["lr", *ALWAYS], ["lr"]),
        (varied(task__mode=["full", "attn"]), ALWAYS, []),
        (varied(optim__lr=[1e-3, 1e-2], seed=[0]), ["lr", *ALWAYS], ["lr"]),
        (
            varied(task__mode=["full", "attn"], seed=[0, 1]),
            ["groups", "differences", *ALWAYS],
            ["groups", "differences"],
        ),
        (varied(model__name=SQUARE), ["depth", *ALWAYS], ["blocks_0", "branches", "depth_branches_0"]),
        (varied(model__name=SQUARE[:1]), ALWAYS, []),
        (varied(model__name=["vit_s12x1_16", "vit_s6x2_16"]), ["depth", *ALWAYS], ["branches"]),
        (varied(model__name=["vit_s12x1_16", "vit_s6x1_16"]), ALWAYS, []),
        (varied(model__name=["vit_s12x1_16", "vit_b6x2_16"]), ALWAYS, []),
        (varied(model__name=["mine", "yours"]), ALWAYS, []),
        (sweep([trial(curves={"val/top1": [(1, 0.1), (2, 0.2)]})]), ["curves", *ALWAYS], ["curve_goal"]),
        (sweep([trial(curves={"train/loss": [(1, 0.1), (2, math.nan)]})]), ALWAYS, []),
        (
            sweep([trial(settings={"a": each}, gflops=each) for each in (1.0, 2.0)]),
            ["cost", *ALWAYS],
            ["cost_gflops"],
        ),
        (sweep([trial(settings={"a": each}, gflops=1.0) for each in (1, 2)]), ALWAYS, []),
    ],
)
def test_a_section_appears_only_with_content(tmp_path, swept, anchors, names):
    assert [drawing.name for drawings in drawings_of(results_of(swept)).values() for drawing in drawings] == names
    assert page_of(swept, tmp_path).anchors() == anchors
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == sorted(names + [f"{name}-dark" for name in names])


def test_a_best_rate_at_the_edge_of_the_range_is_noted():
    def caption(scores):
        trials = [trial("", goal, settings={"optim.lr": lr}) for lr, goal in scores.items()]
        return drawings_of(results_of(sweep(trials)))["lr"][0].caption

    assert "best rate is 0.1, the highest that finished: a higher one may be better" in caption({0.01: 0.1, 0.1: 0.2})
    assert "best rate is 0.01, the lowest that finished: a lower one may be better" in caption({0.01: 0.3, 0.1: 0.2})
    assert "best rate" not in caption({0.01: 0.1, 0.1: 0.2, 1.0: 0.1})


# ---- files -----------------------------------------------------------------------------------------------------------


def test_equal_sweeps_write_equal_bytes(tmp_path):
    swept = [varied(model__name=SQUARE, optim__lr=[1e-3, 1e-2], seed=[0, 1]) for _ in range(2)]
    one, other = (write_report(each, tmp_path / name) for each, name in zip(swept, ("one", "other"), strict=True))
    assert len(one) == 2 * 6 + 2
    assert [path.name for path in one] == [path.name for path in other]
    assert one[-1].name == "index.html"
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, other, strict=True))


def test_a_failed_write_keeps_the_previous_report(tmp_path, monkeypatch):
    write_report(sweep([trial("first")]), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(path, target):
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ValueError, match="no space left"):
        write_report(sweep([trial("second"), trial("third")]), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    monkeypatch.undo()
    write_report(sweep([trial("second")]), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(before)
    assert "second" in (tmp_path / "index.html").read_text()


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
ODD = st.sampled_from(["null", "1e-3", "true", "[1", "vit_s12x1_16", "", "a: b", "'", "~"])
SETTING = st.none() | st.booleans() | st.integers() | NUMBERS | st.text(max_size=9) | ODD | st.lists(st.integers())


@given(SETTING, NUMBERS, st.text(max_size=20))
def test_the_table_reads_back_as_written(value, goal, name):
    one = trial(name, goal, settings={"a.b": value}, reason=name, device_seconds=goal, params=7)
    rows = list(csv.DictReader(io.StringIO(table_of(sweep([one, trial("bare", None)])), newline="")))
    row = next(row for row in rows if row["params"] == "7")
    assert parse_overrides([f"a.b={row['a.b']}"]) == {"a.b": value}
    assert row["state"] == "finished"
    for text in (row["name"], row["reason"]):
        assert text.removeprefix("'") == name.removeprefix("'")  # in front of a formula
    assert float(row["goal"]) == float(row["device_seconds"]) == goal
    bare = next(row for row in rows if row["params"] == "")
    assert (bare["a.b"], bare["goal"], bare["gflops"]) == ("", "", "")


# ---- pictures --------------------------------------------------------------------------------------------------------

DRAWINGS = [
    pytest.param(make, section, place, id=f"{name} {drawing.name}")
    for name, make in SWEEPS.items()
    for section, drawings in drawings_of(results_of(make())).items()
    for place, drawing in enumerate(drawings)
]


@pytest.mark.parametrize(("make", "section", "place"), DRAWINGS)
def test_nothing_is_cut_off(make, section, place):
    drawing = drawings_of(results_of(make()))[section][place]
    for theme in (LIGHT, DARK):
        with Image.open(io.BytesIO(to_png(drawing.draw(theme)))) as opened:
            pixels = np.array(opened.convert("RGB"))
        paper = np.array(ImageColor.getrgb(theme.paper))
        # Ink at the edge means that something is cut off.
        assert all((edge == paper).all() for edge in (pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:]))
        assert (pixels != paper).any()


def test_the_front_passes_through_its_labeled_points():
    results = results_of(example())
    drawing = charts.draw_cost(results, COSTS[0])
    assert drawing is not None
    figure = drawing.draw(LIGHT)
    line = figure.axes[0].lines[0]
    places = pareto_front(
        [group.cost("device_seconds") for group in results.scored], [group.mean for group in results.scored], "max"
    )
    front = [results.scored[place] for place in places]
    assert np.allclose(line.get_xdata(), [group.cost("device_seconds") / 3600 for group in front])
    assert np.allclose(line.get_ydata(), [100 * group.mean for group in front])
    assert {group.label for group in front} <= {text.get_text() for text in figure.findobj(Text)}


def test_an_outlier_of_a_latency_does_not_move_that_of_its_network(tmp_path):
    trials = [
        trial(str(seed), settings={"seed": seed}, latency_ms=latency) for seed, latency in enumerate((4.0, 138.0, 4.2))
    ]
    (group,) = results_of(sweep(trials)).groups
    assert group.cost("latency_ms") == 4.0
    assert "Latency: the fastest forward pass of one image" in page_of(sweep(trials[1:2]), tmp_path).text()
    assert "Latency:" not in page_of(sweep([trial()]), tmp_path).text()


def test_costs_that_differ_only_by_chance_are_not_drawn():
    def cost_drawings(**costs):
        """Return the names of the cost figures of two trials."""
        costs_of_trials = [{cost: both[at] for cost, both in costs.items()} for at in (0, 1)]
        pair = [trial(str(at), settings={"optim.lr": at}, **each) for at, each in enumerate(costs_of_trials)]
        return {drawing.name for drawing in drawings_of(results_of(sweep(pair))).get("cost", [])}

    assert cost_drawings(device_seconds=(100.0, 101.0), peak_memory_bytes=(1e9, 1.04e9)) == set()
    assert cost_drawings(device_seconds=(100.0, 110.0), peak_memory_bytes=(1e9, 2e9)) == {
        "cost_device_seconds",
        "cost_peak_memory_bytes",
    }
    assert cost_drawings(latency_ms=(1.0, 3.0), params=(7, 7)) == set()
    assert cost_drawings(latency_ms=(1.0, 3.0), params=(7, 8)) == {"cost_latency_ms", "cost_params"}


def test_a_map_shows_means_spreads_and_counts():
    [drawing] = charts.draw_maps(results_of(example()))
    texts = {text.get_text() for text in drawing.draw(LIGHT).findobj(Text)}
    assert {"85.95", "± 0.21, n = 2", "24 blocks", "ViT-U/8: val/top1, %", "depth", "parallel branches"} <= texts


def test_a_dollar_is_no_formula_and_a_missing_glyph_gives_no_warning():
    drawing = drawings_of(results_of(hostile()))["groups"][0]
    assert any(r"\$x" in text.get_text() for text in drawing.draw(DARK).findobj(Text))


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0.01, 0.08))
def test_labels_keep_their_order_and_a_minimum_distance(heights, gap):
    spread = spread_out(heights, gap)
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    sorted_places = [spread[place] for place in order]
    assert all(high - low >= gap - 1e-9 for low, high in itertools.pairwise(sorted_places))
    assert all(-1e-9 <= height <= 1 + 1e-9 for height in sorted_places)
    if all(high - low >= gap for low, high in itertools.pairwise(sorted(heights))):
        assert spread == pytest.approx(heights)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=2, max_size=9, unique=True), st.booleans())
@settings(max_examples=20)
def test_a_label_is_nearest_to_its_own_point_or_omitted(points, upwards):
    figure, axis = column_axis(LIGHT, 3.0, "")
    axis.plot(*zip(*points, strict=True), "o")
    axis.margins(0.3)
    labels = [Label(x, y, f"{x}, {y}", LIGHT.ink, needed=False) for x, y in points]
    label_points(figure, axis, labels, LIGHT, (), upwards)
    dots = {f"{x}, {y}": axis.transData.transform((x, y)) for x, y in points}
    boxes = {text.get_text(): text.get_window_extent() for text in axis.texts}
    for text, box in boxes.items():
        distances = {name: np.linalg.norm(np.clip(dot, box.p0, box.p1) - dot) for name, dot in dots.items()}
        assert distances[text] <= min(distances.values()) + 1
    for one, other in itertools.combinations(boxes.values(), 2):
        assert not one.padded(-1).overlaps(other.padded(-1))


def test_smoothing_averages_only_long_curves():
    short = [(step, float(step)) for step in range(60)]
    assert smooth(short) == ([float(step) for step, _ in short], [value for _, value in short])
    steps, values = smooth([(step, float(step)) for step in range(500)])
    assert np.allclose(values, np.array(steps) - 0.5)  # a line, at the middle of 20 points


def test_the_report_loads_no_pyplot_ray_mlflow_or_torch():
    code = "import sys, vitray.sweeps.report; print({'matplotlib.pyplot', 'ray', 'mlflow', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- colors ---------------------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes, 2009: linear RGB as seen without one kind of cone.
VISION = {
    "usual": np.eye(3),
    "without red cones": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "without green cones": [[0.3673, 0.8607, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
}


def cielab(color: str, vision) -> np.ndarray:
    rgb = np.array(to_rgb(color))
    linear = np.clip(vision @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]] @ linear
    x, y, z = np.cbrt(xyz / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colors_are_distinct_and_readable(theme):
    for vision in VISION.values():
        distances = [
            np.linalg.norm(cielab(one, np.array(vision)) - cielab(other, np.array(vision)))
            for one, other in itertools.combinations(theme.series, 2)
        ]
        assert min(distances) > 20
    for color in (*theme.series, theme.ink, theme.pale, theme.bad):
        assert charts.contrast(to_rgb(color), to_rgb(theme.paper)) >= 4.5
    assert charts.contrast(to_rgb(theme.pale), to_rgb(theme.raised)) >= 4.5


# ---- a browser -------------------------------------------------------------------------------------------------------

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1300,1000"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]

# A frame can be narrower than a browser window. The measuring script runs outside, since the page allows no script.
FRAME = """<!doctype html><iframe id="frame" width="{width}" height="900" srcdoc="{page}"></iframe>
<pre id="measured"></pre>
<script>onload = () => {{
  const page = frame.contentDocument, root = page.documentElement, images = [...page.images];
  page.querySelectorAll("details").forEach(each => each.open = true);
  measured.textContent = JSON.stringify({{
    window: frame.contentWindow.innerWidth,
    wide: root.scrollWidth,
    boxes: [...page.querySelectorAll("body *")].filter(each => !each.closest(".scroll > *")
      && each.getBoundingClientRect().right > root.clientWidth + 1).length,
    paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    drawn: images.every(image => image.complete && image.naturalWidth > 0),
    dark: images.filter(image => image.currentSrc === image.previousElementSibling?.srcset).length,
    images: images.length,
  }});
}}</script>"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """{name of a sweep: its page}."""
    folder = tmp_path_factory.mktemp("report")
    for name, make in SWEEPS.items():
        write_report(make(), folder / name)
    return {name: (folder / name / "index.html").read_text() for name in SWEEPS}


def measured_page(page, width, theme, folder):
    """Return the sizes and pictures of a page in a frame of a browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "needs a browser, which `make test-full` installs"
    (folder / "frame.html").write_text(FRAME.format(width=width, page=html.escape(page)))
    command = [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    command.append(f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}")
    done = subprocess.run([*command, f"file://{folder / 'frame.html'}"], capture_output=True, text=True, check=True)
    output = re.search(r'<pre id="measured">(.+?)</pre>', done.stdout)
    assert output, done.stderr[-2000:]
    return json.loads(html.unescape(output[1]))


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
@pytest.mark.parametrize("name", SWEEPS)
def test_a_browser_shows_the_page_in_any_width_and_theme(reports, tmp_path, name, width, theme):
    measured = measured_page(reports[name], width, theme, tmp_path)
    assert measured["window"] == width
    assert measured["wide"] <= width
    assert measured["boxes"] == 0
    assert measured["drawn"]
    assert measured["images"] > 0
    assert measured["dark"] == (measured["images"] if theme == "dark" else 0)
    red, green, blue = ImageColor.getrgb((DARK if theme == "dark" else LIGHT).paper)
    assert measured["paper"] == f"rgb({red}, {green}, {blue})"


# ---- tables in spreadsheets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"])
def test_a_text_in_a_csv_is_no_formula_of_a_spreadsheet(start):
    text = f"{start}cmd|' /C calc'!A0"
    ((name, cell),) = csv.reader(io.StringIO(csv_text([[text, "cat"]]), newline=""))
    assert (name, cell) == (f"'{text}", "cat")


def test_numbers_and_other_texts_in_a_csv_stay_as_they_are():
    row = [-0.5, 1e-9, -3, None, "-0.5", "+1e3", "-inf", "a=b", "", "猫", np.float32(-2)]
    ((*cells,),) = csv.reader(io.StringIO(csv_text([row])))
    assert cells == ["" if value is None else str(value) for value in row]


def test_one_function_writes_all_csv_files():
    sources = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "vitray").rglob("*.py")}
    writers = [
        str(path) for path, text in sources.items() if re.search(r"\bcsv\.(writer|DictWriter)\b|\.to_csv\(", text)
    ]
    assert writers == ["vitray/pages/files.py"]
