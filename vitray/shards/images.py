"""An encoded image as a viewer shows it: RGB, upright, of an animation the first frame, transparency over white.

The bytes on disk stay as they came, so whoever decodes them later calls `shown` too, or a faster decoder where that
gives the same pixels (a JPEG in RGB or grey without an EXIF rotation). Colour profiles are not applied.
"""

import io
import re
import warnings
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

# Pillow refuses more than this by itself; a dataset may want less.
MAX_PIXELS = 178_956_970

# Raster formats alone: Pillow's other plugins start programs (EPS) or read other files.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF")


class BadImageError(ValueError):
    """The bytes cannot be shown; the text says why in a few words."""


def shown(content: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image in RGB as a viewer shows it, decoded whole."""
    if not content:
        raise BadImageError("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of what is handled here or shows as it is
            image = Image.open(io.BytesIO(content), formats=_formats())
            if image.width * image.height > max_pixels:
                raise BadImageError(f"too large: {image.width}x{image.height}, max_pixels={max_pixels}")
            image.load()
            return _as_rgb(_upright(image))
    except BadImageError:
        raise
    except UnidentifiedImageError:
        raise BadImageError("not an image") from None
    except Image.DecompressionBombError:
        raise BadImageError(f"too large: beyond max_pixels={max_pixels}") from None
    except Exception as error:  # decoders raise whatever malformed bytes lead them to
        # An address in memory would make the list of rejects another one in each run.
        said = re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(error).split())) or type(error).__name__
        raise BadImageError(f"cannot be decoded: {said}") from None


@lru_cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a viewer ignores EXIF that it cannot read
        return image


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        raise BadImageError("no agreed white: floating point pixels")
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 65535:
            raise BadImageError("no agreed white: 32-bit pixels")
        # Pillow's own conversion clips at 255, which shows a 16-bit scan as white.
        image = Image.fromarray((grey >> 8).astype(np.uint8))
    elif "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    return image.convert("RGB")


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
