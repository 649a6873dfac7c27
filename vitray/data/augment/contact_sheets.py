"""Contact sheets: images beside their augmented views, and images above their predictions."""

import io
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps

from vitray.config.augmentation import Augment
from vitray.config.parsing import flatten
from vitray.data.augment.crops import augment_image
from vitray.data.augment.keyed_random import generator
from vitray.data.augment.views import ViewKind

CELL, GAP, MARGIN, CORNER = 144, 8, 24, 10
PAPER, INK, PALE, FRAME, WRONG = "#fbfaf8", "#1f2430", "#8a8f9c", "#e7e4de", "#b4521e"
MOST_COLUMNS = 8
# Colors of attention, from the least to the most: even steps of lightness, also for the color-blind.
ATTENTION = ((13, 8, 135), (126, 3, 168), (204, 71, 120), (248, 149, 64), (240, 249, 33))


class Sample(NamedTuple):
    """An image with the key of its augmentation and its class name."""

    image: np.ndarray
    key: str
    class_name: str


def contact_sheet(samples: Sequence[Sample], kinds: Sequence[ViewKind], copies: int = 8, seed: int = 0) -> bytes:
    """Return a PNG with a row per sample: the original, then its views in the first `copies` epochs.

    Of several views of an image, it shows those of the first epoch. It shows neither erasing nor mixing: those apply to
    batches on the device.
    """
    views = [(kind, 0, epoch, "", f"epoch {epoch}") for kind in kinds if kind.number is None for epoch in range(copies)]
    for number, kind in enumerate(kinds):
        title = ("global", "local")[number]
        views += [(kind, at, 0, f":{number}.{at}", f"{title} {at + 1}") for at in range(kind.number or 0)]
    small, medium = ImageFont.load_default(13), ImageFont.load_default(15)
    names = max((int(medium.getlength(_shortened(sample.class_name))) for sample in samples), default=0)
    left, top = MARGIN + names + 2 * GAP, MARGIN + 24
    width = left + (len(views) + 1) * (CELL + GAP) + GAP + MARGIN
    caption = list[str]()
    for kind in kinds:
        values = flatten(kind.crop.model_dump(mode="json", exclude={"erase", "on"}), "")
        overrides = "   ".join(f"{path}={_formatted(value)}" for path, value in values)
        text = f"{kind.size[0]} x {kind.size[1]}   {overrides}"
        caption += textwrap.wrap(text, width=(width - 2 * MARGIN) // 7)
    bottom = top + len(samples) * (CELL + GAP)
    sheet = Image.new("RGB", (width, bottom + GAP + 18 * len(caption) + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(["original", *(title for *_, title in views)]):
        draw.text((_column(left, column) + CELL // 2, top - GAP), title, PALE, small, anchor="ms")
    for row, sample in enumerate(samples):
        y = top + row * (CELL + GAP)
        draw.text((left - 2 * GAP, y + CELL // 2), _shortened(sample.class_name), INK, medium, anchor="rm")
        _place(sheet, sample.image, (_column(left, 0), y))
        for column, (kind, at, epoch, name, _) in enumerate(views, start=1):
            assert isinstance(kind.crop, Augment)
            rng = generator(seed, epoch, sample.key, view=name)
            view_HWC = augment_image(sample.image, kind.crop, kind.size, rng, view=at)
            _place(sheet, view_HWC, (_column(left, column), y))
    for line, text in enumerate(caption):
        draw.text((MARGIN, bottom + GAP + 18 * line), text, PALE, small)
    png = io.BytesIO()
    sheet.save(png, "PNG")
    return png.getvalue()


class Prediction(NamedTuple):
    """An image (HWC, uint8) with its classes, the predicted probability, and the attention to each patch."""

    image: np.ndarray
    true: str
    predicted: str | None
    """None before the first evaluation: only the image and its class are drawn."""
    probability: float | None
    """None where several classes are predicted."""
    attention: np.ndarray | None
    """None for a network without attention rollout."""


def prediction_sheet(predictions: Sequence[Prediction], title: str) -> bytes:
    """Return a PNG with each image above the same image in the colors of its attention, and its prediction."""
    small, columns = ImageFont.load_default(13), min(MOST_COLUMNS, len(predictions))
    cell, top = 2 * (CELL + GAP) + 48, MARGIN + 24
    height = top + cell * -(-len(predictions) // columns)
    sheet = Image.new("RGB", (2 * MARGIN + columns * (CELL + GAP) - GAP, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, PALE, small, anchor="ls")
    for place, each in enumerate(predictions):
        x, y = MARGIN + place % columns * (CELL + GAP), top - GAP + place // columns * cell
        _place(sheet, each.image, (x, y))
        below, color = y + 2 * (CELL + GAP), INK if each.true == each.predicted else WRONG
        draw.text((x, below + 17), f"is {_cut(each.true, 19)}", PALE, small)
        if each.predicted is not None:
            if each.attention is not None:
                _place(sheet, attention_overlay(np.ascontiguousarray(each.image), each.attention), (x, y + CELL + GAP))
            share = "" if each.probability is None else f" {each.probability:.0%}"
            draw.text((x, below), _cut(each.predicted, 19 - len(share)) + share, color, small)
    png = io.BytesIO()
    sheet.save(png, "PNG")
    return png.getvalue()


class Captioned(NamedTuple):
    """An image (HWC, uint8) and the two lines below it."""

    image: np.ndarray
    title: str
    text: str


def captioned_sheet(cells: Sequence[Captioned], title: str) -> bytes:
    """Return a PNG with each image above its lines."""
    small, columns = ImageFont.load_default(13), min(MOST_COLUMNS, len(cells))
    cell, top = CELL + GAP + 48, MARGIN + 24
    sheet = Image.new("RGB", (2 * MARGIN + columns * (CELL + GAP) - GAP, top + cell * -(-len(cells) // columns)), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, PALE, small, anchor="ls")
    for place, each in enumerate(cells):
        x, y = MARGIN + place % columns * (CELL + GAP), top - GAP + place // columns * cell
        _place(sheet, each.image, (x, y))
        draw.text((x, y + CELL + GAP), _shortened(each.title)[:20], INK, small)
        draw.text((x, y + CELL + GAP + 17), each.text, PALE, small)
    png = io.BytesIO()
    sheet.save(png, "PNG")
    return png.getvalue()


def attention_overlay(image_HWC: np.ndarray, map_RQ: np.ndarray, blur: int = 0) -> np.ndarray:
    """Return an image in gray below the colors of its attention: violet where it is least, yellow where it is most.

    As in the code of the ViT paper, the map is turned to 8 bits, resized, blurred by `blur` pixels and stretched to its
    own contrast. A map without contrast leaves the image as it is.
    """
    largest = map_RQ.max()
    bytes_RQ = (255 * map_RQ / (largest if largest > 0 else 1)).astype(np.uint8)
    size = image_HWC.shape[1::-1]
    mask = Image.fromarray(bytes_RQ).resize(size, Image.Resampling.LANCZOS if blur else Image.Resampling.NEAREST)
    mask_HW = np.asarray(mask.filter(ImageFilter.GaussianBlur(blur)) if blur else mask, np.float64)
    mask_HW = mask_HW - mask_HW.min()
    if mask_HW.max() == 0:
        return image_HWC
    share_HW1 = (mask_HW / mask_HW.max())[..., None]
    steps = np.linspace(0, 1, len(ATTENTION))
    color_HWC = np.stack([np.interp(share_HW1[..., 0], steps, channel) for channel in zip(*ATTENTION, strict=True)], -1)
    gray_HW1 = np.asarray(Image.fromarray(image_HWC).convert("L"), np.float64)[..., None]
    opacity_HW1 = 0.3 + 0.4 * share_HW1  # also what is least attended has a color, so that dark images show the map
    return (gray_HW1 * (1 - opacity_HW1) + color_HWC * opacity_HW1).round().astype(np.uint8)


def _column(left: int, column: int) -> int:
    """Return the x of a column; a gap separates the original from its views."""
    return left + column * (CELL + GAP) + (GAP if column else 0)


def _place(sheet: Image.Image, view_HWC: np.ndarray, corner: tuple[int, int]) -> None:
    """Paste a view into its cell, scaled to fit, with rounded corners on a pale frame."""
    image = Image.fromarray(np.ascontiguousarray(view_HWC))
    # Nearest neighbor keeps the pixels of tiny images visible.
    resampling = Image.Resampling.NEAREST if max(image.size) <= CELL // 2 else Image.Resampling.LANCZOS
    image = ImageOps.contain(image, (CELL, CELL), resampling)
    cell = Image.new("RGB", (CELL, CELL), FRAME)
    cell.paste(image, ((CELL - image.width) // 2, (CELL - image.height) // 2))
    mask = Image.new("L", (4 * CELL, 4 * CELL))
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, 4 * CELL - 1, 4 * CELL - 1), 4 * CORNER, 255)
    sheet.paste(cell, corner, mask.resize((CELL, CELL), Image.Resampling.LANCZOS))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _shortened(name: str) -> str:
    return textwrap.shorten(name, 24, placeholder="…") if " " in name else name[:24]


def _formatted(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_formatted(item) for item in value)}]"
    return f"{value:.3g}" if isinstance(value, float) else str(value).lower()
