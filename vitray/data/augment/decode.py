"""Encoded bytes to upright uint8 RGB, as an image viewer shows them: plain JPEGs by simplejpeg, the rest by Pillow.

Animations give their first frame, transparency is composed over white, 16 bits become 8, colour profiles are ignored.
`vitray shard` checks images by the same rules, so the images of a dataset decode.
"""

import io
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import simplejpeg
from PIL import Image, ImageOps

# Pillow rejects larger images as decompression bombs.
MAX_PIXELS = 178_956_970
# A crop enlarges the shorter side to its own size: with 1 x 65,500 pixels, the longer one to gigabytes.
MAX_RATIO = 256
# Raster formats only: others start programs (EPS) or read other files.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF")
# Factors by which a JPEG's height and width are reduced while it is decoded, the largest first.
DIVISORS = (8, 4, 2)
UPRIGHT = 1
ORIENTATION = 0x0112  # the EXIF tag


class UndecodableImage(ValueError):  # noqa: N818 - the name describes the image
    """Bytes that are not a usable image; the text is the reason."""


class DecodedImage(NamedTuple):
    """An image at its own or at a smaller scale."""

    pixels: np.ndarray
    """Height, width, colour."""
    whole: tuple[int, int]
    """Height and width of the image at its own scale."""


def decode_image(data: bytes | memoryview, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return the pixels (HWC) of an encoded image."""
    return decode_scaled(data, lambda _: 1.0, max_pixels).pixels


def decode_scaled(
    data: bytes | memoryview, max_reduction: Callable[[tuple[int, int]], float], max_pixels: int = MAX_PIXELS
) -> DecodedImage:
    """Return an image whose height and width are divided by the largest of 8, 4 and 2 that is at most
    `max_reduction(size)`.

    Other formats, and rotated JPEGs, are decoded in full. Libjpeg's other scales take longer than all pixels.
    """
    data = bytes(data)
    if data[:3] == b"\xff\xd8\xff":
        try:
            rows, columns, colours, _ = simplejpeg.decode_jpeg_header(data)
            height, width = int(rows), int(columns)
            check_size(width, height, max_pixels)
            # simplejpeg converts CMYK differently from viewers.
            if colours in ("YCbCr", "Gray", "RGB") and _is_upright(data):
                limit = max_reduction((height, width))
                divisor = next((each for each in DIVISORS if each <= limit), 1)
                least = (-(-height // divisor), -(-width // divisor)) if divisor > 1 else (0, 0)
                pixels_HWC = simplejpeg.decode_jpeg(data, min_height=least[0], min_width=least[1], min_factor=divisor)
                return DecodedImage(pixels_HWC, (height, width))
        except UndecodableImage:
            raise
        except ValueError:
            pass  # simplejpeg rejects all that libjpeg warns about, such as odd headers; Pillow decides
    pixels_HWC = np.array(decode_with_pillow(data, max_pixels))
    return DecodedImage(pixels_HWC, (pixels_HWC.shape[0], pixels_HWC.shape[1]))


def check_size(width: int, height: int, max_pixels: int = MAX_PIXELS) -> None:
    """Raise UndecodableImage for a size whose pixels, or those of a crop, would not fit in memory."""
    if width * height > max_pixels:
        raise UndecodableImage(f"too large: {width}x{height}, max_pixels={max_pixels}")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise UndecodableImage(f"too narrow: {width}x{height}, at most 1:{MAX_RATIO}")


def _is_upright(jpeg: bytes) -> bool:
    """Whether EXIF leaves a JPEG unrotated; takes 2 us without an APP1 segment (EXIF, XMP)."""
    at = 2
    while jpeg[at : at + 1] == b"\xff" and jpeg[at + 1 : at + 2] != b"\xda":
        if jpeg[at + 1 : at + 2] == b"\xe1":
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return Image.open(io.BytesIO(jpeg), formats=["JPEG"]).getexif().get(ORIENTATION, UPRIGHT) == UPRIGHT
            except Exception:  # unreadable EXIF raises almost anything
                return False
        is_fill_byte = jpeg[at + 1 : at + 2] == b"\xff"  # any number of them may precede a marker
        at += 1 if is_fill_byte else 2 + int.from_bytes(jpeg[at + 2 : at + 4])
    return True


def decode_with_pillow(content: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the image as upright RGB; this function decides which images a dataset accepts."""
    if not content:
        raise UndecodableImage("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(content), formats=_formats())
            check_size(image.width, image.height, max_pixels)
            image.load()
            with suppress(Exception):  # viewers ignore unreadable EXIF
                image = ImageOps.exif_transpose(image)
            return _as_rgb(image)
    except UndecodableImage:
        raise
    except Image.UnidentifiedImageError:
        raise UndecodableImage("not an image") from None
    except Image.DecompressionBombError:
        raise UndecodableImage(f"too large: beyond max_pixels={max_pixels}") from None
    except Exception as error:  # malformed bytes may raise anything
        # Without memory addresses, the list of rejects is the same in every run.
        reason = re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(error).split())) or type(error).__name__
        raise UndecodableImage(f"cannot be decoded: {reason}") from None


@lru_cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        raise UndecodableImage("unknown brightness scale: floating point pixels")
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 65535:
            raise UndecodableImage("unknown brightness scale: 32-bit pixels")
        # Pillow's own conversion clips at 255: a 16-bit scan would be white.
        image = Image.fromarray((grey >> 8).astype(np.uint8))
    elif "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    return image.convert("RGB")
