"""Operations of the augmentation policies and of color jitter on one image.

They are torchvision's on Pillow images: equal to timm's bit for bit, and mostly faster than on tensors. Operations that
torchvision lacks, or does differently, call Pillow directly.
"""

import math
from collections.abc import Iterable
from typing import Any

from PIL import Image, ImageFilter
from torchvision.transforms.v2 import InterpolationMode, functional

from vitray.config.augmentation import Color, Interpolation
from vitray.data.augment.draws import Operation

TF: Any = functional  # typed for tensors only, but accepts Pillow images

ADJUSTMENTS = {
    "color": TF.adjust_saturation,
    "contrast": TF.adjust_contrast,
    "brightness": TF.adjust_brightness,
    "sharpness": TF.adjust_sharpness,
}


def apply_operations(
    image: Any, operations: Iterable[Operation], interpolation: Interpolation, fill: Color
) -> Image.Image:
    """Return the image after some operations."""
    for name, amount in operations:
        image = operate(image, name, amount, interpolation, fill)
    return image


def operate(image: Any, operation: str, amount: float, interpolation: Interpolation, fill: Color) -> Image.Image:
    """Apply one operation; `amount` is its degrees, pixels, bits, threshold, sigma, factor or turn."""
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
            # 0 bits make the image black, as before Pillow 13, which rejects 0 (timm asks for it at magnitude 10).
            return TF.posterize(image, bits=min(8, int(amount))) if amount > 0 else Image.new("RGB", image.size)
        case "solarize":
            return TF.solarize(image, threshold=amount)
        case "solarize_add":
            # Not in torchvision: adds to the darker half of the levels.
            return image.point([min(255, level + int(amount)) if level < 128 else level for level in range(256)] * 3)
        case "gray":
            return TF.rgb_to_grayscale(image, num_output_channels=3)
        case "blur":
            # DeiT III blurs with Pillow; torchvision's equivalent takes five times as long.
            return image.filter(ImageFilter.GaussianBlur(amount))
        case "color" | "contrast" | "brightness" | "sharpness":
            return ADJUSTMENTS[operation](image, amount)
        case "hue":
            return TF.adjust_hue(image, amount)
        case "rotate":
            return TF.rotate(image, amount, mode, fill=list(fill))
        case "translate_x" | "translate_y" | "shear_x" | "shear_y":
            is_shear, none = operation.startswith("shear"), [0.0, 0.0]
            if is_shear:
                amount = math.degrees(math.atan(amount))
            vector = [amount, 0.0] if operation.endswith("x") else [0.0, amount]
            shift, shear = (none, vector) if is_shear else (vector, none)
            # About the corner, as in AutoAugment; about the center, a shift would also lose its last bits.
            return TF.affine(image, 0.0, shift, 1.0, shear, mode, fill=list(fill), center=none)
        case _:
            raise AssertionError(f"no operation {operation}")
