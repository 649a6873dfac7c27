"""Encoded bytes as uint8 RGB, upright, as a viewer shows them: plain JPEGs by simplejpeg, all else by Pillow."""

import io
import warnings
from functools import lru_cache

import numpy as np
import simplejpeg
from PIL import Image, ImageOps

# Beyond it Pillow refuses by itself, as a decompression bomb.
MAX_PIXELS = 178_956_970
# Raster formats alone: others start programs (EPS) or read other files.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF")
UPRIGHT = 1
ORIENTATION = 0x0112  # the EXIF tag


class UndecodableImage(ValueError):  # noqa: N818 - named for what it says of the image
    """Bytes that no viewer could show; the text says why."""


def decode_image(data: bytes | memoryview, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """The pixels (HWC) of an encoded image: turned by EXIF, transparency on white, the first frame of several."""
    data = bytes(data)
    if data[:3] == b"\xff\xd8\xff":
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            # simplejpeg reads CMYK too, but by another formula than viewers.
            if colours in ("YCbCr", "Gray", "RGB") and int(height) * int(width) <= max_pixels and _is_upright(data):
                return simplejpeg.decode_jpeg(data)
        except ValueError:
            pass  # it refuses whatever libjpeg warns about, odd headers included; Pillow has the last word
    return _decode_by_pillow(data, max_pixels)


def _is_upright(jpeg: bytes) -> bool:
    """Whether a JPEG is shown as it is stored; without an APP1 segment (EXIF, XMP) that costs 2 us."""
    at = 2
    while jpeg[at : at + 1] == b"\xff" and jpeg[at + 1 : at + 2] != b"\xda":
        if jpeg[at + 1 : at + 2] == b"\xe1":
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return Image.open(io.BytesIO(jpeg), formats=["JPEG"]).getexif().get(ORIENTATION, UPRIGHT) == UPRIGHT
            except Exception:  # unreadable EXIF raises almost anything
                return False
        # A marker may be preceded by any number of fill bytes.
        filled = jpeg[at + 1 : at + 2] == b"\xff"
        at += 1 if filled else 2 + int.from_bytes(jpeg[at + 2 : at + 4])
    return True


def _decode_by_pillow(data: bytes, max_pixels: int) -> np.ndarray:
    try:
        # Pillow warns about broken metadata and goes on, as viewers do; our own limit replaces its warning about size.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=_known_formats())
            if image.width * image.height > max_pixels:
                raise UndecodableImage(f"{image.width} x {image.height} pixels, wanted at most {max_pixels}")
            image.load()
            return np.array(_as_rgb(_upright(image)))
    except UndecodableImage:
        raise
    except Image.UnidentifiedImageError:
        start = f"begins with {data[:8]!r}" if data else "empty"
        raise UndecodableImage(f"not an image in a known format: {start}") from None
    # Pillow's readers raise almost anything on broken bytes: struct.error, SyntaxError, IndexError, ...
    except Exception as error:
        raise UndecodableImage(f"{type(error).__name__}: {error}") from error


@lru_cache
def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a viewer ignores EXIF that it cannot read
        return image


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 65535:
            raise UndecodableImage("32-bit pixels have no agreed brightness, wanted 8 or 16 bits")
        # Pillow's own conversion shows everything above 255 as white.
        return Image.fromarray((grey >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise UndecodableImage("pixels of mode F have no agreed brightness, wanted 8 or 16 bits")
    if not image.has_transparency_data:
        return image.convert("RGB")
    colours = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours).convert("RGB")
