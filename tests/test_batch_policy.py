"""Augmentation of whole batches on the worker's device: the pixels of the per-image reference, bit for bit."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from test_augment import photo

from vitray.config.augmentation import (
    Augment,
    CenterCrop,
    DinoColors,
    RandAugment,
    ThreeAugment,
    TorchvisionRandAugment,
)
from vitray.data.augment import ops_pillow, ops_tensor
from vitray.data.augment.crops import augment_image, crop_and_draw
from vitray.data.augment.draws import (
    OPERATIONS,
    Draws,
    draw_columns,
    read_draws,
    timm_amount,
    torchvision_amount,
    write_draws,
)
from vitray.data.augment.keyed_random import generator
from vitray.data.augment.ops_tensor import apply_draws, box_weights, level_table

AUGMENTS = {
    "plain": Augment(),
    "three": Augment(policy=ThreeAugment(), jitter=0.3),
    "three_bilinear": Augment.model_validate({"policy": "three_augment", "crop": {"interpolation": "bilinear"}}),
    "dino": Augment(policy=DinoColors(blur=(0.7,), solarize=(0.3,), hue=0.4), jitter=0.2),
    "rand": Augment(policy=RandAugment(std=3.0, chance=0.8, ops=4), jitter=0.9),
    "rand_original": Augment(policy=RandAugment(chance=1.0, ops=3, increasing=False, std=4.0, fill=(1, 2, 255))),
    "beyond": Augment(policy=RandAugment(magnitude=30.0, limit=60.0, std=9.0, chance=1.0, ops=2), jitter=2.0),
    "torchvision": Augment.model_validate(
        {
            "policy": {"kind": "randaugment_torchvision", "magnitude": 21, "ops": 3, "fill": [9, 99, 199]},
            "crop": {"kind": "simple_random", "interpolation": "bilinear"},
        }
    ),
    "strongest": Augment(policy=TorchvisionRandAugment(magnitude=30, ops=2), crop=CenterCrop(), jitter=0.4),
}


def images_of(count: int, height: int, width: int) -> np.ndarray:
    """Return photos, noise, flat and two-colored images, in turn (BHWC)."""
    rng = np.random.default_rng(height * width)
    kinds = [
        lambda number: photo(width, height, number),
        lambda _: rng.integers(0, 256, (height, width, 3), dtype=np.uint8),
        lambda _: np.full((height, width, 3), rng.integers(0, 256, 3), np.uint8),
        lambda _: rng.choice(np.array([0, 255], np.uint8), (height, width, 3)),
        lambda number: photo(width, height, number) // 3 + 70,
    ]
    return np.stack([kinds[number % len(kinds)](number) for number in range(count)])


FILL = (124, 116, 104)
MODE = ops_pillow.InterpolationMode.BILINEAR


def draws_of(name: str, amounts: np.ndarray, interpolation="bicubic") -> Draws:
    codes = np.full((len(amounts), 1), OPERATIONS.index(name), np.uint8)
    return Draws(np.zeros(len(amounts), bool), codes, amounts[:, None], interpolation, FILL)


def amounts_of(name: str, count: int, size: tuple[int, int], seed: str) -> np.ndarray:
    """Return amounts of all that draws them, and those where a rule changes."""
    rng, amounts = np.random.default_rng([*f"{name} {seed}".encode(), *size]), []
    for turn in range(count):
        sign, increasing = (1, -1)[turn % 2], turn % 3 > 0
        if name == "blur":
            amounts.append(rng.uniform(0.1, 2.0))
        elif name == "hue":
            amounts.append(rng.uniform(-0.5, 0.5))
        elif name in ("color", "contrast", "brightness") and turn % 4 == 0:
            amounts.append(rng.uniform(0, 2))
        elif turn % 4 == 1 and name not in ("invert", "solarize_add"):
            amounts.append(torchvision_amount(name, rng.integers(31) / 30, size, sign))
        else:
            amounts.append(timm_amount(name, rng.choice([rng.uniform(0, 10), 0.0, 10.0]), increasing, size, sign))
    return np.array(amounts, np.float64)


def check_equal(name: str, height: int, width: int, count: int, device: str = "cpu") -> None:
    for interpolation in ("bicubic", "bilinear"):
        originals, amounts = images_of(count, height, width), amounts_of(name, count, (width, height), interpolation)
        ours = torch.from_numpy(originals.copy()).to(device)
        apply_draws(ours, draws_of(name, amounts, interpolation))
        for image, original, amount in zip(ours.cpu().numpy(), originals, amounts.tolist(), strict=True):
            theirs = ops_pillow.operate(Image.fromarray(original), name, amount, interpolation, FILL)
            assert np.array_equal(image, np.asarray(theirs)), (name, amount, interpolation, original.shape)


NAMES = sorted({*OPERATIONS} - {"identity"})


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_on_a_batch_equals_pillows_bit_for_bit(name):
    # The tolerance is zero: not one of the levels differs.
    for height, width, count in ((24, 32, 1000), (33, 21, 30), (2, 7, 20), (1, 1, 5)):
        check_equal(name, height, width, count)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_draws_at_full_size_equal_pillows_bit_for_bit(name):
    for height, width, count in ((224, 224, 250), (160, 97, 250)):
        check_equal(name, height, width, count)


def both_ways(settings: Augment, keys: list[str], size=(24, 32)) -> tuple[torch.Tensor, Draws, np.ndarray]:
    """Return crops, their draws, and the views of the per-image reference."""
    columns, crops, views = draw_columns(settings, (len(keys),)), [], []
    for row, key in enumerate(keys):
        image = photo(50, 40, row % 7)
        crop, *draws = crop_and_draw(image, settings, size, generator(3, 1, key, 2))
        write_draws(columns, (row,), *draws)
        crops.append(crop)
        views.append(augment_image(image, settings, size, generator(3, 1, key, 2)))
    return torch.from_numpy(np.stack(crops)), read_draws(columns, settings), np.stack(views)


@pytest.mark.parametrize("name", AUGMENTS)
def test_a_batch_has_the_pixels_of_the_reference(name):
    crops, draws, views = both_ways(AUGMENTS[name], [f"{number}.jpg" for number in range(150)])
    apply_draws(crops, draws)
    assert np.array_equal(crops.numpy(), views)


def rows_of(draws: Draws, rows: slice) -> Draws:
    return draws._replace(is_flipped=draws.is_flipped[rows], codes=draws.codes[rows], amounts=draws.amounts[rows])


@pytest.mark.parametrize("size", [1, 3, 16])
def test_a_row_does_not_depend_on_its_batch(size, monkeypatch):
    crops, draws, views = both_ways(AUGMENTS["rand"], [f"{number}" for number in range(32)])
    monkeypatch.setattr(ops_tensor, "PIXELS_AT_ONCE", 24 * 32 * size)
    for start in range(0, 32, 2 * size):
        rows = slice(start, start + 2 * size)
        apply_draws(crops[rows], rows_of(draws, rows))
    assert np.array_equal(crops.numpy(), views)


def test_auto_chooses_by_device():
    assert [Augment(on="auto").resolved(has_gpu).on for has_gpu in (True, False)] == ["device", "tasks"]
    for on in ("tasks", "device"):
        assert Augment(on=on).resolved(True).on == Augment(on=on).resolved(False).on == on


def test_the_draws_of_a_batch_are_small_columns():
    columns = draw_columns(AUGMENTS["three"], (8,))
    assert sum(column.nbytes for column in columns.values()) == 8 * (1 + 4 * (1 + 8))
    assert draw_columns(Augment(), (0,))["operation"].shape == (0, 1)


def test_torchvisions_kernels_differ_from_pillow():
    # The reason for kernels of our own; if this fails, torchvision's may replace them.
    image = photo(64, 48)
    kernels = {
        "gray": (0.0, lambda planes: ops_pillow.TF.rgb_to_grayscale(planes, 3)),
        "blur": (1.7, lambda planes: ops_pillow.TF.gaussian_blur(planes, [9, 9], [1.7, 1.7])),
        "rotate": (12.0, lambda planes: ops_pillow.TF.rotate(planes, 12.0, MODE, fill=[*FILL])),
    }
    for name, (amount, kernel) in kernels.items():
        pillows = ops_pillow.operate(Image.fromarray(image), name, amount, "bilinear", FILL)
        theirs = kernel(torch.from_numpy(image).permute(2, 0, 1)).permute(1, 2, 0)
        assert not np.array_equal(theirs, np.asarray(pillows)), name


def test_each_range_of_levels_is_stretched_as_by_pillow():
    low, high = (levels[::11] for levels in np.triu_indices(256))
    ramps = np.clip(np.arange(256), low[:, None], high[:, None]).astype(np.uint8)[:, None, :, None].repeat(3, 3)
    ours = torch.from_numpy(ramps.copy())
    apply_draws(ours, draws_of("auto_contrast", np.zeros(len(ramps))))
    for image, ramp in zip(ours.numpy(), ramps, strict=True):
        assert np.array_equal(image, ops_pillow.operate(Image.fromarray(ramp), "auto_contrast", 0.0, "bilinear", FILL))
    theirs = ops_pillow.TF.autocontrast(torch.from_numpy(ramps).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    assert not torch.equal(theirs, ours)  # the reason for a kernel of our own


def test_a_box_blur_keeps_the_mean_and_has_the_variance_of_its_sigma():
    for sigma in np.linspace(0.1, 2.0, 2000).tolist():
        inner, near, far, _ = (weight / 2**24 for weight in box_weights(sigma))
        assert inner + 2 * near + 2 * far == pytest.approx(1, abs=1e-6)
        # Three boxes in a row have three times the variance of one.
        assert 3 * (2 * near + 8 * far) == pytest.approx(sigma**2, rel=1e-4)
    impulse = np.zeros((1, 21, 21, 3), np.uint8)
    impulse[:, 10, 10] = 255
    ours = torch.from_numpy(impulse.copy())
    apply_draws(ours, draws_of("blur", np.array([1.5])))
    y, x = np.mgrid[-10:11, -10:11]
    gauss = 255 * np.exp(-(x**2 + y**2) / (2 * 1.5**2)) / (2 * math.pi * 1.5**2)
    assert np.abs(ours[0, :, :, 0].numpy() - gauss).max() < 3
    assert np.array_equal(ours[0], Image.fromarray(impulse[0]).filter(ImageFilter.GaussianBlur(1.5)))


def test_posterize_beyond_its_bits_is_black_or_unchanged():
    image = photo(8, 8)
    for amount in (-2.0, 0.0, 8.0, 11.0):
        pillows = ops_pillow.operate(Image.fromarray(image), "posterize", amount, "bilinear", (0, 0, 0))
        assert np.array_equal(level_table("posterize", amount)[image], pillows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", AUGMENTS)
def test_a_gpu_has_the_pixels_of_the_reference(name):
    crops, draws, views = both_ways(AUGMENTS[name], [f"{number}.jpg" for number in range(400)])
    on_gpu = crops.cuda()
    apply_draws(on_gpu, draws)
    assert np.array_equal(on_gpu.cpu().numpy(), views)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_on_a_gpu_equals_pillows_bit_for_bit(name):
    for height, width, count in ((24, 32, 1000), (33, 21, 30), (1, 1, 5)):
        check_equal(name, height, width, count, "cuda")
