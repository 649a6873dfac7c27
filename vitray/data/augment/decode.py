"""Encoded bytes to upright uint8 RGB, as an image viewer shows them: plain JPEGs by simplejpeg, the rest by Pillow.

Animations give their first frame, transparency is composed over white, 16 bits become 8, color profiles are ignored.
`vitray shard` checks images by the same rules, so the images of a dataset decode.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

# Pillow rejects larger images as decompression bombs.
MAX_PIXELS = 178_956_970
# A crop enlarges the shorter side to its own size: with 1 x 65,500 pixels, the longer one to gigabytes.
MAX_RATIO = 256
# Raster formats only: others start programs (EPS) or read other files.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF")
JPEG = b"\xff\xd8\xff"  # the first bytes of one
# Factors by which a JPEG's height and width are reduced while it is decoded, the largest first.
DIVISORS = (8, 4, 2)
UPRIGHT = 1
ORIENTATION = 0x0112  # the EXIF tag
# Small files must not take long. Each scan of a JPEG passes over the whole image, however few bytes it has. Cameras and
# optimizers write about ten; small images may have as many as libjpeg-turbo's fuzzers allow, until all scans together
# pass over this many pixels.
USUAL_SCANS, MAX_SCANS, MAX_SCANNED_PIXELS = 20, 100, 400_000_000
MAX_SEGMENTS = 10_000  # of a JPEG, before its first scan
# Pillow copies a block of a plain-text PNM for each comment in it.
MAX_COMMENTS = 1000
# Pillow parses headers in Python, with a read for each byte of a PNM comment or field of a PNG chunk. A file may take
# this many reads, and one more for each of its BYTES_PER_READ bytes.
MAX_READS, BYTES_PER_READ = 2**18, 64
_SCAN = re.compile(rb"\xff\xda")
# A marker that has a length: no stuffed zero of entropy-coded data, no RSTn, TEM or SOI. Of several \xff before it the
# last one is found: to begin a search at each would take the square of their number.
_SEGMENT = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")


class UndecodableImage(ValueError):  # noqa: N818 - the name describes the image
    """Bytes that are not a usable image; the text is the reason."""


class _CountedReads(io.BytesIO):
    """A file in memory whose reads are bounded; a read of many bytes counts as several."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._left = MAX_READS + len(content) // BYTES_PER_READ

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self._left -= 1 + len(content) // 4096
        if self._left < 0:
            raise UndecodableImage("its header or rows are in too many pieces")
        return content


class DecodedImage(NamedTuple):
    """An image at its own or at a smaller scale."""

    pixels: np.ndarray
    """Height, width, color."""
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
    if data[:3] == JPEG:
        import simplejpeg  # the measurements of a bare GPU machine decode nothing

        has_app1 = check_scans(data)
        try:
            rows, columns, colors, _ = simplejpeg.decode_jpeg_header(data)
            height, width = int(rows), int(columns)
            check_size(width, height, max_pixels)
            # simplejpeg converts CMYK differently from viewers.
            if colors in ("YCbCr", "Gray", "RGB") and not (has_app1 and _is_rotated(data)):
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


def check_scans(jpeg: bytes) -> bool:
    """Raise UndecodableImage for a JPEG with too many scans; return whether it has APP1 segments (EXIF, XMP).

    It takes 3 us for a JPEG of one scan, and 1 % of the decoding of a progressive one.
    """
    has_app1, components, pixels, at = False, 0, MAX_PIXELS, 2
    with suppress(IndexError):  # cut off
        for _ in range(MAX_SEGMENTS):
            marker = jpeg[at + 1]
            if jpeg[at] != 0xFF or marker < 0xC0 or 0xD0 <= marker <= 0xD9:
                break  # libjpeg may read on after such bytes: count
            if marker == 0xFF:  # any number of fill bytes may precede a marker
                at += 1
                continue
            if marker == 0xDA:
                if jpeg[at + 4] == components:
                    return has_app1  # all components are in the first scan, so libjpeg decodes no other
                break
            if marker in (0xC0, 0xC1, 0xC2, 0xC9, 0xCA):
                pixels = int.from_bytes(jpeg[at + 5 : at + 7]) * int.from_bytes(jpeg[at + 7 : at + 9])
                components = 0 if marker in (0xC2, 0xCA) else jpeg[at + 9]  # 0: progressive
            has_app1 |= marker == 0xE1
            at += 2 + (jpeg[at + 2] << 8) + jpeg[at + 3]
        else:
            raise UndecodableImage(f"more than {MAX_SEGMENTS:,} JPEG segments before its pixels")
    most = min(MAX_SCANS, max(USUAL_SCANS, MAX_SCANNED_PIXELS // max(1, pixels)))
    # A scan begins with these bytes, which the data after the image, a thumbnail or a profile may have, too.
    if any(islice(_SCAN.finditer(jpeg), most, None)) and any(islice(_scans(jpeg), most, None)):
        raise UndecodableImage(f"more than {most} JPEG scans")
    return has_app1


def _scans(jpeg: bytes) -> Iterator[bytes]:
    """Yield the marker of each scan up to the end of the image, as libjpeg finds them."""
    at = 2
    while (found := _SEGMENT.search(jpeg, at)) and found[1] != b"\xd9":
        if found[1] == b"\xda":
            yield found[1]
        at = found.end() + int.from_bytes(jpeg[found.end() : found.end() + 2])


def _is_rotated(jpeg: bytes) -> bool:
    """Whether EXIF may rotate a JPEG."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Image.open(io.BytesIO(jpeg), formats=["JPEG"]).getexif().get(ORIENTATION, UPRIGHT) != UPRIGHT
    except Exception:  # unreadable EXIF raises almost anything
        return True


def decode_with_pillow(content: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the image as upright RGB; this function decides which images a dataset accepts."""
    if not content:
        raise UndecodableImage("empty file")
    if content[:3] == JPEG:
        check_scans(content)
    if content[:2] in (b"P1", b"P2", b"P3") and content.count(b"#") > MAX_COMMENTS:
        raise UndecodableImage(f"more than {MAX_COMMENTS:,} comments")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(_CountedReads(content), formats=_formats())
            check_size(image.width, image.height, max_pixels)
            image.load()
            with suppress(Exception):  # viewers ignore unreadable EXIF
                ImageOps.exif_transpose(image, in_place=True)
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


def as_pixels(image: Image.Image) -> np.ndarray:
    """Return the pixels (HWC) of an open image, upright and in RGB."""
    check_size(image.width, image.height)
    with suppress(Exception):
        image = ImageOps.exif_transpose(image)
    return np.array(_as_rgb(image))


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
        gray = np.asarray(image).astype(np.int64)
        if gray.min() < 0 or gray.max() > 65535:
            raise UndecodableImage("unknown brightness scale: 32-bit pixels")
        # Pillow's own conversion clips at 255: a 16-bit scan would be white.
        image = Image.fromarray((gray >> 8).astype(np.uint8))
    elif "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    return image.convert("RGB")
