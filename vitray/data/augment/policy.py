"""Augmentation policies: 3-Augment, RandAugment as in timm and as in torchvision, and colour jitter.

The operations are torchvision's on Pillow images: equal to timm's bit for bit, and mostly faster than on tensors.
Two operations that torchvision lacks, or does differently, call Pillow directly.
"""

import math
from typing import Any, assert_never

import numpy as np
from PIL import Image, ImageFilter
from torchvision.transforms.v2 import InterpolationMode, functional

from vitray.config.augmentation import (
    Colour,
    Interpolation,
    NoPolicy,
    Policy,
    RandAugment,
    ThreeAugment,
    TorchvisionRandAugment,
)

TF: Any = functional  # typed for tensors only, but accepts Pillow images

SHARED = (
    *("auto_contrast", "equalize", "rotate", "posterize", "solarize", "colour", "contrast", "brightness", "sharpness"),
    *("shear_x", "shear_y", "translate_x", "translate_y"),
)
ADJUSTMENTS = {
    "colour": TF.adjust_saturation,
    "contrast": TF.adjust_contrast,
    "brightness": TF.adjust_brightness,
    "sharpness": TF.adjust_sharpness,
}
# Amounts at the full scale, the same for both policies.
LARGEST = {"rotate": 30.0, "shear_x": 0.3, "shear_y": 0.3}
TIMM = (*SHARED, "invert", "solarize_add")
TORCHVISION = (*SHARED, "identity")


def apply_policy(
    image: Image.Image, policy: Policy, interpolation: Interpolation, rng: np.random.Generator
) -> Image.Image:
    """Return the image after the operations that the policy draws."""
    match policy:
        case NoPolicy():
            pass
        case ThreeAugment():
            image = three_augment(image, rng)
        case RandAugment():
            for index in rng.integers(len(TIMM), size=policy.ops):
                if rng.random() < policy.chance:
                    magnitude = np.clip(rng.normal(policy.magnitude, policy.std), 0, policy.limit)
                    amount = timm_amount(TIMM[index], float(magnitude), policy.increasing, image.size, _sign(rng))
                    image = operate(image, TIMM[index], amount, interpolation, policy.fill)
        case TorchvisionRandAugment():
            level = policy.magnitude / (policy.bins - 1)
            for index in rng.integers(len(TORCHVISION), size=policy.ops):
                amount = torchvision_amount(TORCHVISION[index], level, image.size, _sign(rng))
                image = operate(image, TORCHVISION[index], amount, interpolation, policy.fill)
        case _:
            assert_never(policy)
    return image


def _sign(rng: np.random.Generator) -> int:
    return 1 if rng.random() < 0.5 else -1


def three_augment(image: Any, rng: np.random.Generator) -> Image.Image:
    """Return the image in grey, solarized or blurred."""
    match int(rng.integers(3)):
        case 0:
            return TF.rgb_to_grayscale(image, num_output_channels=3)
        case 1:
            return TF.solarize(image, threshold=128)
        case _:
            # DeiT III blurs with Pillow; torchvision's equivalent takes five times as long.
            return image.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0)))


def jitter_colours(image: Any, strength: float, rng: np.random.Generator) -> Image.Image:
    """Multiply brightness, contrast and saturation by factors from 1 ± strength, in random order."""
    if strength:
        for index in rng.permutation(3):
            factor = rng.uniform(max(0.0, 1 - strength), 1 + strength)
            image = operate(image, ("brightness", "contrast", "colour")[index], factor, "bilinear", (0, 0, 0))
    return image


def timm_amount(operation: str, magnitude: float, increasing: bool, size: tuple[int, int], sign: int) -> float:
    """Return the amount of an operation for timm's magnitude, on a scale of 10; `size` is (width, height)."""
    level = magnitude / 10
    match operation:
        case "translate_x" | "translate_y":
            return sign * level * 0.45 * size[operation == "translate_y"]
        case "colour" | "contrast" | "brightness" | "sharpness":
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
        case "colour" | "contrast" | "brightness" | "sharpness":
            return 1 + sign * level * 0.9
        case "posterize":
            return 8 - round(level * 4)
        case "solarize":
            return 255 * (1 - level)
        case _:
            return sign * level * LARGEST.get(operation, 0.0)


def operate(image: Any, operation: str, amount: float, interpolation: Interpolation, fill: Colour) -> Image.Image:
    """Apply one operation; `amount` is its degrees, pixels, bits, threshold or factor."""
    mode = InterpolationMode(interpolation)
    match operation:
        case "identity":
            return image
        case "auto_contrast":
            return TF.autocontrast(image)
        case "equalize":
            return TF.equalize(image)
        case "invert":
            return TF.invert(image)
        case "posterize":
            # Zero bits are black, as before Pillow 13, which rejects them (timm at magnitude 10 asks for them).
            return TF.posterize(image, bits=int(amount)) if amount else Image.new("RGB", image.size)
        case "solarize":
            return TF.solarize(image, threshold=amount)
        case "solarize_add":
            # Not in torchvision: adds to the darker half of the levels.
            return image.point([min(255, level + int(amount)) if level < 128 else level for level in range(256)] * 3)
        case "colour" | "contrast" | "brightness" | "sharpness":
            return ADJUSTMENTS[operation](image, amount)
        case "rotate":
            return TF.rotate(image, amount, mode, fill=list(fill))
        case "translate_x" | "translate_y" | "shear_x" | "shear_y":
            is_shear, none = operation.startswith("shear"), [0.0, 0.0]
            if is_shear:
                amount = math.degrees(math.atan(amount))
            vector = [amount, 0.0] if operation.endswith("x") else [0.0, amount]
            shift, shear = (none, vector) if is_shear else (vector, none)
            # About the corner, as in AutoAugment; about the centre, a shift would also lose its last bits.
            return TF.affine(image, 0.0, shift, 1.0, shear, mode, fill=list(fill), center=none)
        case _:
            raise AssertionError(f"no operation {operation}")
