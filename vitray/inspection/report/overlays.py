"""Attention maps over images, by the recipe of the ViT paper's authors. H x W pixels, C colors, R x Q patches."""

import numpy as np
from PIL import Image, ImageFilter


def overlay(image_HWC: np.ndarray, map_RQ: np.ndarray, patch: int) -> np.ndarray:
    """Return the image multiplied by its map, uint8: bright where the network attends, black where it does least.

    The map is divided by its maximum and turned to 8 bits, resized with Lanczos, blurred by the size of a patch, then
    stretched to 0 to 1. A map without contrast leaves the image as it is.
    """
    largest = map_RQ.max()
    bytes_RQ = (255 * map_RQ / (largest if largest > 0 else 1)).astype(np.uint8)
    height, width = image_HWC.shape[:2]
    mask = Image.fromarray(bytes_RQ).resize((width, height), Image.Resampling.LANCZOS)
    mask_HW = np.asarray(mask.filter(ImageFilter.GaussianBlur(patch)), np.float64)
    mask_HW = mask_HW - mask_HW.min()
    if mask_HW.max() == 0:
        return image_HWC
    return ((mask_HW / mask_HW.max())[..., None] * image_HWC).astype(np.uint8)
