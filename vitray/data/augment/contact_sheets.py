"""A look at what training sees: a contact sheet of images and their augmented views."""

import io
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from vitray.config.augmentation import Augment
from vitray.config.parsing import flatten
from vitray.data.augment.image import Size, augment_image
from vitray.data.augment.keyed_random import generator

CELL, GAP, MARGIN, CORNER = 144, 8, 24, 10
PAPER, INK, PALE, FRAME = "#fbfaf8", "#1f2430", "#8a8f9c", "#e7e4de"


class Sample(NamedTuple):
    """An image and what to call it; `key` is what its augmentation is keyed by."""

    image: np.ndarray
    key: str
    class_name: str


def contact_sheet(
    samples: Sequence[Sample], settings: Augment, size: Size, copies: int = 8, seed: int = 0, epoch: int = 0
) -> bytes:
    """A PNG with a row per sample: the original, then its views in this and the next epochs.

    Erasing and mixing, which happen to whole batches on the device, are not shown.
    """
    small, medium = ImageFont.load_default(13), ImageFont.load_default(15)
    names = max((int(medium.getlength(_short(sample.class_name))) for sample in samples), default=0)
    left, top = MARGIN + names + 2 * GAP, MARGIN + 24
    width = left + (copies + 1) * (CELL + GAP) + GAP + MARGIN
    said = flatten(settings.model_dump(mode="json", exclude={"erase"}), "")
    words = (f"{path}={_plain(value)}" for path, value in said)
    caption = textwrap.wrap(f"{size[0]} x {size[1]}   " + "   ".join(words), width=(width - 2 * MARGIN) // 7)
    bottom = top + len(samples) * (CELL + GAP)
    sheet = Image.new("RGB", (width, bottom + GAP + 18 * len(caption) + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    for column in range(copies + 1):
        title = "original" if column == 0 else f"epoch {epoch + column - 1}"
        draw.text((_column(left, column) + CELL // 2, top - GAP), title, PALE, small, anchor="ms")
    for row, sample in enumerate(samples):
        y = top + row * (CELL + GAP)
        draw.text((left - 2 * GAP, y + CELL // 2), _short(sample.class_name), INK, medium, anchor="rm")
        for column in range(copies + 1):
            view_HWC = sample.image
            if column:
                rng = generator(seed, epoch + column - 1, sample.key)
                view_HWC = augment_image(sample.image, settings, size, rng)
            _place(sheet, view_HWC, (_column(left, column), y))
    for line, text in enumerate(caption):
        draw.text((MARGIN, bottom + GAP + 18 * line), text, PALE, small)
    png = io.BytesIO()
    sheet.save(png, "PNG")
    return png.getvalue()


def _column(left: int, column: int) -> int:
    """The x of a column; the original stands a little apart."""
    return left + column * (CELL + GAP) + (GAP if column else 0)


def _place(sheet: Image.Image, view_HWC: np.ndarray, corner: tuple[int, int]) -> None:
    """Paste a view, scaled to fit its cell, with rounded corners on a pale frame."""
    image = Image.fromarray(np.ascontiguousarray(view_HWC))
    # Tiny images show their pixels instead of a blur.
    smooth = Image.Resampling.NEAREST if max(image.size) <= CELL // 2 else Image.Resampling.LANCZOS
    image = ImageOps.contain(image, (CELL, CELL), smooth)
    cell = Image.new("RGB", (CELL, CELL), FRAME)
    cell.paste(image, ((CELL - image.width) // 2, (CELL - image.height) // 2))
    mask = Image.new("L", (4 * CELL, 4 * CELL))
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, 4 * CELL - 1, 4 * CELL - 1), 4 * CORNER, 255)
    sheet.paste(cell, corner, mask.resize((CELL, CELL), Image.Resampling.LANCZOS))


def _short(name: str) -> str:
    return textwrap.shorten(name, 24, placeholder="…") if " " in name else name[:24]


def _plain(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_plain(item) for item in value)}]"
    return f"{value:.3g}" if isinstance(value, float) else str(value).lower()
