"""Recipes: each header states commands and expected results; each recipe builds, has its steps, and trains one.

A header is the comment above the settings. Lines of these forms are checked:

    # source: WHERE THE NUMBERS ARE FROM; not measured by us
    # vitray train RECIPE [setting=value ...]
    #   expected: RESULT with a %; PLACE in the source; N M parameters, N steps

A fine-tuning takes any network, so its line ends in the learning rates to try:

    # vitray train RECIPE [setting=value ...] \\
    #     [setting=value ...]
    #   expected: RESULT with a %; PLACE in the source; N steps; optim.lr of RATE, RATE, ...

For results of our own, the line after a command is

    #   expected: RESULT with a %; measured by us on HARDWARE, YYYY-MM-DD

or, as long as there is none, one that says so:

    #   expected: not measured yet; WHERE THE RATES ARE FROM

Recipes and spaces of CIFAR-10, whose results are in docs/results.md, state their cost instead:

    #   expected: not measured yet; planned cost N minutes of one core
    #   expected: RESULT with a %, N minutes of one core; measured by us on HARDWARE, YYYY-MM-DD
"""

import re
import shlex
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from test_layers import ROOT

from pipelines import recipes
from vitray.config import Run, load_run
from vitray.config.model_names import is_torchvision
from vitray.config.pretraining import Masked, Tokenizer
from vitray.data.augment.crops import augment_image
from vitray.data.augment.keyed_random import generator
from vitray.data.augment.masks import draw_sources
from vitray.data.augment.mixing import BatchSettings, DeviceBatch, prepare_batch
from vitray.data.augment.views import view_kinds
from vitray.data.stream.batches import HostBatch
from vitray.errors import ConfigError
from vitray.models.counts import count
from vitray.models.vit import ViT
from vitray.tasks.build import Task, build_task
from vitray.tasks.supervised import Teacher
from vitray.training.data import with_masks
from vitray.training.optim import Average, build_optimizer, clip_gradients, set_learning_rate
from vitray.training.schedule import learning_rate, length_of

RECIPES = sorted((ROOT / "pipelines" / "recipes").rglob("*.y*ml"))
IMAGENET = 1_281_167
DEMOS = {"demo", "demo_distill", "demo_finetune", "demo_flexible", "demo_hybrid", "demo_masked", "demo_tokenizer"}
DEMOS |= {"demo_scenes", "demo_self_distillation", "demo_torchvision"}
CIFAR = {"cifar10_supervised", "cifar10_finetune", "cifar10_masked", "cifar10_tokenizer", "cifar10_lejepa"}
CIFAR |= {"cifar10_speedrun", "cifar10_self_distillation"}
OURS = DEMOS | CIFAR | {"finetune", "few_labels"}  # recipes without a paper
# Recipes that begin with the network of another one, whose command their header has too.
BEGIN_WITH = {"demo_distill": "demo", "demo_finetune": "demo", "demo_masked": "demo_tokenizer"}
BEGIN_WITH |= {"finetune": "demo", "cifar10_finetune": "cifar10_supervised", "cifar10_masked": "cifar10_tokenizer"}


class Expectation(NamedTuple):
    """One command of a header and its expected result."""

    overrides: tuple[str, ...]
    result: str
    place: str
    params: str
    """In millions, with one decimal."""
    steps: int


def header(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return lines[: next(index for index, line in enumerate(lines) if not line.startswith("#"))]


def expectations(path: Path) -> list[Expectation]:
    lines, expectations = header(path), []
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if command := re.fullmatch(rf"# vitray train {path.stem}((?: .+)?)", line):
            match = re.fullmatch(
                r"#   expected: ([^;]*\d %[^;]*); ([^;]+); ([\d.]+) M parameters, ([\d,]+) steps", below
            )
            assert match, f"{path.name}: {line!r} is followed by {below!r}, expected the form in this file's docstring"
            result, place, params, steps = match.groups()
            expectations.append(
                Expectation(tuple(shlex.split(command[1])), result, place, params, int(steps.replace(",", "")))
            )
    return expectations


@cache
def loaded(path: Path, overrides: tuple[str, ...] = ()) -> Run:
    return load_run(path, overrides)


FINETUNED = [path for path in RECIPES if path.stem.startswith("finetune") and path.stem not in OURS]
PUBLISHED = [path for path in RECIPES if path.stem not in OURS and path not in FINETUNED]
EXPECTATIONS = [
    pytest.param(path, expected, id=" ".join((path.stem, *expected.overrides)))
    for path in PUBLISHED
    for expected in expectations(path)
]
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
each_published = pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
each_expectation = pytest.mark.parametrize(("path", "expected"), EXPECTATIONS)


# ---- headers ---------------------------------------------------------------------------------------------------------


def test_no_recipe_is_missed():
    assert len(RECIPES) == 41
    assert len(EXPECTATIONS) == 57
    assert [path.stem for path in RECIPES] == recipes.names()
    assert all(recipes.path_of(path.stem) == path for path in RECIPES)


@each_recipe
def test_a_header_has_a_command_that_names_the_recipe(path):
    assert any(re.search(rf"\bvitray train {path.stem}(?: |$)", line) for line in header(path))
    # Another recipe's name would be a leftover of a copy.
    named = {name for line in header(path) for name in re.findall(r"\bvitray train (\S+)", line)}
    assert named - {BEGIN_WITH.get(path.stem)} == {path.stem}


@each_recipe
def test_a_recipe_registers_no_model_as_its_images_may_be_replaced(path):
    assert loaded(path).tracking.register_as is None


@each_recipe
def test_a_recipe_states_whether_it_compiles(path):
    assert "compile" in loaded(path).compute.model_fields_set


@each_published
def test_a_header_states_results_and_their_source(path):
    sources = [line for line in header(path) if line.startswith("# source: ")]
    assert len(sources) == 1
    assert sources[0].endswith("; not measured by us")
    first, *others = expectations(path)
    assert first.overrides == ()
    assert len({first, *others}) == 1 + len(others)
    assert sum("expected:" in line for line in header(path)) == 1 + len(others)
    assert f"# Data, once: vitray shard ILSVRC2012 {loaded(path).data.url}" in header(path)


@pytest.mark.parametrize(
    ("name", "number", "place"),
    [
        ("finetune_sgd_imagenet", 7, "Table [25]"),
        ("finetune_adamw_imagenet", 3, "Table 5"),
        ("finetune_beit_imagenet", 3, "Table 7"),
        ("finetune_mae_imagenet", 3, r"FINETUNE\.md"),
    ],
)
def test_a_fine_tuning_states_steps_and_learning_rates(name, number, place):
    assert {path.stem for path in FINETUNED} == {
        f"finetune_{kind}_imagenet" for kind in ("sgd", "adamw", "beit", "mae")
    }
    path = recipes.path_of(name)
    lines = "\n".join(header(path)).replace(" \\\n#    ", "").splitlines()
    assert sum(line.startswith("# source: ") and line.endswith("; not measured by us") for line in lines) == 1
    commands = [index for index, line in enumerate(lines) if line.startswith("# vitray train ")]
    assert len(commands) == number
    for index in commands:
        overrides = shlex.split(lines[index].removeprefix(f"# vitray train {name} "))
        run = loaded(path, tuple(overrides))
        match = re.fullmatch(
            rf"#   expected: [^;]*\d %[^;]*; {place}; ([\d,]+) steps; optim.lr of ([\de., -]+)",
            lines[index + 1],
        )
        assert match, lines[index + 1]
        assert length_of(run.optim, IMAGENET // run.optim.batch).total == int(match[1].replace(",", ""))
        assert run.optim.lr in [float(rate) for rate in match[2].split(", ")]


@pytest.mark.parametrize("name", sorted(DEMOS))
def test_a_demo_header_states_a_measured_result_or_where_its_rates_are_from(name):
    lines = [*header(recipes.path_of(name)), ""]
    command = next(index for index, line in enumerate(lines) if f"vitray train {name}" in line)
    if lines[command + 1] == "#   expected: not measured yet; the rates are those of demo":
        assert loaded(recipes.path_of(name)).optim == loaded(recipes.path_of("demo")).optim
        return
    result = r"(?:[\d.]+(?: to [\d.]+)? % of val|val loss [\d.]+)[^;]*"
    assert re.fullmatch(rf"#   expected: {result}; measured by us on .+, \d{{4}}-\d\d-\d\d", lines[command + 1])


COST = r"\d+ (?:minutes|hours) of one core"
CIFAR_RESULT = rf"#   expected: (?:not measured yet; planned cost {COST}.*|[^;]*, {COST}; measured by us on .+, [\d-]+)"


@pytest.mark.parametrize("name", sorted(CIFAR))
def test_a_cifar_header_states_its_cost(name):
    lines = [*header(recipes.path_of(name)), ""]
    command = next(index for index, line in enumerate(lines) if f"vitray train {name}" in line)
    assert re.fullmatch(CIFAR_RESULT, lines[command + 1])
    assert loaded(recipes.path_of(name)).data.val == "test"


@each_expectation
def test_every_override_of_a_command_changes_the_run(path, expected):
    run = loaded(path, expected.overrides)
    for override in expected.overrides:
        others = tuple(other for other in expected.overrides if other != override)
        with suppress(ConfigError):  # the other overrides may be invalid without it
            assert loaded(path, others) != run, override


# Deviations from a source that follow from the code and not from a recipe's settings.
DIFFERENCES = {
    r"mixup .*pairs?": lambda run: run.data.mix.is_mixing,
    r"mask tokens? (does|do) not decay": lambda run: run.task.kind == "masked" and run.task.objective.kind in TOKENS,
    r"Xavier|Initial weights are ours": lambda run: run.model.activation == "gelu_tanh",  # Google's own networks
    r"central square": lambda run: run.task.kind == "finetune" and run.optim.rule.kind == "sgd",
    r"bfloat16 instead of float16": lambda run: run.task.kind == "finetune" and run.optim.rule.kind == "adamw",
}
TOKENS = ("mae", "beit")


@pytest.mark.parametrize("path", [*PUBLISHED, *FINETUNED], ids=lambda path: path.stem)
def test_a_header_names_the_differences_that_are_in_the_code(path):
    run, text = loaded(path), " ".join(line.removeprefix("# ") for line in header(path))
    expected = [words for words, applies in DIFFERENCES.items() if applies(run)]
    assert [words for words in expected if not re.search(words, text)] == []


# ---- statements of the header ----------------------------------------------------------------------------------------


def built(run: Run) -> Task:
    """Return the task of a run; BeiT predicts the codes of an untrained tokenizer, and a teacher is untrained, too."""
    predicts_codes = isinstance(run.task, Masked) and run.task.objective.kind == "beit"
    vocabulary = build_task(run.replace({"task": "tokenizer"})) if predicts_codes else None
    return build_task(run, vocabulary, run.distill and Teacher(ViT(run.model), run.data.normalize))


@each_expectation
def test_the_number_of_parameters_matches_the_header(path, expected):
    with torch.device("meta"):
        task = built(loaded(path, expected.overrides))
    assert f"{sum(parameter.numel() for parameter in task.vit.parameters()) / 1e6:.1f}" == expected.params


@each_recipe
def test_the_number_of_parameters_matches_the_analytic_count(path):
    run = loaded(path)
    with torch.device("meta"):
        task = built(run)
    assert sum(parameter.numel() for parameter in task.vit.parameters()) == count(run.model).params
    # Parameters outside the network belong to a decoder.
    others = {name.partition(".")[0] for name, _ in task.named_parameters()} - {"vit"}
    assert bool(others) == (isinstance(run.task, Masked | Tokenizer) or run.task.traits.joint)


@each_expectation
def test_steps_on_imagenet_match_the_header(path, expected):
    optim = loaded(path, expected.overrides).optim
    assert length_of(optim, IMAGENET // optim.batch).total == expected.steps


# Epochs, images and steps by the sources' own counting: DeiT's repeated augmentation keeps 1,281,024 images an epoch,
# of which 625 whole batches of 2048; the ViTs warm up for 10,000 steps.
@pytest.mark.parametrize(
    ("name", "epoch", "warmup", "total"),
    [
        ("a2_s16_imagenet", 1_281_024 // 2048, 5 * 625, 300 * 625),
        ("a2_b18x2_imagenet", 1_281_024 // 2048, 5 * 625, 400 * 625),
        ("deit3_l16_imagenet", 1_281_024 // 2048, 5 * 625, 800 * 625),
        ("vit_b16_imagenet", IMAGENET // 4096, 10_000, 300 * 312),
        ("plain_s16_imagenet", IMAGENET // 1024, 10_000, 90 * 1251),
    ],
)
def test_steps_match_the_papers(name, epoch, warmup, total):
    optim = loaded(recipes.path_of(name)).optim
    assert IMAGENET // optim.batch == epoch
    length = length_of(optim, epoch)
    assert length == (epoch, warmup, total)
    assert learning_rate(optim, length, 0) == optim.warmup_from
    assert learning_rate(optim, length, warmup) == pytest.approx(optim.lr, rel=1e-3)
    assert learning_rate(optim, length, total) == optim.schedule.floor


# "Three things", 2.2, and DeiT III's commands.
@pytest.mark.parametrize(
    ("name", "image_size", "lr", "drop_path"),
    [
        ("a2_ti16_imagenet", 224, 4e-3, 0.0),
        ("a2_s16_imagenet", 224, 4e-3, 0.05),
        ("a2_b16_imagenet", 224, 3e-3, 0.1),
        ("a2_b18x2_imagenet", 224, 3e-3, 0.1),
        ("a2_l16_imagenet", 224, 3e-3, 0.4),
        ("deit3_s16_imagenet", 224, 4e-3, 0.05),
        ("deit3_b16_imagenet", 192, 3e-3, 0.2),
        ("deit3_l16_imagenet", 192, 3e-3, 0.45),
        ("deit3_h14_imagenet", 154, 3e-3, 0.6),  # 11 x 11 patches, as of DeiT III's 160 pixels
    ],
)
def test_settings_per_width(name, image_size, lr, drop_path):
    run = loaded(recipes.path_of(name))
    assert (run.model.image_size, run.optim.lr, run.model.drop_path) == (image_size, lr, drop_path)
    if name.startswith("a2"):
        assert run.optim.warmup_from == pytest.approx(1e-4 * lr)


def test_a_recipe_draws_its_mixing_as_often_as_its_source():
    runs = {path.stem: loaded(path) for path in RECIPES}
    mixing = {name: run for name, run in runs.items() if run.data.mix.is_mixing}
    assert len(mixing) >= 12
    # big_vision draws once for a global batch, the others once for each device's. A2 is trained with 256 a device; the
    # paper does not state another number for L.
    own = {"plain_s16_imagenet": "batch", "a2_l16_imagenet": 256}
    assert {name: run.data.mix.per for name, run in mixing.items()} == {
        name: own.get(name, run.compute.local_batch) for name, run in mixing.items()
    }


@pytest.mark.parametrize("kind", ["a2", "deit3"])
def test_recipes_of_a_kind_differ_only_where_they_should(kind):
    """Recipes repeat each other, so that each can be read alone; they must not drift apart."""
    allowed = {"model.name", "model.image_size", "model.layerscale", "model.drop_path", "optim.duration"}
    allowed |= {"optim.lr", "optim.warmup_from", "compute.local_batch", "data.mix.per"}
    first, *others = (loaded(path).dotted() for path in RECIPES if path.stem.startswith(f"{kind}_"))
    assert len(others) >= 2
    for other in others:
        assert {setting for setting in first if first[setting] != other.get(setting)} <= allowed
        assert first.keys() == other.keys()


# ---- one step --------------------------------------------------------------------------------------------------------


def toy(run: Run) -> Run:
    """The same run of a network of 64 x 2 levels, with the branches, the stem and the patch of the recipe.

    A network of torchvision has one size.
    """
    if is_torchvision(run.model.name):
        return run.replace({"model.image_size": 32, "model.num_classes": 5})
    shape = run.model.shape
    stem = "" if shape.stem == "linear" else f"_{shape.stem}"
    name = f"vit_u2x{shape.branches}_{shape.patch}{stem}"
    if run.task.traits.joint:  # without classes, and with small views
        head = {"task.prototypes": 32} if run.task.kind == "self_distillation" else {}
        small = {"data.views.local.size": 2 * shape.patch, "optim.batch": 8}
        return run.replace({"model.name": name, "model.image_size": 4 * shape.patch} | small | head)
    if isinstance(run.task, Masked | Tokenizer):  # without classes; and BeiT's smallest rectangle is 4 x 4 patches
        return run.replace({"model.name": name, "model.image_size": 4 * shape.patch})
    side = (4 if run.data.early else 2) * max((shape.patch, *run.model.patches))
    return run.replace({"model.name": name, "model.image_size": side, "model.num_classes": 5})


def inputs_of_views(run: Run, rng: np.random.Generator) -> list:
    """Eight images of noise as the views of a task that compares them."""
    kinds = view_kinds(run.data.chosen_views, run.model.image_shape, run.model.shape.patch, run.data.augment)
    large, small = (rng.integers(256, size=(8, kind.number, *kind.size, 3), dtype=np.uint8) for kind in kinds)
    places = np.arange(8)
    host = with_masks(HostBatch(large, places, places, places, 0, views=small), run, 0)
    masks = None if host.masks is None else torch.from_numpy(host.masks)
    tensors = torch.from_numpy(large), torch.from_numpy(places), places, places, masks, torch.from_numpy(small)
    return DeviceBatch(*tensors, host.hidden).inputs(run.task.traits.needs, run.data.normalize)


@each_recipe
def test_a_step_changes_every_weight(path):
    run, rng = toy(loaded(path)), np.random.default_rng(0)
    torch.manual_seed(run.seed)
    views = [
        augment_image(
            rng.integers(256, size=(40, 48, 3), dtype=np.uint8),
            run.data.augment,
            run.model.image_shape,
            generator(run.seed, 0, f"image {index}"),
        )
        for index in range(8)
    ]
    task = built(run).train()
    before = {name: each.detach().clone() for name, each in task.named_parameters() if each.requires_grad}
    optimizer = build_optimizer(task, run.optim, torch.device("cpu"))
    average = Average(task, run.optim.ema) if run.optim.ema else None
    # The first step after the warm-up, where the rate is highest: the first of all may have a rate of 0.
    length = length_of(run.optim, IMAGENET // run.optim.batch)
    step = length.warmup

    task.before_step(step, length.epoch, length.total)
    if "views" in run.task.traits.needs:
        loss = task(*inputs_of_views(run, rng))
    else:
        images_BCHW, targets_BK = prepare_batch(
            torch.from_numpy(np.stack(views)),
            torch.arange(8) % (run.model.num_classes or 8),
            BatchSettings(run.data.augment, run.data.mix, run.data.normalize, run.model.num_classes or 8),
            run.seed,
            step,
        )
        beside = {"labels": targets_BK}
        if isinstance(run.task, Masked):
            sources = draw_sources(run.task.mask, run.model.grid, run.seed, 0, range(8))
            beside["masks"] = torch.from_numpy(sources)
        loss = task(images_BCHW, *(beside[need] for need in run.task.traits.needs))
    loss.backward()
    norm = clip_gradients(task.parameters(), run.optim.clip)
    set_learning_rate(optimizer, learning_rate(run.optim, length, step))
    optimizer.step()
    if average is not None:
        average.update(step)
        assert all(tensor.isfinite().all() for tensor in average.state().values())

    assert loss.isfinite()
    assert norm.isfinite()
    assert norm > 0
    after = dict(task.named_parameters())
    assert all(parameter.isfinite().all() for parameter in after.values())
    assert [name for name in before if torch.equal(before[name], after[name])] == []
