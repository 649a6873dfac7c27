"""Corruptions: ImageNet-C's constants and formulas, noise as a function of the image; errors by hand; the layout."""

import io

import numpy as np
import pytest
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from PIL import Image
from scipy.ndimage import correlate1d

from vitray.errors import ConfigError
from vitray.evaluation.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    corrupt,
    read_corruption_layout,
    relative_error,
)


def image(height=40, width=50, seed=0):
    """A smooth image with a black, a white and a gray corner."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8))
    pixels = np.array(small.resize((width, height), Image.Resampling.BICUBIC))
    pixels[:5, :5], pixels[-5:, -5:], pixels[:5, -5:] = 0, 255, 128
    return pixels


def test_noise_has_the_published_deviation_and_is_cut():
    gray = np.full((200, 200, 3), 127, np.uint8)
    for severity, deviation in zip(SEVERITIES, (0.08, 0.12, 0.18, 0.26, 0.38), strict=True):
        noisy = corrupt(gray, "gaussian_noise", severity) / 255
        expected = np.clip(127 / 255 + np.random.default_rng(0).normal(scale=deviation, size=10**6), 0, 1)
        assert noisy.std() == pytest.approx(expected.std(), rel=0.02)
        assert noisy.mean() == pytest.approx(127 / 255, abs=0.01)


def test_noise_is_a_function_of_seed_image_and_severity():
    clean = image()
    base = corrupt(clean, "gaussian_noise", 2, 5, "cat.jpg")
    assert np.array_equal(base, corrupt(clean.copy(), "gaussian_noise", 2, 5, "cat.jpg"))
    for other in ((3, 5, "cat.jpg"), (2, 6, "cat.jpg"), (2, 5, "dog.jpg")):
        assert not np.array_equal(base, corrupt(clean, "gaussian_noise", *other))


@pytest.mark.parametrize(("severity", "sigma"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6)])
def test_blur_equals_a_convolution(severity, sigma):
    offsets = np.arange(-4 * sigma, 4 * sigma + 1)
    kernel = np.exp(-(offsets**2) / (2 * sigma**2))
    pixels = image() / 255
    for axis in (0, 1):
        pixels = correlate1d(pixels, kernel / kernel.sum(), axis=axis, mode="nearest")
    wanted = (np.clip(pixels, 0, 1) * 255).astype(int)
    assert np.abs(corrupt(image(), "gaussian_blur", severity) - wanted).max() <= 1


@pytest.mark.parametrize(("severity", "quality"), [(1, 25), (2, 18), (3, 15), (4, 10), (5, 7)])
def test_jpeg_has_the_published_quality(severity, quality):
    content = io.BytesIO()
    Image.fromarray(image()).save(content, "JPEG", quality=quality)
    assert np.array_equal(corrupt(image(), "jpeg_compression", severity), np.array(Image.open(content)))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_brightness_adds_to_the_value_of_hsv(severity):
    hsv = rgb_to_hsv(image() / 255)
    hsv[..., 2] = np.clip(hsv[..., 2] + severity / 10, 0, 1)
    wanted = np.clip(hsv_to_rgb(hsv), 0, 1) * 255
    assert np.abs(corrupt(image(), "brightness", severity) - np.floor(wanted)).max() <= 1


@pytest.mark.parametrize(("severity", "left"), [(1, 0.4), (2, 0.3), (3, 0.2), (4, 0.1), (5, 0.05)])
def test_contrast_shrinks_towards_the_mean_of_each_channel(severity, left):
    pixels = image() / 255
    wanted = np.stack([(pixels[..., c] - pixels[..., c].mean()) * left + pixels[..., c].mean() for c in range(3)], 2)
    assert np.abs(corrupt(image(), "contrast", severity) - (wanted * 255).astype(int)).max() <= 1


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_higher_severities_change_more_and_the_image_stays(corruption):
    clean = image(64, 64)
    before = clean.copy()
    changes = [np.abs(corrupt(clean, corruption, severity).astype(int) - clean).mean() for severity in SEVERITIES]
    assert changes == sorted(changes)
    assert changes[0] > 0.5
    assert np.array_equal(clean, before)
    one = corrupt(clean[:1, :1], corruption, 5)
    assert (one.shape, one.dtype) == ((1, 1, 3), np.uint8)


def test_the_relative_error_is_the_mean_of_ratios_of_sums():
    errors = {"blur": [0.2, 0.4], "noise": [0.5, 0.9]}
    baseline = {"noise": 0.5, "blur": [0.4, 0.8], "fog": [1, 1]}
    assert relative_error(errors, baseline) == pytest.approx((0.5 + 1.4) / 2)
    assert relative_error(errors, errors) == 1.0


def layout(root, names=("brightness", "noise"), severities=(1, 5), classes=("n01", "n02")):
    for name in names:
        for severity in severities:
            for each in classes:
                (root / name / str(severity) / each).mkdir(parents=True)
    return root


def test_the_layout_of_imagenet_c_is_a_list_of_sets(tmp_path):
    (layout(tmp_path) / ".cache").mkdir()
    sets = read_corruption_layout(tmp_path)
    assert [(each.corruption, each.severity) for each in sets] == [
        ("brightness", 1),
        ("brightness", 5),
        ("noise", 1),
        ("noise", 5),
    ]
    assert sets[1].path == tmp_path / "brightness" / "5"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("noise/6/n01", "noise: got the folder '6'; expected severities 1 to 5"),
        ("noise/3/n01", "brightness: no severity 3, which other corruptions have"),
        ("noise/5/n03", "5: class 'n03' is not in both it and .*brightness/1"),
        ("fog", "fog: no folder in it"),
    ],
)
def test_a_wrong_layout_is_refused_by_name(tmp_path, extra, message):
    (layout(tmp_path) / extra).mkdir(parents=True)
    with pytest.raises(ConfigError, match=message):
        read_corruption_layout(tmp_path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: relative_error({"fog": [0.2]}, {"frog": [0.2]}), "no fog; .*did you mean frog"),
        (lambda: relative_error({"fog": [0.2]}, {"fog": [0.0]}), "expected 1 severities, not all zero"),
        (lambda: read_corruption_layout("no-folder"), "no-folder: not a folder"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
