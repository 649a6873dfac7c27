"""Corrupted images at five severities, the mean corruption error, and folders laid out as ImageNet-C.

The constants and formulas are those of ImageNet-C (Hendrycks and Dietterich, 2019, `make_imagenet_c.py`), chosen there
for images of 224 pixels. As there, values are cut to whole numbers. Unlike the published files, the images are not
compressed as JPEG of quality 85 afterwards, and the noise is a function of seed, image, corruption and severity.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from PIL import Image

from vitray.data.augment.keyed_random import generator
from vitray.errors import ConfigError, nearest

Corruption = Literal["gaussian_noise", "gaussian_blur", "jpeg_compression", "brightness", "contrast"]
CORRUPTIONS: tuple[Corruption, ...] = get_args(Corruption)
SEVERITIES = (1, 2, 3, 4, 5)

NOISE_DEVIATION = (0.08, 0.12, 0.18, 0.26, 0.38)
BLUR_SIGMA = (1, 2, 3, 4, 6)
JPEG_QUALITY = (25, 18, 15, 10, 7)
BRIGHTNESS_ADDED = (0.1, 0.2, 0.3, 0.4, 0.5)
CONTRAST_LEFT = (0.4, 0.3, 0.2, 0.1, 0.05)


class CorruptionError(NamedTuple):
    """The errors of a model over corruptions and severities, as shares of images."""

    mean: float
    """Mean over corruptions of the mean over severities."""
    by_corruption: dict[str, float]
    relative: float | None
    """Mean over corruptions of the errors' sum divided by that of a baseline (mCE; 1 is the baseline)."""
    relative_by_corruption: dict[str, float] | None


class CorruptionSet(NamedTuple):
    """A folder of class folders with one corruption at one severity."""

    corruption: str
    severity: int
    path: Path


def corrupt(image_HWC: np.ndarray, corruption: Corruption, severity: int, seed: int = 0, key: str = "") -> np.ndarray:
    """Return a corrupted copy of a uint8 RGB image; the noise depends on the seed and on the image's key."""
    if image_HWC.dtype != np.uint8 or image_HWC.ndim != 3 or image_HWC.shape[2] != 3 or not image_HWC.size:
        raise ConfigError(
            f"corruption: got an image of {image_HWC.dtype} and shape {image_HWC.shape}; "
            "expected uint8, height x width x 3"
        )
    if severity not in SEVERITIES:
        raise ConfigError(f"corruption: got severity {severity}; expected 1 to 5")
    level, pixels_HWC = severity - 1, image_HWC / 255.0
    match corruption:
        case "gaussian_noise":
            rng = generator(seed, 0, f"{corruption} {severity} {key}")
            pixels_HWC = pixels_HWC + rng.normal(scale=NOISE_DEVIATION[level], size=pixels_HWC.shape)
        case "gaussian_blur":
            from scipy.ndimage import gaussian_filter  # loads slowly

            sigma = BLUR_SIGMA[level]
            pixels_HWC = gaussian_filter(pixels_HWC, (sigma, sigma, 0), mode="nearest", truncate=4)
        case "jpeg_compression":
            return _as_jpeg(image_HWC, JPEG_QUALITY[level])
        case "brightness":
            pixels_HWC = _brighter(pixels_HWC, BRIGHTNESS_ADDED[level])
        case "contrast":
            means_C = pixels_HWC.mean((0, 1), keepdims=True)
            pixels_HWC = (pixels_HWC - means_C) * CONTRAST_LEFT[level] + means_C
        case _:
            raise ConfigError(
                f"corruption: got {corruption!r}; expected one of {', '.join(CORRUPTIONS)}"
                f"{nearest(corruption, CORRUPTIONS)}"
            )
    return (np.clip(pixels_HWC, 0, 1) * 255).astype(np.uint8)


def mean_corruption_error(
    errors: Mapping[str, Sequence[float]], baseline: Mapping[str, Sequence[float]] | None = None
) -> CorruptionError:
    """Return the mean of {corruption: error of each severity}, and that relative to a baseline's errors."""
    if not errors:
        raise ConfigError("corruption errors: none; expected {corruption: error of each severity}")
    for name, values in errors.items():
        if not len(values) or not all(0 <= value <= 1 for value in values):
            raise ConfigError(f"corruption errors: {name} has {list(values)}; expected shares from 0 to 1")
    means = {name: float(np.mean(values)) for name, values in errors.items()}
    mean = float(np.mean(list(means.values())))
    if baseline is None:
        return CorruptionError(mean, means, None, None)
    relative = {}
    for name, values in errors.items():
        if name not in baseline:
            raise ConfigError(f"baseline errors: no {name}; expected every corruption{nearest(name, baseline)}")
        if len(baseline[name]) != len(values) or not sum(baseline[name]) > 0:
            raise ConfigError(
                f"baseline errors: {name} has {list(baseline[name])}; expected {len(values)} severities, not all zero"
            )
        relative[name] = float(sum(values) / sum(baseline[name]))
    return CorruptionError(mean, means, float(np.mean(list(relative.values()))), relative)


def read_corruption_layout(folder: str | Path) -> list[CorruptionSet]:
    """Return the sets of a folder `corruption/severity/class/image`, by name and severity.

    Every corruption has the same severities and every set the same classes.
    """
    root = Path(folder)
    sets = []
    for corruption in _folders(root):
        for severity in _folders(root / corruption):
            if severity not in map(str, SEVERITIES):
                raise ConfigError(f"{root / corruption}: got the folder {severity!r}; expected severities 1 to 5")
            sets.append(CorruptionSet(corruption, int(severity), root / corruption / severity))
    severities, classes = {each.severity for each in sets}, _folders(sets[0].path)
    for corruption in {each.corruption for each in sets}:
        missing = severities - {each.severity for each in sets if each.corruption == corruption}
        if missing:
            raise ConfigError(f"{root / corruption}: no severity {min(missing)}, which other corruptions have")
    for each in sets:
        differing = set(classes).symmetric_difference(_folders(each.path))
        if differing:
            raise ConfigError(f"{each.path}: class {min(differing)!r} is not in both it and {sets[0].path}")
    return sets


def _as_jpeg(image_HWC: np.ndarray, quality: int) -> np.ndarray:
    content = io.BytesIO()
    Image.fromarray(image_HWC).save(content, "JPEG", quality=quality)
    return np.array(Image.open(content))


def _brighter(pixels_HWC: np.ndarray, added: float) -> np.ndarray:
    """Add to the value of HSV: hue and saturation stay, so all channels grow by the same factor."""
    value_HW1 = pixels_HWC.max(2, keepdims=True)
    brighter_HW1 = np.clip(value_HW1 + added, 0, 1)
    # Black has no saturation and becomes gray.
    return np.where(value_HW1 > 0, pixels_HWC * (brighter_HW1 / np.maximum(value_HW1, 1e-12)), brighter_HW1)


def _folders(path: Path) -> list[str]:
    if not path.is_dir():
        raise ConfigError(f"{path}: not a folder; expected corruption/severity/class, as ImageNet-C has")
    folders = sorted(each.name for each in path.iterdir() if each.is_dir() and each.name[0] != ".")
    if not folders:
        raise ConfigError(f"{path}: no folder in it; expected corruption/severity/class, as ImageNet-C has")
    return folders
