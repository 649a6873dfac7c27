"""A contact sheet: images beside their augmented views."""

import io
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from vitray.config.augmentation import Augment
from vitray.config.parsing import flatten
from vitray.data.augment.image import ImageSize, augment_image
from vitray.data.augment.keyed_random import generator

CELL, GAP, MARGIN, CORNER = 144, 8, 24, 10
PAPER, INK, PALE, FRAME = "#fbfaf8", "#1f2430", "#8a8f9c", "#e7e4de"


class Sample(NamedTuple):
    """An image with the key of its augmentation and its class name."""

    image: np.ndarray
    key: str
    class_name: str


def contact_sheet(
    samples: Sequence[Sample], settings: Augment, size: ImageSize, copies: int = 8, seed: int = 0
) -> bytes:
    """Return a PNG with a row per sample: the original, then its views in the first `copies` epochs.

    It shows neither erasing nor mixing: those apply to batches on the device.
    """
    small, medium = ImageFont.load_default(13), ImageFont.load_default(15)
    names = max((int(medium.getlength(_shortened(sample.class_name))) for sample in samples), default=0)
    left, top = MARGIN + names + 2 * GAP, MARGIN + 24
    width = left + (copies + 1) * (CELL + GAP) + GAP + MARGIN
    values = flatten(settings.model_dump(mode="json", exclude={"erase"}), "")
    overrides = (f"{path}={_formatted(value)}" for path, value in values)
    caption = textwrap.wrap(f"{size[0]} x {size[1]}   " + "   ".join(overrides), width=(width - 2 * MARGIN) // 7)
    bottom = top + len(samples) * (CELL + GAP)
    sheet = Image.new("RGB", (width, bottom + GAP + 18 * len(caption) + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    for column in range(copies + 1):
        title = "original" if column == 0 else f"epoch {column - 1}"
        draw.text((_column(left, column) + CELL // 2, top - GAP), title, PALE, small, anchor="ms")
    for row, sample in enumerate(samples):
        y = top + row * (CELL + GAP)
        draw.text((left - 2 * GAP, y + CELL // 2), _shortened(sample.class_name), INK, medium, anchor="rm")
        for column in range(copies + 1):
            view_HWC = sample.image
            if column:
                view_HWC = augment_image(view_HWC, settings, size, generator(seed, column - 1, sample.key))
            _place(sheet, view_HWC, (_column(left, column), y))
    for line, text in enumerate(caption):
        draw.text((MARGIN, bottom + GAP + 18 * line), text, PALE, small)
    png = io.BytesIO()
    sheet.save(png, "PNG")
    return png.getvalue()


def _column(left: int, column: int) -> int:
    """Return the x of a column; a gap separates the original from its views."""
    return left + column * (CELL + GAP) + (GAP if column else 0)


def _place(sheet: Image.Image, view_HWC: np.ndarray, corner: tuple[int, int]) -> None:
    """Paste a view into its cell, scaled to fit, with rounded corners on a pale frame."""
    image = Image.fromarray(np.ascontiguousarray(view_HWC))
    # Nearest neighbour keeps the pixels of tiny images visible.
    resampling = Image.Resampling.NEAREST if max(image.size) <= CELL // 2 else Image.Resampling.LANCZOS
    image = ImageOps.contain(image, (CELL, CELL), resampling)
    cell = Image.new("RGB", (CELL, CELL), FRAME)
    cell.paste(image, ((CELL - image.width) // 2, (CELL - image.height) // 2))
    mask = Image.new("L", (4 * CELL, 4 * CELL))
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, 4 * CELL - 1, 4 * CELL - 1), 4 * CORNER, 255)
    sheet.paste(cell, corner, mask.resize((CELL, CELL), Image.Resampling.LANCZOS))


def _shortened(name: str) -> str:
    return textwrap.shorten(name, 24, placeholder="…") if " " in name else name[:24]


def _formatted(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_formatted(item) for item in value)}]"
    return f"{value:.3g}" if isinstance(value, float) else str(value).lower()
