"""Statistics of an image for its dataset, and encoding to JPEG and PNG."""

import io
from typing import NamedTuple

import numpy as np
from PIL import Image


class ImageStats(NamedTuple):
    """The size, colours and fingerprint of one image."""

    width: int
    height: int
    moments: list[int]
    """Sums of the red, green and blue pixels, then of their squares: whole numbers, exact in any order of addition."""
    fingerprint: bytes | None


def image_stats(image: Image.Image, fingerprint: bool) -> ImageStats:
    """Return size, pixel sums and, on request, the perceptual fingerprint of an RGB image."""
    counts = np.asarray(image.histogram(), dtype=np.int64).reshape(3, 256)
    levels = np.arange(256, dtype=np.int64)
    moments = [*(counts @ levels).tolist(), *(counts @ levels**2).tolist()]
    return ImageStats(image.width, image.height, moments, _fingerprint(image) if fingerprint else None)


def _fingerprint(image: Image.Image) -> bytes:
    """Return 128 bits: whether each cell of a 9x9 grey thumbnail is brighter than its right and its lower neighbour."""
    thumbnail = np.asarray(image.convert("L").resize((9, 9), Image.Resampling.LANCZOS), dtype=np.int16)
    # At least 3 levels brighter: coding noise would decide the bits of even areas.
    bits = [
        thumbnail[:8, :8] > thumbnail[:8, 1:] + 2,
        thumbnail[:8, :8] > thumbnail[1:, :8] + 2,
    ]
    return np.packbits(np.concatenate(bits)).tobytes()


def shrink(image: Image.Image, shorter: int) -> Image.Image | None:
    """Return the image with a shorter side of `shorter` pixels; None where it is not larger."""
    side = min(image.size)
    if side <= shorter:
        return None
    size = (max(1, round(image.width * shorter / side)), max(1, round(image.height * shorter / side)))
    return image.resize(size, Image.Resampling.BICUBIC)


def jpeg(image: Image.Image, quality: int) -> bytes:
    """Return the image as JPEG."""
    image.info.clear()  # Pillow would copy the colour profile and EXIF of the original
    image.save(content := io.BytesIO(), "JPEG", quality=quality)
    return content.getvalue()


def png(pixels: np.ndarray) -> bytes:
    """Return raw pixels, grey or RGB, as PNG."""
    Image.fromarray(pixels).save(content := io.BytesIO(), "PNG")
    return content.getvalue()
