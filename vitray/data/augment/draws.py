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
# The code of an operation is its place here.
OPERATIONS = ("identity", *TIMM, "gray", "blur")
# Amounts at the full scale, the same for both kinds of RandAugment.
LARGEST = {"rotate": 30.0, "shear_x": 0.3, "shear_y": 0.3}


class Operation(NamedTuple):
    """An operation and its amount: degrees, pixels, bits, threshold, sigma or factor."""

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


def draw_operations(settings: Augment, size: tuple[int, int], rng: np.random.Generator) -> list[Operation]:
    """Return the operations of policy and jitter on a view of `size` (width, height), in order."""
    return [*draw_policy(settings.policy, size, rng), *draw_jitter(settings.jitter, rng)]


def draw_policy(policy: Policy, size: tuple[int, int], rng: np.random.Generator) -> list[Operation]:
    """Return the operations that a policy draws for a view of `size` (width, height)."""
    match policy:
        case NoPolicy():
            return []
        case ThreeAugment():
            name = THREE_AUGMENT[rng.integers(3)]
            return [Operation(name, rng.uniform(0.1, 2.0) if name == "blur" else 128.0)]
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


def draw_columns(settings: Augment, count: int) -> dict[str, np.ndarray]:
    """Return the columns for the draws of `count` images, without flips or operations."""
    policy = settings.policy
    slots = policy.ops if isinstance(policy, RandAugment | TorchvisionRandAugment) else 1
    slots += len(JITTER) if settings.jitter else 0
    return {
        "flip": np.zeros(count, np.uint8),
        "operation": np.zeros((count, slots), np.uint8),
        "amount": np.zeros((count, slots), np.float64),
    }


def write_draws(columns: Mapping[str, np.ndarray], row: int, is_flipped: bool, operations: Sequence[Operation]) -> None:
    """Write the draws of one image into its row of the columns."""
    columns["flip"][row] = is_flipped
    for slot, (name, amount) in enumerate(operations):
        columns["operation"][row, slot] = OPERATIONS.index(name)
        columns["amount"][row, slot] = amount


def read_draws(columns: Mapping[str, np.ndarray], settings: Augment) -> Draws:
    """Return the draws that some columns hold."""
    numbers = columns["flip"].astype(bool), columns["operation"], columns["amount"]
    return Draws(*numbers, settings.crop.interpolation, fill_color(settings.policy))
