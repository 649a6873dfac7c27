"""Search spaces: points, their names and runs, and one message with its line for every fault."""

import contextlib
import json
import math
import random
import re
import shlex
from collections import Counter
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layers import ROOT
from test_recipes import CIFAR_RESULT

import tune_spaces
from pipelines import recipes
from vitray.config import Run, load_run
from vitray.config.sweep import MOST_POINTS, Distribution, slug
from vitray.data.augment.decode import decode_image
from vitray.data.augment.mixing import normalized, one_hot
from vitray.data.shards.demo import demo_item
from vitray.errors import ConfigError
from vitray.sweeps.plan import Recipe, plan_stages, with_absolute_addresses
from vitray.sweeps.space import (
    Space,
    SweepPoint,
    check_overrides,
    check_space,
    draw_point,
    extend_space,
    grid_points,
    name_of,
    points,
    random_points,
    read_space,
    run_of,
    split_overrides,
    stage_space,
)
from vitray.sweeps.space.expressions import evaluate, names_in
from vitray.system import storage
from vitray.tasks.build import build_task
from vitray.training.optim import build_optimizer, clip_gradients, set_learning_rate
from vitray.training.schedule import learning_rate, length_of
from vitray.weights.freezing import audit
from vitray.weights.pretrained import adapt

DEPTH = """
space:
  depth: {grid: [36, 18, 12, 9]}
  branches: {grid: [1, 2, 3, 4]}
  model.name: vit_s{depth}x{branches}_16
  optim.lr: {grid: [3.0e-3, 0.01]}
  seed: {seeds: 3}
where: ["depth * branches == 36"]
"""
RANDOM = "search: {kind: random, trials: 5, seed: 0}"


def space_of(folder, text):
    path = folder / "space.yaml"
    path.write_text(text)
    return read_space(path)


def point_names(space):
    return [name_of(point, space) for point in grid_points(space)]


# ---- grids -----------------------------------------------------------------------------------------------------------


def test_a_grid_with_a_constraint(tmp_path):
    space = space_of(tmp_path, DEPTH)
    points = grid_points(space)
    assert len(points) == 4 * 2 * 3
    shapes = dict.fromkeys(point.settings["model.name"] for point in points)
    assert list(shapes) == ["vit_s36x1_16", "vit_s18x2_16", "vit_s12x3_16", "vit_s9x4_16"]
    assert points[0].settings == {"model.name": "vit_s36x1_16", "optim.lr": 0.003, "seed": 0}
    assert points[0].drawn == {"depth": 36, "branches": 1, "optim.lr": 0.003, "seed": 0}
    assert point_names(space)[:4] == [
        "36x1 lr=3e-3 seed=0",
        "36x1 lr=3e-3 seed=1",
        "36x1 lr=3e-3 seed=2",
        "36x1 lr=0.01 seed=0",
    ]
    assert check_space(space, Run()) == points
    run = run_of(Run(), points[-1])
    assert (run.model.name, run.optim.lr, run.seed) == ("vit_s9x4_16", 0.01, 2)


@given(blocks=st.integers(1, 60), sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)), seeds=st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_a_grid_is_the_product_without_forbidden_points(blocks, sizes, seeds):
    depths, branches = (list(range(1, size + 1)) for size in sizes)
    space = Space.model_validate(
        {
            "space": {
                "depth": {"grid": depths},
                "branches": {"grid": branches},
                "model.name": "vit_u{depth}x{branches}_16",
                "seed": {"seeds": seeds},
            },
            "where": [f"depth * branches <= {blocks}"],
        }
    )
    allowed = [(d, b, s) for d in depths for b in branches for s in range(seeds) if d * b <= blocks]
    points = grid_points(space)
    assert [tuple(point.drawn.values()) for point in points] == allowed
    assert point_names(space) == [f"{d}x{b} seed={s}" for d, b, s in allowed]
    assert points == grid_points(space)


values = st.one_of(
    st.integers(-5, 5),
    st.floats(-100, 100, allow_nan=False),
    st.booleans(),
    st.none(),
    st.text("abz/ 1e-_é#:{", max_size=5),
    st.fixed_dictionaries({"kind": st.sampled_from(["a", "b"]), "x": st.integers(0, 2)}),
)


@given(
    grids=st.dictionaries(
        st.sampled_from(["optim.lr", "optim.rule", "data.url", "evaluate.batch", "optim.batch"]),
        st.lists(values, min_size=1, max_size=4, unique_by=slug),
        min_size=1,
    )
)
@settings(deadline=None, max_examples=100)
def test_names_are_unique_and_safe_in_a_path(tmp_path_factory, grids):
    space = Space.model_validate({"space": {name: {"grid": grid} for name, grid in grids.items()}})
    names = point_names(space)
    assert len(set(names)) == len(names) == math.prod(map(len, grids.values()))
    assert all(re.fullmatch(r"[\w.,=+ -]+", name) for name in names)
    path = tmp_path_factory.mktemp("space") / "space.yaml"
    path.write_text(space.to_yaml())
    assert read_space(path) == space


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (3e-3, "3e-3"), (0.01, "0.01"), (1e-5, "1e-5"), (0.0031, "0.0031"), (0.0, "0"), (-2.5, "-2.5"), (1e30, "1e30"),
        (True, "true"), (None, "null"), (12, "12"), ("90 epochs", "90_epochs"), ({"kind": "sgd", "x": 1}, "sgd,x=1"),
    ],
)  # fmt: skip
def test_slugs_are_short(value, label):
    assert slug(value) == label


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(deadline=None)
def test_the_slug_of_a_number_is_exact(number):
    assert float(slug(number)) == number


def test_names_list_each_varying_setting_once(tmp_path):
    # Widths differ, so depth x branches is ambiguous. A path is shortened to its last part if that is unique.
    text = "space:\n  model.name: {grid: [ViT-B/16, vit_s12x1_16]}\n  data.url: {grid: [a/cars, b/pets]}\n"
    assert point_names(space_of(tmp_path, text))[:2] == ["vit_b12x1_16 url=cars", "vit_b12x1_16 url=pets"]
    text = "space:\n  data.url: {grid: [a/x, b/x]}\n  optim.batch: {grid: [1, 2]}\n  evaluate.batch: {grid: [3, 4]}\n"
    assert point_names(space_of(tmp_path, text))[0] == "url=a_x optim.batch=1 evaluate.batch=3"
    # A name leaves out variables that follow from another by `where`, the later one first.
    text = """
space:
  rule: {grid: [adamw, sgd]}
  rate: {grid: [1, 30]}
  optim.rule: "{rule}"
  optim.lr: "{rate}e-3"
where: [(rate == 1) == (rule == "adamw")]
"""
    space = space_of(tmp_path, text)
    assert point_names(space) == ["rule=adamw", "rule=sgd"]
    assert [point.settings["optim.lr"] for point in check_space(space, Run())] == [1e-3, 0.03]


def test_a_section_is_one_value_named_by_its_kind(tmp_path):
    text = "space:\n  optim.rule: {grid: [{kind: sgd, momentum: 0.8}, {kind: adamw}, lamb]}\n"
    space = space_of(tmp_path, text)
    assert point_names(space) == ["rule=sgd", "rule=adamw", "rule=lamb"]
    base = load_run(None, ["optim.rule.betas=[0.9,0.99]"])
    runs = [run_of(base, point) for point in check_space(space, base)]
    assert runs[0].optim.rule.model_dump() == {"kind": "sgd", "momentum": 0.8, "nesterov": False}
    assert runs[1].optim.rule.betas == (0.9, 0.999)
    text = "space:\n  optim.rule: {grid: [{kind: sgd, momentum: 0.8}, {kind: sgd, momentum: 0.9}]}\n"
    assert point_names(space_of(tmp_path, text)) == ["rule=sgd,momentum=0.8", "rule=sgd,momentum=0.9"]


# ---- cases and stages ------------------------------------------------------------------------------------------------

STEMS = """
space:
  stem: {grid: [linear, hmlp_ln]}
  model.name: vit_u2x1_8_{stem}
  route:
    cases:
      plain: {optim.lr: 0.1}
      beit: {task: {kind: finetune, weights: "{pretrained}"}, optim.lr: 0.2}
  seed: {seeds: 2}
before:
  codes: {recipe: demo_tokenizer}
  pretrained:
    recipe: demo_masked
    settings: {model.name: "vit_u2x1_8_{stem}", task.objective.tokenizer: "{codes}", seed: "{seed}"}
"""


def test_a_lookup_sets_a_value_for_each_combination(tmp_path):
    text = "space:\n  depth: {grid: [6, 12]}\n  stem: {grid: [linear, conv]}\n  model.name: vit_u{depth}x1_16_{stem}\n"
    text += "  optim.lr: {of: [depth, stem], lookup: {6: {linear: 1e-3, conv: 2e-3}, 12: {linear: 5e-4}}}\n"
    space = space_of(tmp_path, text + "where: [depth == 6 or stem == 'linear']\n")
    rates = {name_of(point, space): point.settings["optim.lr"] for point in grid_points(space)}
    assert rates == {"vit_u6x1_16": 1e-3, "vit_u6x1_16_conv": 2e-3, "vit_u12x1_16": 5e-4}
    assert space_of(tmp_path, space.to_yaml()) == space


def test_a_case_sets_several_settings(tmp_path):
    text = 'space:\n  rule:\n    cases:\n      a: {optim.rule: sgd, optim.lr: 0.1}\n      b: {optim.lr: "{rate}"}\n'
    space = space_of(tmp_path, text + "  rate: {grid: [0.2, 0.3]}\n")
    assert point_names(space) == ["rule=a rate=0.2", "rule=a rate=0.3", "rule=b rate=0.2", "rule=b rate=0.3"]
    last = grid_points(space)[-1]
    assert (last.settings, last.shown) == ({"optim.lr": 0.3}, {"rule": "b"})
    with pytest.raises(ConfigError, match=r"the point rule=a rate=0.3: is the same run as rule=a rate=0.2"):
        check_space(space, Run())
    with pytest.raises(ConfigError, match=r"optim.lr=1: the space sets optim.lr too|override optim.lr=...: the space"):
        check_overrides(space, ["optim.lr=1"])
    with pytest.raises(ConfigError, match=r"rule=c': add a case in the file"):
        extend_space(space, ["rule=c"])


def test_each_trial_starts_from_its_run_of_a_stage(tmp_path):
    space = space_of(tmp_path, STEMS)
    base = load_run(recipes.path_of("demo"), ["model.image_size=32"])
    points = {name_of(point, space): point for point in check_space(space, base)}
    assert len(points) == 8
    point = points["vit_u2x1_8_hmlp_ln route=beit seed=1"]
    assert point.before == {"codes": "once", "pretrained": "hmlp_ln,1"}
    assert points["vit_u2x1_8_hmlp_ln route=plain seed=1"].before == {}
    weights = run_of(base, point, "s3://a/sweep").task.weights
    assert weights == "s3://a/sweep/before/pretrained/pretrained=hmlp_ln,1/model"

    codes, pretrained = (stage_space(space, name, points.values(), "home") for name in space.before)
    assert point_names(codes) == ["codes=once"]
    assert point_names(pretrained) == [f"pretrained={stem},{seed}" for stem in ("linear", "hmlp_ln") for seed in (0, 1)]
    last = grid_points(pretrained)[-1].settings
    assert last["task.objective.tokenizer"] == "home/before/codes/codes=once/model"
    assert (last["model.name"], last["seed"]) == ("vit_u2x1_8_hmlp_ln", 1)


def test_a_stage_name_directs_an_override_to_the_stage(tmp_path):
    space = space_of(tmp_path, STEMS)
    own, stages = split_overrides(space, ["seed=1", "codes.optim.lr=2", "pretrained.optim.duration=1 epoch"])
    assert own == ["seed=1"]
    assert stages == {
        "codes": ["demo_tokenizer", "optim.lr=2"],
        "pretrained": ["demo_masked", "optim.duration=1 epoch"],
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=5", "before.pretrained: override seed=...: the space sets seed too"),
        ("data.url=elsewhere", "before.pretrained: override data.url=...: the sweep sets data.url too"),
    ],
)
def test_an_override_of_a_setting_that_a_stage_has_from_elsewhere_is_refused(tmp_path, override, message):
    space, base = space_of(tmp_path, STEMS), load_run(recipes.path_of("demo"), ["model.image_size=32"])
    _, stages = split_overrides(space, [f"pretrained.{override}"])
    given = {name: Recipe(load_run(recipes.path_of(path), own), [path, *own]) for name, (path, *own) in stages.items()}
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_stages(base, space, given, "home")


def test_the_second_case_of_stems_equals_the_recipe_of_fine_tuned_beit():
    space = read_space(tune_spaces.path_of("stems"))
    base = load_run(recipes.path_of("a2_b16_imagenet"))
    point = next(point for point in check_space(space, base) if point.before)
    ours, own = run_of(base, point).dotted(), load_run(recipes.path_of("finetune_beit_imagenet")).dotted()
    assert {name for name in ours if ours[name] != own[name]} == {"model.name", "task.weights"}


# ---- distributions ---------------------------------------------------------------------------------------------------

bounds = st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)).map(sorted).filter(lambda pair: pair[1] - pair[0] > 1e-6)


@given(bounds, st.floats(0, 1))
@settings(deadline=None)
def test_values_stay_in_their_range(pair, share):
    for kind, (low, high) in (("uniform", pair), ("loguniform", [math.exp(bound / 1e3) for bound in pair])):
        distribution = Distribution.model_validate({kind: [low, high]})
        value = distribution.snap(low + share * (high - low))
        assert low <= value <= high
        assert abs(value - (low + share * (high - low))) <= 1e-3 * max(high - low, value)
        assert distribution.snap(value) == value
        assert low <= distribution.snap(distribution.sample(random.Random(0))) <= high


@given(
    low=st.one_of(st.integers(-50, 50), st.decimals(-5, 5, places=3)),
    steps=st.integers(1, 20),
    step=st.one_of(st.integers(1, 9), st.decimals("0.001", 2, places=3)),
    share=st.floats(0, 1),
)
@settings(deadline=None)
def test_values_stay_on_their_steps(low, steps, step, share):
    is_integer = isinstance(low, int) and isinstance(step, int)
    numbers = [number if is_integer else float(number) for number in (low, low + steps * step, step)]
    distribution = Distribution.model_validate({"quniform": numbers})
    value = distribution.snap(numbers[0] + share * (numbers[1] - numbers[0]))
    assert isinstance(value, int) == is_integer
    num_steps = (Decimal(str(value)) - Decimal(str(numbers[0]))) / Decimal(str(numbers[2]))
    assert num_steps == int(num_steps)
    assert 0 <= num_steps <= steps
    assert Distribution.model_validate({"quniform": [0, 10, 4]}).snap(10) == 8  # the highest step within the range


def test_random_points_are_allowed_and_different(tmp_path):
    text = f"""
space:
  depth: {{choice: [12, 6, 4, 3]}}
  branches: {{grid: [1, 2, 3, 4]}}
  model.name: vit_u{{depth}}x{{branches}}_16
  optim.lr: {{loguniform: [1.0e-4, 1.0e-2]}}
  optim.batch: {{quniform: [32, 128, 32]}}
where: [depth * branches == 12]
{RANDOM}
"""
    space = space_of(tmp_path, text)
    points = check_space(space, Run())
    assert points == random_points(space, 5, seed=0) != random_points(space, 5, seed=1)
    names = [name_of(point, space) for point in random_points(space, 200)]
    assert len(set(names)) == 200
    for point in points:
        assert point.drawn["depth"] * point.drawn["branches"] == 12
        assert point.settings["optim.batch"] in (32, 64, 96, 128)
        assert f"lr={slug(point.settings['optim.lr'])}" in name_of(point, space)
    values = {"depth": 12, "branches": 1, "optim.lr": 1.23456e-3, "optim.batch": 70.0}
    assert draw_point(space, values).settings == {"model.name": "vit_u12x1_16", "optim.lr": 1.235e-3, "optim.batch": 64}
    assert draw_point(space, values | {"branches": 2}) is None


def test_the_corners_of_a_search_are_checked(tmp_path):
    space = space_of(tmp_path, f"space:\n  model.drop_path: {{uniform: [0.0, 1.0]}}\n{RANDOM}\n")
    with pytest.raises(ConfigError, match=r"^the point drop_path=1: model.drop_path: got 1.0, expected less than 1$"):
        check_space(space, Run())


# ---- expressions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "is_true"),
    [
        ("a * b == 36", True), ("a // b == 9 and a % b == 0 and a / b < 9.5", True), ("not a > b", False),
        ("a in [1, 18] or b in (7,)", True), ("w == 's'", True), ("w in ['b', 'l']", False), ("1 < b <= 2 < a", True),
        ("-b + 3 == 1 - 0", True), ("w not in ['s'] and a / 0 > 1", False), ("n == None", True), ("True", True),
    ],
)  # fmt: skip
def test_an_expression_is_evaluated(expression, is_true):
    assert evaluate(expression, {"a": 18, "b": 2, "w": "s", "n": None}) is is_true


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "a.real == 1", "a[0] == 1", "9**9**9 > 1", "a ** 9 == 1", "[x for x in a]",
        "(lambda: 1)() == 1", "f'{a}' == 1", "a if a else a", "a := 1", "a is None", "~a == 1", "a << 9 == 1", "{1: a}",
        "{a}", "*a", "a @ a", "b'a' == 1", "1j == 1", "... == a", "print(a)", "", "a ==", "a = 1", "import os", "a; a",
        "(" * 5000, "not " * 5000 + "a", "a" + " + a" * 50_000 + " == 1", "\0", "await a", "yield a",
        "'a' * 999999999 == 'b'", "'%99999999d' % a == 'b'", "[1] * 999999999 == a", "a + 'b' == 1", "-w == 1",
        "a < 'b'", "a in a", "a / 0 == 1", "a", "a and b", "not a", "a * 2", "1e308 * 10 // 0 == 1",
    ],
)  # fmt: skip
def test_any_other_expression_is_refused(expression):
    with pytest.raises(ConfigError):
        evaluate(expression, {"a": 18, "b": 2, "w": "s"})


tokens = ["a", "b", "(", ")", "*", "/", "==", "<", "and", "or", "not", "in", "[", "]", "1", "'x'", ".", ",", "**", ":"]


@given(st.text(max_size=30) | st.lists(st.sampled_from(tokens)).map(" ".join))
@settings(deadline=None)
def test_any_text_is_evaluated_or_refused(text):
    with contextlib.suppress(ConfigError):
        assert isinstance(evaluate(text, dict.fromkeys(names_in(text), 3)), bool)


# ---- faults ----------------------------------------------------------------------------------------------------------

STAGE = "space:\n  seed: {seeds: 2}\n  task.weights: '{a}'\nbefore:\n  a: {recipe: demo"
FAULTY = [
    (
        "space:\n  r: {cases: {a: {optim.lrr: 1}}}",
        "space.yaml:2: space.r.cases.a.optim.lrr: unknown",
        "did you mean optim.lr",
    ),
    ("space:\n  r: {cases: {a: {compute.workers: 1}}}", "r.cases.a.compute.workers: is the same for all trials of a"),
    ("space:\n  r: {cases: {a: {optim.lr: '{x}'}}}", "r.cases.a.optim.lr: 'x' is neither drawn nor an earlier stage"),
    (
        "space:\n  optim.rule: {cases: {a: {optim.lr: 1}}}",
        "space.optim.rule: got cases, which only a variable can have",
    ),
    (
        "space:\n  r: {cases: {a: {optim: {lr: 1}}}}\n  optim.lr: {grid: [1]}",
        "space.yaml:2: space.r: a case sets optim, and the space sets optim.lr too; set it in one place",
    ),
    ("space:\n  r: {cases: {}}", "space.r: cases: got [], expected values that differ, at least one"),
    ("space:\n  seed: {seeds: 2}\nbefore:\n  a: {recipe: demo}", "space.yaml:4: before.a: is not used; expected {a}"),
    ("space:\n  seed: {seeds: 2}\nbefore:\n  a: {}", "before.a.recipe: got nothing, expected a YAML file, or one"),
    (f"{STAGE}, settings: {{optim.lrr: 1}}}}", "before.a.settings.optim.lrr: unknown setting of a run; did you mean"),
    (
        f"{STAGE}, settings: {{seed: '{{sed}}'}}}}",
        "before.a.settings.seed: 'sed' is neither drawn nor an earlier",
        "seed",
    ),
    (f"{STAGE}, settings: {{task.weights: '{{a}}'}}}}", "settings.task.weights: 'a' is neither drawn nor an earlier"),
    (f"{STAGE}}}".replace("'{a}'", "x/{a}"), "space.task.weights: got 'x/{a}', expected {a} alone: it stands for"),
    (f"{STAGE}}}\nsearch: {{kind: tpe, trials: 4}}", "before: got search tpe, expected grid or random, whose"),
    (f"{STAGE}}}\n  seed: {{recipe: demo}}", "before.seed: expected a name of letters, digits and _ that is neither"),
    ("", "space.yaml: space: got nothing, expected {dotted setting or variable: dist"),
    ("space: {}", "space.yaml:1: space: got nothing, expected distributions, as in"),
    ("space: 3", "space.yaml:1: space: got 3, expected settings as `key: value`"),
    (
        "space:\n  optim.lrr: {grid: [1]}",
        "space.yaml:2: space.optim.lrr: unknown setting of a run; did you mean optim.lr",
    ),
    (
        "space:\n  sed: {seeds: 3}",
        "space.yaml:2: space.sed: no setting, and no text uses it as the variable {sed}; did you mean seed",
    ),
    ("space:\n  lr: {grid: [1]}", "space.yaml:2: space.lr: no setting,", "did you mean optim.lr"),
    ("space:\n  optim.lr: {of: [seed]}", "space.yaml:2: space.optim.lr: got nothing, expected one of grid"),
    ("space:\n  optim.lr: {lookup: {1: 2}}", "space.yaml:2: space.optim.lr: `of` and `lookup` need each other"),
    (
        "space:\n  seed: {seeds: 2}\n  optim.lr: {of: [sed], lookup: {0: 1, 1: 2}}",
        "space.yaml:3: space.optim.lr: of: no listed variable 'sed' is drawn; did you mean seed",
    ),
    (
        "space:\n  seed: {seeds: 2}\n  optim.lr: {of: [seed], lookup: {0: 1}}",
        "space.yaml:3: space.optim.lr: the lookup has no value for seed=1",
    ),
    (
        "space:\n  seed: {seeds: 2}\n  lr: {of: [seed], lookup: {0: 1, 1: 2}}",
        "space.yaml:3: space.lr: got a lookup, expected another distribution, as lr is a variable",
    ),
    ("space:\n  optim.lr: [1]", "space.yaml:2: space.optim.lr: got [1], expected a distribution, as in {grid: [1, 2]}"),
    ("space:\n  optim.lr: {gird: [1]}", "space.yaml:2: space.optim.lr.gird: unknown setting", "did you mean grid"),
    ("space:\n  optim.lr: {grid: 1}", "space.yaml:2: space.optim.lr.grid: got 1, expected a list"),
    (
        "space:\n  optim.lr: {grid: []}",
        "space.yaml:2: space.optim.lr: grid: got [], expected values that differ, at least",
    ),
    ("space:\n  optim.lr: {grid: [1, 1.0]}", "grid: got [1, 1.0], expected values that differ"),
    ("space:\n  seed: {seeds: 0}", "space.yaml:2: space.seed.seeds: got 0, expected greater than or equal to 1"),
    (
        "space:\n  optim.lr: {grid: [1], uniform: [1, 2]}",
        "space.yaml:2: space.optim.lr: got grid and uniform, expected one",
    ),
    ("space:\n  optim.lr: {uniform: [2, 1]}", "space.yaml:2: space.optim.lr: uniform: got [2, 1], expected low < high"),
    ("space:\n  optim.lr: {loguniform: [0, 1]}", "loguniform: got [0, 1], expected low < high, both above 0"),
    ("space:\n  optim.lr: {quniform: [0, 1, 0]}", "quniform: got a step of 0, expected more than 0"),
    (
        "space:\n  optim.lr: {quniform: [0, 1]}",
        "space.yaml:2: space.optim.lr.quniform: got [0, 1], expected a longer list",
    ),
    ("space:\n  optim.lr: {uniform: [0, .inf]}", "space.yaml:2: space.optim.lr"),
    ("space:\n  optim.lr: {uniform: [0, 1]}", "space.optim.lr: got uniform, which a grid search cannot list; expected"),
    (
        "space:\n  optim.rule: {grid: [sgd]}\n  optim.rule.momentum: {grid: [0.1]}",
        "space.yaml:3: space.optim.rule.momentum: lies in optim.rule",
    ),
    (
        "space:\n  a: x{seed}\n  seed: {seeds: 2}",
        "space.yaml:2: space.a: got the text 'x{seed}', expected a distribution",
    ),
    (
        "space:\n  d: {grid: [1]}\n  model.name: vit_u{e}x1_8",
        "space.yaml:3: space.model.name: no variable 'e' is drawn",
    ),
    (
        "space:\n  data.val: test",
        "space.yaml:2: space.data.val: got 'test', expected a text with {variable}; set a constant",
    ),
    ("space:\n  d: {grid: [1]}\n  model.name: vit_u{d}x{d_8", "expected a text with {variable}"),
    ("space:\n  d: {grid: [1]}\n  model.name: '{d.real}'", "expected a text with {variable}"),
    ("space:\n  d: {grid: ['[']}\n  model.name: '{d}'", "not YAML"),
    (
        "space:\n  seed: {seeds: 2}\nwhere: [sed == 1]",
        "space.yaml:3: where[0]: no variable 'sed' is drawn; did you mean seed",
    ),
    (
        "space:\n  seed: {seeds: 2}\nwhere: [seed ** 2 == 1]",
        "space.yaml:3: where[0]: 'seed ** 2 == 1': pow is not part",
    ),
    (
        "space:\n  seed: {seeds: 2}\nwhere: [seed / 0 == 1]",
        "space.yaml:3: where: 'seed / 0 == 1': cannot be computed for seed=0",
    ),
    ("space:\n  seed: {seeds: 2}\nwhere: [seed == 2]", "space.yaml:3: where: no point satisfies it"),
    (f"space:\n  seed: {{seeds: 2}}\nwhere: [seed == 2]\n{RANDOM}", "where: no point satisfies it"),
    ("space:\n  seed: {seeds: 99999}", "space.seed.seeds: got 99999, expected less than or equal to 10000"),
    ("space:\n  seed: {seeds: 1e30}", "space.seed.seeds: got 1e+30, expected"),
    (
        "space:\n  seed: {seeds: 9999}\n  optim.lr: {grid: [1, 2]}",
        "space: got 19,998 combinations, expected at most 10,000",
    ),
    (
        "space:\n  optim.lr: {uniform: [0.1, 1]}\nsearch: {kind: tpe, trials: 1000000000}",
        "search.trials: got 1000000000, expected less than or equal to 10000",
    ),
    (
        "space:\n  optim.lr: {uniform: [0, 1e300]}",
        "space.optim.lr.uniform: got 1e+300, expected less than",
    ),
    ("space:\n  optim.lr: {uniform: [0, .inf]}", "space.optim.lr.uniform: got inf, expected"),
    (
        "space:\n  optim.lr: {uniform: [true, 2]}",
        "space.optim.lr.uniform: got True, expected a whole number or a number",
    ),
    (
        "space:\n  optim.lr: {quniform: [0, 1, 1e-300]}",
        "quniform: got a step of 1e-300, expected more than 0, with",
    ),
    (
        f"space:\n  optim.batch: {{quniform: [0, 1{'0' * 400}, 1]}}",
        "space.optim.batch.quniform: got 1000",
        "expected less",
    ),
    ("space:\n  optim.lr: {grid: [1, .nan]}", "space.optim.lr.grid: got nan, expected a number within 1e+30"),
    ("space:\n  optim.lr: {grid: [1, {kind: -.inf}]}", "space.optim.lr.grid: got -inf, expected a number within 1e+30"),
    (f"space:\n  seed: {{grid: [1, 1{'0' * 4000}]}}", "space.seed.grid: got 1000", "expected a number within 1e+30"),
    ('space:\n  x: {grid: ["1\\n", "2"]}\n  seed: "{x}"', "space.x.grid: got '1\\n', expected one line of text"),
    (f"space:\n  data.url: {{grid: [{'a/b' * 90}, b]}}", "the point url=", "expected a name of at most 180 bytes"),
    (f"space:\n  seed: {{seeds: 2}}\nwhere: ['{'not ' * 200}seed == 1']", "where[0]: 'not not", "at most 50 levels"),
    (f"space:\n  seed: {{seeds: 2}}\nwhere: ['{'seed + ' * 5000}1 == 1']", "where[0]: ", "35,006 characters, expected"),
    (
        "space:\n  seed: {seeds: 2}\nwhere: [1e999 > seed]",
        "where[0]: '1e999 > seed': expected numbers of at most 1e+30",
    ),
    (
        f"space:\n  x: {{grid: [{10**29}, 2]}}\n  seed: '{{x}}'\nwhere: [{'x * ' * 9}x > 3]",
        "where: 'x * x * x",
        "cannot be computed for x=1000",
        "a number is beyond 1e+30",
    ),
    ("space:\n  seed: {seeds: 2}\nwhere: [True + seed == 2]", "cannot be computed for seed=0: True is not a number"),
    ("space:\n  seed: {seeds: 2}\nwhere: [seed < True]", "cannot be computed for seed=0: True is neither a number nor"),
    ("space:\n  model.name: {grid: [ViT-B/16, vit_b12x1_16]}", "space.yaml:2: space: two points are both 12x1"),
    (
        "space:\n  seed: {seeds: 2}\nsearch: gird",
        "space.yaml:3: search: got 'gird', expected 'grid', 'random'",
        "did you mean grid",
    ),
    (
        "space:\n  seed: {seeds: 2}\nsearch: random",
        "space.yaml:3: search.trials: got nothing, expected how many points are tried",
    ),
    (
        "space:\n  seed: {seeds: 2}\nscheduler: {kind: asha, grace: 1 minute}",
        "scheduler.grace: got '1 minute', expected epochs",
    ),
    (
        "space:\n  seed: {seeds: 2}\ngoal: {mode: maximum}",
        "space.yaml:3: goal.mode: got 'maximum', expected 'max' or 'min'",
    ),
    (
        "space:\n  task.mode: {grid: [full, attn]}\ngoal: {control: {mode: full}}",
        "space.yaml:3: goal.control.mode: is no setting or case of the space",
        "did you mean task.mode",
    ),
    (
        "space:\n  task.mode: {grid: [full, attn]}\ngoal: {control: {task.mode: ffn}}",
        "space.yaml:3: goal.control: fits 0 groups of the space, expected the settings of one",
    ),
    (
        "space:\n  task.mode: {grid: [full, attn]}\n  optim.lr: {grid: [1, 2]}\ngoal: {control: {task.mode: full}}",
        "space.yaml:4: goal.control: fits 2 groups of the space",
    ),
    ("space:\n  seed: {seeds: 2}\nfailures: 1.5", "space.yaml:3: failures: got 1.5, expected less than or equal to 1"),
    ("space:\n  seed: {seeds: 2}\nbudgets: {}", "space.yaml:3: budgets: unknown setting", "did you mean budget"),
]


@pytest.mark.parametrize("faulty", FAULTY, ids=[text[:80] for text, *_ in FAULTY])
def test_a_faulty_space_gets_one_message_with_its_line(tmp_path, faulty):
    text, *message = faulty
    with pytest.raises(ConfigError) as error:
        space_of(tmp_path, text)
    for part in message:
        assert part in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 1400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("space:\n  optim.lr: {grid: [1, much]}", "the point lr=much: optim.lr: got 'much', expected a number"),
        (
            "space:\n  optim.rule: {grid: [{kind: sdg}]}",
            "the point rule=sdg: optim.rule: got 'sdg', expected 'adamw', 'sgd'",
        ),
        (
            "space:\n  optim.rule.momentum: {grid: [0.5]}",
            "the point momentum=0.5: optim.rule.momentum: unknown setting",
        ),
        (
            "space:\n  d: {grid: [1, 0]}\n  model.name: vit_u{d}x1_16",
            "the point vit_u0x1_16: model.name: model name 'vit_u0x1_16': depth",
        ),
        (
            "space:\n  optim.rule: {grid: [{kind: sgd, momentum: 0.9}, {kind: sgd}]}",
            "the point rule=sgd: is the same run as rule=sgd,momentum=0.9",
        ),
    ],
)
def test_a_point_with_an_invalid_run_is_refused_by_name(tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        check_space(space_of(tmp_path, text), Run())
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_an_override_of_a_swept_setting_is_refused(tmp_path):
    space = space_of(tmp_path, "space:\n  optim.rule: {grid: [sgd, adamw]}\n  optim.lr: {grid: [1, 2]}\n")
    check_overrides(space, ["optim.batch=3", "optim.lrx=1", "model.name=vit_u1x1_8"])
    for override in ("optim.lr=1", "optim.rule=lamb", "optim.rule.momentum=0.3"):
        with pytest.raises(
            ConfigError, match=rf"^override {override.partition('=')[0]}=...: the space sets optim.* too"
        ):
            check_overrides(space, ["seed=3", override])


# ---- added values ----------------------------------------------------------------------------------------------------


def test_an_added_value_changes_no_other_point(tmp_path):
    space = space_of(tmp_path, DEPTH)
    wider = extend_space(space, ["optim.lr=1e-4", "seed=7"])
    assert len(grid_points(wider)) == 4 * 3 * 4
    assert set(point_names(space)) < set(point_names(wider))
    assert "9x4 lr=1e-4 seed=7" in point_names(wider)
    assert space == space_of(tmp_path, DEPTH)
    # A setting with a single value is part of the name too.
    one = space_of(tmp_path, "space:\n  optim.lr: {grid: [0.1]}\n  seed: {seeds: 2}\n")
    assert set(point_names(one)) < set(point_names(extend_space(one, ["optim.lr=0.2"])))


def test_the_name_of_a_trial_and_of_its_continuations_is_one_of_a_folder():
    storage.check_name("x" * points.LONGEST_NAME + f" continuation={MOST_POINTS}", "name")


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("optim.lr=3e-3", "--add 'optim.lr=3e-3': the space already has this value of optim.lr"),
        ("optim.lrr=1", "--add 'optim.lrr=1': the space lists no values of optim.lrr; did you mean optim.lr"),
        ("model.name=vit_u1x1_8", "the space lists no values of model.name"),
        ("depth=7", "--add 'depth=7': adds no point that `where` allows"),
        ("depth", "override 'depth': expected setting=value"),
        ("optim.lr=1e40", "--add 'optim.lr=1e40': grid: got 1e+40, expected a number within 1e+30"),
        ("optim.lr=.inf", "--add 'optim.lr=.inf': grid: got inf, expected a number within 1e+30"),
        ("optim.lr=.nan", "--add 'optim.lr=.nan': grid: got nan, expected a number within 1e+30"),
    ],
)
def test_a_useless_added_value_is_refused(tmp_path, addition, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        extend_space(space_of(tmp_path, DEPTH), [addition])


# ---- built-in spaces -------------------------------------------------------------------------------------------------

SPACES = sorted((ROOT / "tune_spaces").rglob("*.y*ml"))


def sweeps(path):
    """The arguments of each `vitray sweep` command in a file's header, without its --name and --here."""
    head = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#")).replace(" \\\n#    ", "")
    commands = re.findall(r"^# vitray sweep (.+)$", head, re.MULTILINE)
    return [shlex.split(re.sub(r" --name \S+| --here", "", command)) for command in commands]


def test_all_spaces_are_listed():
    assert [path.stem for path in SPACES] == tune_spaces.names()
    assert all(tune_spaces.path_of(path.stem) == path for path in SPACES)
    assert tune_spaces.path_of("mine.yaml").name == "mine.yaml"


def test_trials_share_a_stage_that_depends_on_their_seed_alone():
    shared = {path.stem: read_space(path).shared_stage for path in SPACES}
    assert {name: stage for name, stage in shared.items() if stage} == {
        "cifar10_finetune_mode": "pretrained",
        "cifar10_finetune_mode_rates": "pretrained",
        "cifar10_parts": "pretrained",
        "cifar10_parts_rates": "pretrained",
    }


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_every_point_of_every_command_is_a_run_with_a_schedule(path):
    assert sweeps(path), f"{path.name}: its header has no `vitray sweep` command"
    for recipe, name, *args in sweeps(path):
        assert name == path.stem
        added = args[args.index("--add") + 1 :] if "--add" in args else []
        overrides = args[: len(args) - len(added) - bool(added)]
        space = extend_space(read_space(path), added)
        check_overrides(space, overrides)
        base = load_run(recipes.path_of(recipe), overrides)
        points = check_space(space, base)
        assert len({name_of(point, space) for point in points}) == len(points) >= 4
        for point in points:
            assert length_of(run_of(base, point).optim, 1000).total > 0


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_a_header_has_purpose_and_source(path):
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(line.startswith("# Shows: ") for line in head)
    is_ours = path.stem.startswith(("demo", "cifar10", "folds", "few_labels"))
    assert is_ours or re.fullmatch(r"# source: .+(Figure|Table)s? \d.*; not measured by us", head[1])


@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("depth_x_branches", 18), ("width_x_branches", 8), ("lr", 4), ("finetune_parts", 6), ("finetune_transfer", 12),
        ("stems", 52), ("demo_depth_x_branches", 8), ("demo_lr", 8), ("demo_finetune_mode", 15), ("demo_stems", 18),
        ("folds", 5), ("positions", 8), ("demo_positions", 10), ("finetune_mode", 15),
        ("cifar10_depth_x_branches", 20), ("cifar10_depth_x_branches_rates", 16), ("cifar10_finetune_mode", 30),
        ("cifar10_finetune_mode_rates", 25), ("cifar10_stems", 36), ("cifar10_stems_rates", 46), ("few_labels", 15),
        ("cifar10_ideas", 15), ("cifar10_long_ideas", 5), ("cifar10_views", 14), ("cifar10_views_tuned", 14),
        ("cifar10_branches", 15), ("cifar10_branches_rates", 27), ("cifar10_parts", 15), ("cifar10_parts_rates", 27),
        ("cifar10_stem_routes", 12), ("cifar10_stem_routes_rates", 12),
    ],
)  # fmt: skip
def test_spaces_have_the_points_of_the_papers_figures(name, points):
    space = read_space(tune_spaces.path_of(name))
    assert len(grid_points(space)) == points
    if name == "depth_x_branches":
        figure = {36: (1, 2, 3, 4), 60: (1, 2, 3, 4)}
        expected = {f"vit_s{blocks // count}x{count}_16" for blocks, counts in figure.items() for count in counts}
        expected |= {f"vit_b{36 // count}x{count}_16" for count in figure[36]}
        assert expected <= set(point_names(space))


WITH_RATES = [name for name in tune_spaces.names() if f"{name}_rates" in tune_spaces.names()]


@pytest.mark.parametrize("name", WITH_RATES)
def test_each_cell_of_cifar_has_a_rate_that_was_tried_on_the_development_part(name):
    tried, final = (read_space(tune_spaces.path_of(each)) for each in (f"{name}_rates", name))

    def cells(space):
        kept = [name for name in space.drawn if name not in ("seed", "rate")]
        points = [(point.settings["optim.lr"], point.drawn) for point in grid_points(space)]
        return {json.dumps({"rate": rate} | {name: drawn[name] for name in kept}) for rate, drawn in points}

    assert cells(final) <= cells(tried)
    number = len(cells(final))
    rates = Counter(json.dumps({**json.loads(cell), "rate": None}) for cell in cells(tried))
    assert len(rates) == number
    assert min(rates.values()) >= 3
    assert len(grid_points(final)) == number * (3 if name.startswith("cifar10_stem") else 5)
    # The stages differ in nothing but the hold-out, which the command of the rates has.
    assert tried.before == final.before
    (*_, words), (*_, final_words) = sweeps(tune_spaces.path_of(f"{name}_rates")), sweeps(tune_spaces.path_of(name))
    assert "data.holdout=0.1" in words
    assert not any(word.startswith("data.holdout") for word in final_words)


@pytest.mark.parametrize("name", [name for name in tune_spaces.names() if name.startswith(("cifar10", "demo"))])
def test_a_space_of_ours_states_its_cost(name):
    lines = tune_spaces.path_of(name).read_text().splitlines()
    assert sum(bool(re.match(CIFAR_RESULT, line)) for line in lines) == 1


def test_a_point_has_absolute_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"data.url": "data/a", "task": {"kind": "finetune", "weights": "runs/a/model"}, "seed": 1}
    assert with_absolute_addresses(SweepPoint(settings, {}, {}, {})).settings == {
        "data.url": f"{tmp_path}/data/a",
        "task": {"kind": "finetune", "weights": f"{tmp_path}/runs/a/model"},
        "seed": 1,
    }
    kept = {"data.url": "s3://b/a", "task.weights": "{stage}", "task.distill.teacher": "models:/vit@champion"}
    assert with_absolute_addresses(SweepPoint(kept, {}, {}, {})).settings == kept


TRAIN_SIZES = {  # "Three things", Table 9
    "imagenet": 1_281_167, "inat18": 437_513, "inat19": 265_240,
    "flowers": 2_040, "cars": 8_144, "cifar100": 50_000, "cifar10": 50_000,
}  # fmt: skip
# The least sum of the learning rates of all steps with which a network learns. Adam's steps are as long as the rate;
# those of SGD at a momentum of 0.9 are ten gradients, whose norm is at most 1.
ENOUGH = {"adamw": 0.2, "sgd": 5.0}


def rate_sums(path):
    """{(dataset, mode, optimizer): the largest sum of the learning rates of all steps} of a space's commands."""
    sums = {}
    for recipe, _, *args in sweeps(path):
        added = args[args.index("--add") + 1 :] if "--add" in args else []
        base = load_run(recipes.path_of(recipe), args[: len(args) - len(added) - bool(added)])
        for point in check_space(extend_space(read_space(path), added), base):
            run = run_of(base, point)
            dataset = run.data.url.rpartition("/")[2]
            images = int(TRAIN_SIZES[dataset] * (1 - run.data.holdout))
            length = length_of(run.optim, images // run.optim.batch)
            total = length.total
            cell = dataset, run.task.mode, run.optim.rule.kind
            rates = [learning_rate(run.optim, length, int(step)) for step in np.linspace(0, total, 101)]
            sums[cell] = max(sums.get(cell, 0.0), total * float(np.mean(rates)))
    return sums


@pytest.mark.parametrize(("name", "cells"), [("finetune_parts", 6), ("finetune_mode", 7), ("finetune_transfer", 18)])
def test_every_cell_of_a_fine_tuning_has_a_rate_and_steps_to_learn_with(name, cells):
    sums = rate_sums(tune_spaces.path_of(name))
    assert len(sums) == cells
    assert {cell: rates for cell, rates in sums.items() if rates < ENOUGH[cell[2]]} == {}


@pytest.mark.parametrize(
    ("name", "network", "wide", "narrow"),
    [
        (
            "finetune_mode",
            {"name": "vit_b12x1_16", "image_size": 384},
            {"attn": 28_348_416, "last": 28_353_024, "lora_wide": 28_366_848, "adapter_wide": 28_339_200},
            {"bias": 102_912, "lora": 110_592, "adapter": 101_436},
        ),
        (
            "demo_finetune_mode",
            {"name": "vit_u6x2_8_hmlp_bn", "image_size": 48, "num_classes": 10},
            {"attn": 199_680, "last": 200_064, "lora_wide": 193_536, "adapter_wide": 198_912},
            {"bias": 8_512, "lora": 9_216, "adapter": 8_508},
        ),
    ],
)
def test_modes_are_compared_at_equal_trained_parameters_and_at_equal_time(name, network, wide, narrow):
    path = tune_spaces.path_of(name)
    recipe, _, *overrides = sweeps(path)[0]
    base = load_run(recipes.path_of(recipe), overrides)
    base = base.replace({f"model.{key}": value for key, value in network.items()})
    counts, durations, work = {}, {}, {}
    for point in check_space(read_space(path), base):
        run = run_of(base, point)
        with torch.device("meta"):
            vit = build_task(run).vit
        mode = point.shown["mode"]
        counts[mode] = sum(row.trained for row in audit(vit).rows if row.part not in ("head", "positions"))
        durations.setdefault(mode, []).append(float(run.optim.duration.split()[0]))
        work[mode] = step_work(vit)
    for group in (wide, narrow):
        assert {mode: counts[mode] for mode in group} == group
        assert max(group.values()) < 1.1 * min(group.values())
    assert counts["head"] == 0
    shortest = min(map(min, durations.values()))
    for mode, lengths in durations.items():
        assert lengths[0] == shortest
        assert lengths[-1] * work[mode] == pytest.approx(shortest * work["full"], rel=0.02), mode
        assert len(lengths) == (1 if mode in ("full", "lora_wide", "adapter_wide") else 2)


def step_work(vit):
    """Multiply-adds of the levels in a training step, for a token: forward, to inputs, to trained matrices."""
    tokens, width, total, is_reached = vit.model.grid[0] * vit.model.grid[1], vit.model.shape.size, 0, False
    for block in vit.blocks:
        matrices = [each for name, each in block.named_parameters() if each.ndim == 2]
        products = 2 * tokens * width * block.branches
        total += sum(each.numel() for each in matrices) + products
        is_reached = is_reached or any(each.requires_grad for each in block.parameters())
        if is_reached:
            total += sum(each.numel() for each in matrices) + 2 * products
            total += sum(each.numel() for each in matrices if each.requires_grad)
    return total


def drawn(start, count):
    """Synthetic images of 32 px as the device gets them, and their shapes."""
    items = [demo_item(index, 0, 32, "shape") for index in range(start, start + count)]
    images = torch.from_numpy(np.stack([decode_image(content) for content, _ in items]))
    return normalized(images, Run().data.normalize), torch.tensor([label for _, label in items])


def fitted(task, run, images, labels):
    """Train a task as the training loop does, without augmentation."""
    optimizer = build_optimizer(task, run.optim, torch.device("cpu"))
    draw = torch.Generator().manual_seed(run.seed)
    length = length_of(run.optim, 1)
    for step in range(length.total):
        set_learning_rate(optimizer, learning_rate(run.optim, length, step))
        rows = torch.randint(len(images), (run.optim.batch,), generator=draw)
        task(images[rows], one_hot(labels[rows], run.model.num_classes)).backward()
        clip_gradients(task.parameters(), run.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
    return task.vit.eval()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_cell_of_table_6_learns_more_than_its_zero_head():
    """From the ten shapes of synthetic images to pairs of them, at the space's largest rate, by three seeds."""
    small = ["model.name=vit_u2x1_8", "model.image_size=32", "optim.batch=32"]
    learn = ["optim.duration=600 steps", "optim.warmup=60 steps", "optim.lr=2e-3", "optim.rule=adamw"]
    source = load_run(None, [*small, *learn, "model.num_classes=10"])
    (images, labels), (test_images, test_labels) = drawn(0, 2000), drawn(2000, 1000)
    torch.manual_seed(0)
    pretrained = fitted(build_task(source), source, images, labels)

    transfer = [*small, "model.num_classes=5", "optim.duration=300 steps", "optim.warmup=60 steps"]
    base = load_run(recipes.path_of("finetune_sgd_imagenet"), transfer)
    points = check_space(read_space(tune_spaces.path_of("finetune_transfer")), base)
    runs = [run_of(base, point) for point in points]
    largest = max(run.optim.lr for run in runs)
    zero_head = (test_labels // 2).bincount().max().item() / len(test_labels)  # one class for all images
    cells = {run.task.mode: run for run in runs if run.optim.lr == largest}
    assert cells.keys() == {"full", "attn", "ffn"}
    for mode, run in cells.items():
        scores = []
        for seed in range(3):
            task = build_task(run)
            state = adapt(pretrained, run.model, "", new_head=True)
            task.load_state_dict({f"vit.{name}": tensor.clone() for name, tensor in state.items()})
            with torch.no_grad():
                assert not task.vit(test_images[:9]).any(), "the head starts from zeros"
            vit = fitted(task, run.replace({"seed": seed}), images, labels // 2)
            with torch.no_grad():
                scores.append((vit(test_images).argmax(1) == test_labels // 2).float().mean().item())
        mean, spread = np.mean(scores), max(np.std(scores, ddof=1), np.sqrt(0.25 / len(test_labels)))
        assert mean - 5 * spread > zero_head, f"{mode}: {mean:.3f} ± {spread:.3f}, zero head {zero_head:.3f}"


def test_twenty_epochs_of_adamw_are_too_few_on_a_small_dataset():
    optim = load_run(recipes.path_of("finetune_adamw_imagenet")).optim
    length = length_of(optim, TRAIN_SIZES["flowers"] // optim.batch)
    rates = [learning_rate(optim, length, step) for step in range(length.total)]
    assert len(rates) == 60
    assert sum(rates) < 0.01 * ENOUGH["adamw"]


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("s", "a2_s16_imagenet"), ("b", "a2_b16_imagenet"), ("l", "a2_l16_imagenet"), ("ti", "a2_ti16_imagenet")],
)
def test_each_width_has_the_settings_of_its_recipe(name, recipe):
    expected = load_run(recipes.path_of(recipe))
    for space_name in ("depth_x_branches", "width_x_branches"):
        space = read_space(tune_spaces.path_of(space_name))
        for point in check_space(space, load_run(recipes.path_of("a2_s16_imagenet"))):
            run = run_of(load_run(recipes.path_of("a2_s16_imagenet")), point)
            if run.model.shape.width == name:
                differing = {key for key, value in expected.dotted().items() if run.dotted()[key] != value}
                assert differing <= {"model.name", "model.layerscale", "compute.local_batch"}
