"""Corrupted images and the errors of a network on them: copies of its images, or a folder laid out as ImageNet-C.

The constants and formulas are those of ImageNet-C (Hendrycks and Dietterich, 2019, `make_imagenet_c.py`), chosen there
for images of 224 pixels. As there, values are cut to whole numbers. Unlike the published files, the images are not
compressed as JPEG of quality 85 afterwards, and the noise is a function of seed, image, corruption and severity.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, assert_never, get_args

import numpy as np
from PIL import Image

from vitray.data.augment.keyed_random import generator
from vitray.errors import ConfigError, nearest
from vitray.evaluation.classes import class_numbers
from vitray.inference.images import ImageSet, open_images
from vitray.inference.network_spec import NetworkSpec
from vitray.inference.outputs import Work, compute_outputs
from vitray.models.network import AnyNetwork
from vitray.system import storage

Corruption = Literal["gaussian_noise", "gaussian_blur", "jpeg_compression", "brightness", "contrast"]
CORRUPTIONS: tuple[Corruption, ...] = get_args(Corruption)
SEVERITIES = (1, 2, 3, 4, 5)

NOISE_DEVIATION = (0.08, 0.12, 0.18, 0.26, 0.38)
BLUR_SIGMA = (1, 2, 3, 4, 6)
JPEG_QUALITY = (25, 18, 15, 10, 7)
BRIGHTNESS_ADDED = (0.1, 0.2, 0.3, 0.4, 0.5)
CONTRAST_LEFT = (0.4, 0.3, 0.2, 0.1, 0.05)

SEED = 0
# The beginnings of the names of scores: of a corruption, and of a corruption and a severity.
ERROR_OF, ERROR_AT = "corruption_error_", "error_"
Baseline = Mapping[str, float | list[float]]


def corrupt(image_HWC: np.ndarray, corruption: Corruption, severity: int, seed: int = 0, key: str = "") -> np.ndarray:
    """Return a corrupted copy of a uint8 RGB image; the noise depends on the seed and on the image's key."""
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
            assert_never(corruption)
    return (np.clip(pixels_HWC, 0, 1) * 255).astype(np.uint8)


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


# ---- errors ----------------------------------------------------------------------------------------------------------


class CorruptionSet(NamedTuple):
    """A folder of class folders with one corruption at one severity."""

    corruption: str
    severity: int
    path: Path

    def open(self) -> ImageSet:
        """List its images."""
        return open_images(str(self.path), "val")


class CorruptedImages(NamedTuple):
    """The corrupted images of a request."""

    copies: bool
    """Whether the scored images are corrupted here."""
    sets: tuple[CorruptionSet, ...] = ()
    """The sets of a folder laid out as ImageNet-C."""
    baseline: Baseline | None = None
    """{corruption: error, or the error at each severity} of another network."""


def open_corrupted(copies: bool, folder: str | None, baseline: str | None) -> CorruptedImages | None:
    """Return the corrupted images that these options name; None without any."""
    if copies and folder:
        raise ConfigError("--corrupt: got --imagenet-c too, whose scores have the same names; expected one of them")
    if baseline and not (copies or folder):
        raise ConfigError("--baseline: got no corrupted images; expected --imagenet-c DIR or --corrupt besides")
    if not (copies or folder):
        return None
    sets = tuple(read_corruption_layout(folder)) if folder else ()
    return CorruptedImages(copies, sets, _read_baseline(baseline, sets) if baseline else None)


def check_corrupted(corrupted: CorruptedImages, spec: NetworkSpec) -> None:
    """Refuse a folder of classes that the network lacks; all of its sets have the same classes."""
    if corrupted.sets:
        class_numbers(spec, corrupted.sets[0].open())


def corruption_errors(corrupted: CorruptedImages, work: Work, workers: int | None, vit: AnyNetwork) -> dict[str, Any]:
    """Return the top-1 error of each corruption at each severity, and their means.

    Copies are corrupted after the crop, as ImageNet-C is.
    """
    errors: dict[str, dict[int, float]] = {}
    counts, left_out = set(), 0
    work = work._replace(outputs=("logits",))
    for corruption, severity, part in _works(corrupted, work):
        outputs = compute_outputs(part, workers, vit)
        assert outputs.logits is not None
        wrong_N = outputs.logits.argmax(1) != class_numbers(work.network, part.images)[outputs.labels]
        errors.setdefault(corruption, {})[severity] = float(wrong_N.mean())
        counts.add(len(outputs.labels))
        left_out += len(outputs.left_out)
    rows = {name: list(by_severity.values()) for name, by_severity in errors.items()}
    means = {name: float(np.mean(row)) for name, row in rows.items()}
    values: dict[str, Any] = {"corruption_images": min(counts), "corruption_left_out": left_out}
    values["corruption_error"] = float(np.mean(list(means.values())))
    if corrupted.baseline is not None:
        values["mce"] = relative_error(rows, corrupted.baseline)
    values |= {f"{ERROR_OF}{name}": error for name, error in means.items()}
    return values | {f"{ERROR_AT}{name}_{at}": share for name, row in errors.items() for at, share in row.items()}


def errors_of(values: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return {corruption: {severity: error}} from the scores of `corruption_errors`."""
    kinds = [name.removeprefix(ERROR_OF) for name in values if name.startswith(ERROR_OF)]
    return {
        kind: {at: values[f"{ERROR_AT}{kind}_{at}"] for at in SEVERITIES if f"{ERROR_AT}{kind}_{at}" in values}
        for kind in kinds
    }


def _works(corrupted: CorruptedImages, work: Work) -> Iterator[tuple[str, int, Work]]:
    """Yield each corruption and severity with the images to compute; a folder is listed when its turn comes."""
    for corruption in CORRUPTIONS if corrupted.copies else ():
        for severity in SEVERITIES:
            alter = partial(_altered, corruption=corruption, severity=severity)
            name = f"{corruption} {severity} seed {SEED}"
            yield corruption, severity, work._replace(alter=alter, alteration=name)
    for each in corrupted.sets:
        name = f"{each.corruption} {each.severity}"
        yield each.corruption, each.severity, work._replace(images=each.open(), alteration=name)


def _altered(view_HWC: np.ndarray, key: str, corruption: Corruption, severity: int) -> np.ndarray:
    return corrupt(view_HWC, corruption, severity, SEED, key)


def _read_baseline(path: str, sets: tuple[CorruptionSet, ...]) -> Baseline:
    """Return the errors of a JSON file: published as one number for a corruption, or one for each severity."""
    content = storage.read_json(path)
    corruptions = {each.corruption for each in sets} or set(CORRUPTIONS)
    severities = len({each.severity for each in sets} or SEVERITIES)
    if not isinstance(content, dict):
        raise ConfigError(f"--baseline: {path}: expected a JSON object, {{corruption: error}}")
    for name, value in content.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(number, int | float) and 0 <= number <= 1 for number in numbers):
            raise ConfigError(f"--baseline: {path}: {name}: got {json.dumps(value)[:80]}, expected shares from 0 to 1")
    relative_error({name: [0.0] * severities for name in corruptions}, content)  # refuses a missing corruption
    return content


def relative_error(errors: Mapping[str, Sequence[float]], baseline: Baseline) -> float:
    """Return the mean over corruptions of the errors' sum over that of a baseline (mCE; 1 is the baseline)."""
    ratios = []
    for name, values in errors.items():
        if name not in baseline:
            raise ConfigError(f"baseline errors: no {name}; expected every corruption{nearest(name, baseline)}")
        published = baseline[name]
        row = published if isinstance(published, list) else [published] * len(values)
        if len(row) != len(values) or not sum(row) > 0:
            raise ConfigError(f"baseline errors: {name} has {row}; expected {len(values)} severities, not all zero")
        ratios.append(sum(values) / sum(row))
    return float(np.mean(ratios))


# ---- a folder laid out as ImageNet-C ---------------------------------------------------------------------------------


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


def _folders(path: Path) -> list[str]:
    if not path.is_dir():
        raise ConfigError(f"{path}: not a folder; expected corruption/severity/class, as ImageNet-C has")
    folders = sorted(each.name for each in path.iterdir() if each.is_dir() and each.name[0] != ".")
    if not folders:
        raise ConfigError(f"{path}: no folder in it; expected corruption/severity/class, as ImageNet-C has")
    return folders
