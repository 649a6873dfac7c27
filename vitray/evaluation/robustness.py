"""The errors of a network on corrupted images: copies of its images, or a folder laid out as ImageNet-C."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vitray.errors import ConfigError
from vitray.evaluation.classes import class_numbers
from vitray.evaluation.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    Corruption,
    CorruptionSet,
    corrupt,
    mean_corruption_error,
    read_corruption_layout,
)
from vitray.inference.images import ImageSet, open_images
from vitray.inference.network_spec import NetworkSpec
from vitray.inference.outputs import Outputs, Work, compute_outputs
from vitray.models.network import AnyNetwork
from vitray.system import storage

SEED = 0
# The beginnings of the names of scores: of a corruption, and of a corruption and a severity.
ERROR_OF, ERROR_AT = "corruption_error_", "error_"
Baseline = Mapping[str, float | list[float]]


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
        class_numbers(spec, _images_of(corrupted.sets[0]))


def corruption_errors(corrupted: CorruptedImages, work: Work, workers: int | None, vit: AnyNetwork) -> dict[str, Any]:
    """Return the top-1 error of each corruption at each severity, and their means.

    Copies are corrupted after the crop, as ImageNet-C is.
    """
    errors: dict[str, dict[int, float]] = {}
    counts, left_out = set(), 0
    work = work._replace(outputs=("logits",))
    for corruption, severity, part in _works(corrupted, work):
        outputs = compute_outputs(part, workers, vit)
        wrong_N = _predictions(outputs) != class_numbers(work.network, part.images)[outputs.labels]
        errors.setdefault(corruption, {})[severity] = float(wrong_N.mean())
        counts.add(len(outputs.labels))
        left_out += len(outputs.left_out)
    rows = {name: list(by_severity.values()) for name, by_severity in errors.items()}
    baseline = None if corrupted.baseline is None else _as_rows(corrupted.baseline, rows)
    means = mean_corruption_error(rows, baseline)
    values: dict[str, Any] = {"corruption_images": min(counts), "corruption_left_out": left_out}
    values |= {"corruption_error": means.mean} | ({} if means.relative is None else {"mce": means.relative})
    values |= {f"{ERROR_OF}{name}": error for name, error in means.by_corruption.items()}
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
        yield each.corruption, each.severity, work._replace(images=_images_of(each), alteration=name)


def _images_of(corruption_set: CorruptionSet) -> ImageSet:
    return open_images(str(corruption_set.path), "val")


def _predictions(outputs: Outputs) -> np.ndarray:
    assert outputs.logits is not None
    return outputs.logits.argmax(1)


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
    rows = {name: [0.0] * severities for name in corruptions}
    mean_corruption_error(rows, _as_rows(content, rows))  # refuses a missing corruption
    return content


def _as_rows(baseline: Baseline, rows: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return the baseline with a number for each severity."""
    severities = len(next(iter(rows.values())))
    return {name: value if isinstance(value, list) else [value] * severities for name, value in baseline.items()}
