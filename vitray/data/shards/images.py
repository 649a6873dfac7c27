"""What a dataset wants to know of an image: its size, its colours, what it resembles; and images made into bytes.

The bytes on disk stay as they came, and every reader decodes them by the rules of `vitray.data.augment.decode`.
"""

import io
from typing import NamedTuple

import numpy as np
from PIL import Image


class Look(NamedTuple):
    """What one decoding tells of an image."""

    width: int
    height: int
    moments: list[int]
    """Sums of the red, green and blue pixels, then of their squares: whole numbers, so that no order changes them."""
    fingerprint: bytes | None


def look(image: Image.Image, fingerprint: bool) -> Look:
    """Size, pixel sums and, where asked, the perceptual fingerprint of a shown image."""
    counts = np.asarray(image.histogram(), dtype=np.int64).reshape(3, 256)
    levels = np.arange(256, dtype=np.int64)
    moments = [*(counts @ levels).tolist(), *(counts @ levels**2).tolist()]
    return Look(image.width, image.height, moments, _fingerprint(image) if fingerprint else None)


def _fingerprint(image: Image.Image) -> bytes:
    """128 bits: whether each cell of a 9x9 grey miniature is brighter than its right and than its lower neighbour."""
    mini = np.asarray(image.convert("L").resize((9, 9), Image.Resampling.LANCZOS), dtype=np.int16)
    # A step of 2 levels: in even areas, coding noise would decide the bit.
    bits = [mini[:8, :8] > mini[:8, 1:] + 2, mini[:8, :8] > mini[1:, :8] + 2]
    return np.packbits(np.concatenate(bits)).tobytes()


def shrunk(image: Image.Image, shorter: int) -> Image.Image | None:
    """The image with its shorter side at `shorter` pixels; None where it is no longer than that."""
    side = min(image.size)
    if side <= shorter:
        return None
    size = (max(1, round(image.width * shorter / side)), max(1, round(image.height * shorter / side)))
    return image.resize(size, Image.Resampling.BICUBIC)


def jpeg(image: Image.Image, quality: int) -> bytes:
    """The image as JPEG."""
    image.info.clear()  # a colour profile or EXIF of the original would be written along
    image.save(content := io.BytesIO(), "JPEG", quality=quality)
    return content.getvalue()


def png(pixels: np.ndarray) -> bytes:
    """Raw pixels, grey or RGB, as PNG."""
    Image.fromarray(pixels).save(content := io.BytesIO(), "PNG")
    return content.getvalue()
