"""Encoded bytes as uint8 RGB, upright, as a viewer shows them: plain JPEGs by simplejpeg, all else by Pillow.

Of an animation the first frame, transparency over white, 16 bits as 8; colour profiles are not applied. Datasets are
checked by the same rules when they are written, so what was taken then can be decoded now.
"""

import io
import re
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
    return np.array(shown(data, max_pixels))


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


def shown(content: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image in RGB as a viewer shows it, by Pillow: what decides which images a dataset takes, and their pixels."""
    if not content:
        raise UndecodableImage("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of what is handled here or shows as it is
            image = Image.open(io.BytesIO(content), formats=_formats())
            if image.width * image.height > max_pixels:
                raise UndecodableImage(f"too large: {image.width}x{image.height}, max_pixels={max_pixels}")
            image.load()
            return _as_rgb(_upright(image))
    except UndecodableImage:
        raise
    except Image.UnidentifiedImageError:
        raise UndecodableImage("not an image") from None
    except Image.DecompressionBombError:
        raise UndecodableImage(f"too large: beyond max_pixels={max_pixels}") from None
    except Exception as error:  # decoders raise whatever malformed bytes lead them to
        # An address in memory would make the list of rejects another one in each run.
        said = re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(error).split())) or type(error).__name__
        raise UndecodableImage(f"cannot be decoded: {said}") from None


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
        raise UndecodableImage("no agreed white: floating point pixels")
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 65535:
            raise UndecodableImage("no agreed white: 32-bit pixels")
        # Pillow's own conversion clips at 255, which shows a 16-bit scan as white.
        image = Image.fromarray((grey >> 8).astype(np.uint8))
    elif "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    return image.convert("RGB")
