"""Masks: equal numbers of patches per image, reproducible draws, BeiT's rectangles, and rejected settings."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from vitray.config import Run, load_run
from vitray.config.pretraining import (
    BlockMask,
    Mask,
    Masked,
    Objective,
    RandomMask,
    largest_least,
    paper_mask,
    predicted_patches,
)
from vitray.data.augment.keyed_random import raw_draws
from vitray.data.augment.masks import HIDDEN, VISIBLE, draw_rectangles, draw_sources
from vitray.errors import ConfigError

GRID = (14, 14)
BERT = RandomMask(ratio=0.5, other=0.1, kept=0.1)


def sources(mask: Mask, positions=range(4), *, grid=GRID, seed=0, epoch: int | None = 0) -> np.ndarray:
    return draw_sources(mask, grid, seed, epoch, positions)


grids = st.tuples(st.integers(2, 12), st.integers(2, 12))
ratios = st.floats(0.05, 0.95)


@st.composite
def masked_grids(draw) -> tuple[Mask, tuple[int, int]]:
    grid, ratio = draw(grids), draw(ratios)
    if draw(st.booleans()):
        return RandomMask(
            ratio=ratio, other=draw(st.sampled_from([0.0, 0.3])), kept=draw(st.sampled_from([0.0, 0.3]))
        ), grid
    least = draw(st.integers(1, max(1, math.floor(largest_least(BlockMask(ratio=ratio, min_patches=1), grid)))))
    return BlockMask(ratio=ratio, min_patches=least), grid


# ---- numbers and reproducibility -------------------------------------------------------------------------------------


@given(masked_grids(), st.integers(0, 2**31), st.integers(0, 5))
def test_every_image_has_the_same_number_of_predicted_patches(masked_grid, seed, epoch):
    mask, grid = masked_grid
    patches = grid[0] * grid[1]
    source_BN = sources(mask, range(3), grid=grid, seed=seed, epoch=epoch)
    assert source_BN.shape == (3, patches)
    assert ((source_BN != VISIBLE).sum(1) == predicted_patches(mask, patches)).all()
    assert source_BN.min() >= VISIBLE
    assert source_BN.max() < patches


@pytest.mark.parametrize("mask", [RandomMask(), BERT, BlockMask()])
def test_masks_do_not_depend_on_the_worker(mask):
    whole_BN = sources(mask, range(24))
    for workers in (2, 3, 5):
        for rank in range(workers):
            assert np.array_equal(sources(mask, range(rank, 24, workers)), whole_BN[rank::workers])
    assert np.array_equal(sources(mask, [23, 5]), whole_BN[[23, 5]])


@pytest.mark.parametrize("mask", [RandomMask(), BERT, BlockMask()])
def test_seed_epoch_and_position_each_change_a_mask(mask):
    masks = [
        sources(mask, [position], seed=seed, epoch=epoch)[0].tobytes()
        for seed in (0, 1)
        for epoch in (0, 1, None)
        for position in (0, 1, 1000)
    ]
    assert len(set(masks)) == len(masks)


def test_the_number_of_predicted_patches_equals_the_papers():
    # MAE keeps int(patches * (1 - ratio)); BeiT's 75 of 196 are about the 40 % of its paper.
    for patches in (4, 49, 196, 256):
        for ratio in (0.25, 0.5, 0.75):
            assert predicted_patches(RandomMask(ratio=ratio), patches) == patches - int(patches * (1 - ratio))
    assert predicted_patches(BlockMask(), 196) == 75
    assert predicted_patches(RandomMask(ratio=0.9), 10) == 9  # although int(10 * (1 - 0.9)) is 0


# ---- independent patches ---------------------------------------------------------------------------------------------


def test_every_patch_is_equally_likely():
    hidden_N = (sources(RandomMask(ratio=0.75), range(2000), grid=(4, 4)) == HIDDEN).mean(0)
    assert np.abs(hidden_N - 0.75).max() < 5 * math.sqrt(0.75 * 0.25 / 2000)


def test_a_tenth_of_predicted_patches_is_replaced_and_a_tenth_is_kept():
    source_BN = sources(BERT, range(400))
    predicted = source_BN != VISIBLE
    assert np.array_equal(predicted, sources(RandomMask(ratio=0.5), range(400)) != VISIBLE)  # the same patches
    own_BN = np.broadcast_to(np.arange(196), source_BN.shape)
    shares = {
        "hidden": (source_BN == HIDDEN)[predicted].mean(),
        "kept": (source_BN == own_BN)[predicted].mean(),
        "other": ((source_BN >= 0) & (source_BN != own_BN))[predicted].mean(),
    }
    assert sum(shares.values()) == pytest.approx(1)
    for name, expected in {"hidden": 0.8, "kept": 0.1, "other": 0.1}.items():
        assert abs(shares[name] - expected) < 5 * math.sqrt(expected * (1 - expected) / predicted.sum()), name


def test_a_replacement_is_any_other_patch():
    source_BN = sources(RandomMask(ratio=0.5, other=0.99), range(3000), grid=(2, 2))
    own_BN = np.broadcast_to(np.arange(4), source_BN.shape)
    is_replaced = source_BN >= 0
    assert not (source_BN == own_BN).any()
    offsets = (source_BN - own_BN)[is_replaced] % 4
    assert np.abs(np.bincount(offsets, minlength=4)[1:] / is_replaced.sum() - 1 / 3).max() < 0.03


# ---- rectangles ------------------------------------------------------------------------------------------------------


def slow_block_mask(mask: BlockMask, grid: tuple[int, int], key: str) -> set[int]:
    """BeiT's masking as a plain loop over one image."""
    rows, columns = grid
    count, hidden, num_draws = predicted_patches(mask, rows * columns), set(), 0
    while len(hidden) < count:
        raws = raw_draws(key, 4 * (num_draws + 1)).tolist()[4 * num_draws :]
        draws = [(raw >> 11) * 2.0**-53 for raw in raws]
        num_draws += 1
        low, high = (math.log(bound) for bound in mask.aspect)
        area = mask.min_patches + draws[0] * max(count - len(hidden) - mask.min_patches, 0)
        aspect = math.exp(low + draws[1] * (high - low))
        tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if tall > rows or wide > columns:
            continue
        top, left = (
            int(draw * (free + 1)) for draw, free in zip(draws[2:], (rows - tall, columns - wide), strict=True)
        )
        # The patches nearest to a random corner come first, by rows or by columns.
        bottom, right, by_columns = (raws[0] >> bit & 1 for bit in (2, 1, 0))
        down, across = range(top, top + tall)[:: 1 - 2 * right], range(left, left + wide)[:: 1 - 2 * bottom]
        inside = [(row, column) for row in down for column in across]
        if by_columns:
            inside = [(row, column) for column in across for row in down]
        for row, column in inside:
            if len(hidden) < count:
                hidden.add(row * columns + column)
    return hidden


@pytest.mark.parametrize(
    ("mask", "grid"),
    [
        (BlockMask(), GRID),
        (BlockMask(ratio=0.75, min_patches=4), (6, 9)),
        (BlockMask(ratio=0.9, min_patches=16), (4, 4)),
        (BlockMask(ratio=0.5, min_patches=1, aspect=(1.0, 1.0)), (5, 3)),
    ],
)
def test_block_masks_equal_a_slow_loop(mask, grid):
    source_BN = sources(mask, range(40), grid=grid, seed=3, epoch=7)
    for position, source_N in enumerate(source_BN):
        assert set(np.flatnonzero(source_N == HIDDEN)) == slow_block_mask(mask, grid, f"mask 3 7 {position}")


def test_block_masks_lean_to_no_side():
    images = 20_000
    hidden_RC = (sources(BlockMask(), range(images)) == HIDDEN).mean(0).reshape(GRID)
    for mirrored_RC in (hidden_RC[::-1], hidden_RC[:, ::-1], hidden_RC.T):
        assert np.abs(hidden_RC - mirrored_RC).max() < 4 * math.sqrt(2 * 0.25 / images)


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_a_rectangle_respects_its_limits(least, seed):
    mask, missing = BlockMask(min_patches=least), 60
    draws_B4 = np.random.default_rng(seed).random((50, 4))
    for inside_N in draw_rectangles(draws_B4, np.full(50, missing), mask, GRID):
        if not inside_N.any():
            continue  # the rectangle did not fit
        rows, columns = (np.flatnonzero(inside_N.reshape(GRID).any(axis)) for axis in (1, 0))
        tall, wide = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert inside_N.sum() == tall * wide  # without a gap
        # A side is rounded, by half a patch at most.
        assert (tall + 0.5) * (wide + 0.5) >= least
        assert (tall - 0.5) * (wide - 0.5) <= missing
        assert (tall - 0.5) / (wide + 0.5) <= mask.aspect[1]
        assert (tall + 0.5) / (wide - 0.5) >= mask.aspect[0]


def test_block_masks_hide_neighbors():
    def neighbors(source_BN: np.ndarray) -> float:
        hidden_BRC = (source_BN == HIDDEN).reshape(-1, *GRID)
        return (hidden_BRC[:, :, 1:] & hidden_BRC[:, :, :-1]).sum() / hidden_BRC.sum()

    independent, blocks = (neighbors(sources(mask, range(200))) for mask in (RandomMask(ratio=0.38), BlockMask()))
    assert independent < 0.38
    assert blocks > 0.75


# ---- settings --------------------------------------------------------------------------------------------------------

WITHOUT_CLASSES = "model.num_classes=null"


def masked(*overrides: str) -> Masked:
    task = load_run(None, [WITHOUT_CLASSES, "task=masked", *overrides]).task
    assert isinstance(task, Masked)
    return task


@pytest.mark.parametrize("kind", ["mean_color", "small_patch", "pixels_l2", "pixels_l1", "mae", "beit"])
def test_omitted_mask_settings_are_those_of_the_paper(kind):
    overrides = [
        f"task.objective={kind}",
        *(["task.objective.tokenizer=runs/tokenizer/model"] if kind == "beit" else []),
    ]
    own = masked(*overrides).mask
    assert own == paper_mask(masked(*overrides).objective)
    assert own.kind == ("blocks" if kind == "beit" else "random")
    assert own.ratio == {"mae": 0.75, "beit": 0.38}.get(kind, 0.5)
    assert (
        getattr(own, "other", 0)
        == getattr(own, "kept", 0)
        == (0.1 if kind in ("mean_color", "small_patch", "pixels_l2") else 0)
    )
    assert masked(*overrides, f"task.mask={own.kind}").mask == own
    assert masked(*overrides, "task.mask.ratio=0.3").mask == own.model_copy(update={"ratio": 0.3})
    other = {"random": "blocks", "blocks": "random"}[own.kind]
    assert masked(*overrides, f"task.mask={other}").mask == TypeAdapter(Mask).validate_python({"kind": other})


def test_a_masked_run_survives_its_yaml(tmp_path):
    run = load_run(None, [WITHOUT_CLASSES, "task=masked", "task.objective=small_patch", "task.mask.ratio=0.15"])
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert load_run(tmp_path / "run.yaml") == run == Run().replace(run.dotted())
    assert run.dotted()["task.mask.other"] == 0.1  # all of it is recorded
    assert run.replace({"task.kind": "supervised", "model.num_classes": 1000}) == Run()


BAD = [
    ("task.mask.ratio=1.5", "override 'task.mask.ratio=1.5': task.mask.ratio: got 1.5, expected less than 1"),
    ("task.mask.ratio=1", "task.mask.ratio: got 1, expected less than 1"),
    ("task.mask.ratio=0", "task.mask.ratio: got 0, expected greater than 0"),
    ("task.mask.ratio=0.999", "task.mask.ratio: got 0.999, expected one that leaves some of 14 x 14 patches"),
    (
        "task.mask=blocks task.mask.min_patches=300",
        "task.mask.min_patches: got 300, expected at most 196: the largest rectangle in 14 x 14",
    ),
    (
        "task.mask=blocks task.mask.aspect=[0.5,0.5]  task.mask.min_patches=99",
        "task.mask.min_patches: got 99, expected at most 98: the largest rectangle in 14 x 14 patches with an aspect",
    ),
    ("task.mask=blocks task.mask.aspect=[2,1]", "task.mask.aspect: got [2.0, 1.0], expected [lowest, highest]"),
    ("task.mask=block", "task.mask: got 'block', expected 'random', 'blocks'; did you mean blocks"),
    ("task.mask.min_patches=16", "task.mask.min_patches: unknown setting, expected one of kind, ratio, other, kept"),
    ("task.mask.kept=0.1", "task: mask.other and mask.kept: got 0 and 0.1, expected 0: objective mae drops the"),
    (
        "task.objective=pixels_l2 task.mask.kept=0.9",
        "task.mask: other 0.1 and kept 0.9 leave nothing hidden, expected a sum below 1",
    ),
    ("task.objective=mean_colour", "task.objective: got 'mean_colour', expected 'mean_color'"),
    (
        "task.objective=beit",
        "task.objective.tokenizer: got nothing, expected the model folder of a tokenizer run",
    ),
    ("task.objective.decoder_width=100", "task.objective: decoder_width: got 100, expected a multiple of its 16 heads"),
    (
        "model.name=vit_u2x1_7 model.image_size=28 task.objective=small_patch",
        "task.objective small_patch needs patches whose side divides by 4",
    ),
    ("model.image_size=225", "model: image_size 225 is not a multiple of the patch of vit_ti12x1_16, 16"),
    (
        "model.name=vit_b12x1_16_conv",
        "override 'model.name=vit_b12x1_16_conv': model.name: got vit_b12x1_16_conv, whose stem mixes neighboring"
        " patches and so leaks hidden pixels; expected a linear, hmlp or local stem, or task.",
    ),
    ("model.num_classes=10", "model.num_classes: got 10, expected null: task masked learns no classes"),
    ("data.mix.mixup=0.8", "data.mix: got mixup 0.8, cutmix 0, expected 0: no labels to mix"),
    ("data.augment.erase=0.25", "data.augment.erase: got 0.25, expected 0: task masked would learn the noise"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD, ids=[overrides for overrides, _ in BAD])
def test_bad_input_gets_one_message(overrides, message):
    changes = overrides.split()
    without = [] if any(override.startswith("model.num_classes") for override in changes) else [WITHOUT_CLASSES]
    with pytest.raises(ConfigError) as error:
        load_run(None, [*without, "task=masked", *changes])
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_leak_may_be_allowed():
    assert masked("model.name=vit_b12x1_16_conv", "task.allow_leak=true").allow_leak
    assert TypeAdapter(Objective).validate_python({"kind": "mae"}) == masked().objective
