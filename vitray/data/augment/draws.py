"""The draws of an augmentation after its crop: flip, policy and jitter as operations with amounts; no pixels.

A Ray Data task applies them to its image (ops_pillow.py), or sends them beside the crop to the worker, which applies
them to whole batches (ops_tensor.py). Loads neither torch nor torchvision.
Shapes: B images, S operations of an image.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, assert_never

import numpy as np

from vitray.config.augmentation import (
    Augment,
    Color,
    DinoColors,
    Interpolation,
    NoPolicy,
    Policy,
    RandAugment,
    ThreeAugment,
    TorchvisionRandAugment,
)

SHARED = (
    *("auto_contrast", "equalize", "rotate", "posterize", "solarize", "color", "contrast", "brightness", "sharpness"),
    *("shear_x", "shear_y", "translate_x", "translate_y"),
)
TIMM = (*SHARED, "invert", "solarize_add")
TORCHVISION = (*SHARED, "identity")
THREE_AUGMENT = ("gray", "solarize", "blur")
JITTER = ("brightness", "contrast", "color")
# The side of DINO's local views. Its blur would leave little of smaller ones.
SMALLEST_OF_DINO = 96
# The code of an operation is its place here.
OPERATIONS = ("identity", *TIMM, "gray", "blur", "hue")
# Amounts at the full scale, the same for both kinds of RandAugment.
LARGEST = {"rotate": 30.0, "shear_x": 0.3, "shear_y": 0.3}


class Operation(NamedTuple):
    """An operation and its amount: degrees, pixels, bits, threshold, sigma, factor or turn."""

    name: str
    amount: float = 0.0


class Draws(NamedTuple):
    """The draws of a batch, as columns beside its pixels."""

    is_flipped: np.ndarray
    codes: np.ndarray
    """Places in OPERATIONS, in the order of application (BS)."""
    amounts: np.ndarray
    """Amounts of the operations (BS), float64: the pixels depend on their last bits."""
    interpolation: Interpolation
    fill: Color


def draw_operations(
    settings: Augment, size: tuple[int, int], rng: np.random.Generator, view: int = 0
) -> list[Operation]:
    """Return the operations of policy and jitter on a view of `size` (width, height), in order.

    `view` is its number among those of an image.
    """
    return [*draw_policy(settings.policy, size, rng, view), *draw_jitter(settings.jitter, rng)]


def draw_policy(policy: Policy, size: tuple[int, int], rng: np.random.Generator, view: int = 0) -> list[Operation]:
    """Return the operations that a policy draws for a view of `size` (width, height)."""
    match policy:
        case NoPolicy():
            return []
        case ThreeAugment():
            name = THREE_AUGMENT[rng.integers(3)]
            return [Operation(name, rng.uniform(0.1, 2.0) if name == "blur" else 128.0)]
        case DinoColors():
            return _draw_dino(policy, size, rng, view)
        case RandAugment():
            operations: list[Operation] = []
            for index in rng.integers(len(TIMM), size=policy.ops):
                if rng.random() < policy.chance:
                    magnitude = np.clip(rng.normal(policy.magnitude, policy.std), 0, policy.limit)
                    amount = timm_amount(TIMM[index], float(magnitude), policy.increasing, size, _sign(rng))
                    operations.append(Operation(TIMM[index], amount))
            return operations
        case TorchvisionRandAugment():
            level = policy.magnitude / (policy.bins - 1)
            names = [TORCHVISION[index] for index in rng.integers(len(TORCHVISION), size=policy.ops)]
            return [Operation(name, torchvision_amount(name, level, size, _sign(rng))) for name in names]
        case _:
            assert_never(policy)


def _draw_dino(policy: DinoColors, size: tuple[int, int], rng: np.random.Generator, view: int) -> list[Operation]:
    operations: list[Operation] = []
    if rng.random() < policy.jitter:
        strengths = policy.brightness, policy.contrast, policy.saturation
        factors = [rng.uniform(max(0.0, 1 - strength), 1 + strength) for strength in strengths]
        jitter = [*zip(JITTER, factors, strict=True), ("hue", rng.uniform(-policy.hue, policy.hue))]
        operations += [Operation(*jitter[index]) for index in rng.permutation(4)]
    if rng.random() < policy.gray:
        operations.append(Operation("gray"))
    blur, solarize = (chances[min(view, len(chances) - 1)] for chances in (policy.blur, policy.solarize))
    if rng.random() < blur:
        operations.append(Operation("blur", rng.uniform(0.1, 2.0) * min(1.0, min(size) / SMALLEST_OF_DINO)))
    if rng.random() < solarize:
        operations.append(Operation("solarize", 128.0))
    return operations


def draw_jitter(strength: float, rng: np.random.Generator) -> list[Operation]:
    """Return brightness, contrast and saturation with factors from 1 ± strength, in random order."""
    if not strength:
        return []
    low, high = max(0.0, 1 - strength), 1 + strength
    return [Operation(JITTER[index], rng.uniform(low, high)) for index in rng.permutation(3)]


def _sign(rng: np.random.Generator) -> int:
    return 1 if rng.random() < 0.5 else -1


def timm_amount(operation: str, magnitude: float, increasing: bool, size: tuple[int, int], sign: int) -> float:
    """Return the amount of an operation for timm's magnitude, on a scale of 10; `size` is (width, height)."""
    level = magnitude / 10
    match operation:
        case "translate_x" | "translate_y":
            return sign * level * 0.45 * size[operation == "translate_y"]
        case "color" | "contrast" | "brightness" | "sharpness":
            return max(0.1, 1 + sign * level * 0.9) if increasing else 0.1 + level * 1.8
        case "posterize":
            return 4 - int(level * 4) if increasing else int(level * 4)
        case "solarize":
            threshold = min(256, int(level * 256))
            return 256 - threshold if increasing else threshold
        case "solarize_add":
            return min(128, int(level * 110))
        case _:
            return sign * level * LARGEST.get(operation, 0.0)


def torchvision_amount(operation: str, level: float, size: tuple[int, int], sign: int) -> float:
    """Return the amount of an operation for a level from 0 to 1, as in torchvision's RandAugment."""
    match operation:
        case "translate_x" | "translate_y":
            return sign * int(level * 150 / 331 * size[operation == "translate_y"])
        case "color" | "contrast" | "brightness" | "sharpness":
            return 1 + sign * level * 0.9
        case "posterize":
            return 8 - round(level * 4)
        case "solarize":
            return 255 * (1 - level)
        case _:
            return sign * level * LARGEST.get(operation, 0.0)


# ---- as columns ------------------------------------------------------------------------------------------------------


def fill_color(policy: Policy) -> Color:
    """Return the color of the areas that the policy's operations uncover."""
    return policy.fill if isinstance(policy, RandAugment | TorchvisionRandAugment) else (0, 0, 0)


def draw_columns(settings: Augment, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return the columns for the draws of images, or of the views of images, without flips or operations."""
    match settings.policy:
        case RandAugment(ops=ops) | TorchvisionRandAugment(ops=ops):
            slots = ops
        case DinoColors():
            slots = len(JITTER) + 4  # hue, gray, blur and solarize
        case _:
            slots = 1
    slots += len(JITTER) if settings.jitter else 0
    return {
        "flip": np.zeros(shape, np.uint8),
        "operation": np.zeros((*shape, slots), np.uint8),
        "amount": np.zeros((*shape, slots), np.float64),
    }


def write_draws(
    columns: Mapping[str, np.ndarray], place: tuple[int, ...], is_flipped: bool, operations: Sequence[Operation]
) -> None:
    """Write the draws of one image, or of a view of it, into its place in the columns."""
    columns["flip"][place] = is_flipped
    for slot, (name, amount) in enumerate(operations):
        columns["operation"][*place, slot] = OPERATIONS.index(name)
        columns["amount"][*place, slot] = amount


def read_draws(columns: Mapping[str, np.ndarray], settings: Augment) -> Draws:
    """Return the draws that some columns hold; those of views follow each other, image after image."""
    slots = columns["operation"].shape[-1]
    codes, amounts = (columns[name].reshape(-1, slots) for name in ("operation", "amount"))
    is_flipped = columns["flip"].reshape(-1).astype(bool)
    return Draws(is_flipped, codes, amounts, settings.crop.interpolation, fill_color(settings.policy))
