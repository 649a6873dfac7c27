"""What a run's page shows besides numbers: its curves, what it confuses, and its most confident mistakes, as PNGs.

The same input draws the same bytes. Nothing here knows pyplot, so no figure outlives its function.
Shapes: K classes, true ones down and predicted ones across; H x W pixels, C colours.
"""

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitray.config.augmentation import Normalise

PAPER, INK, PALE, GRID = "#fbfaf8", "#1f2430", "#8a8f9c", "#e7e4de"
BLUE, ORANGE = "#2f6db3", "#d9742b"
DPI = 130

# Classes of a confusion matrix: counts can be read up to the first, names up to the second.
MOST_COUNTED, MOST_NAMED = 20, 60
MOST_PAIRS = 25
MOST_MISTAKES, MISTAKES_WIDE = 24, 6
# Inches of the contact sheet: an image with the gap beside it, the words below it, the line above all.
CELL, GAP, WORDS, TITLE = 1.75, 0.15, 0.5, 0.45

History = dict[str, list[tuple[int, float]]]
# Title of each panel, and what it shows, the later over the earlier.
PANELS = {
    "loss": ("train/loss",),
    "perplexity of the codes": ("train/perplexity", "val/perplexity"),
    "top1": ("val/top1", "val/top1_ema"),
    "learning rate": ("train/lr",),
    "images per second": ("train/images_per_second",),
}
# Beyond so many points a line is a band: their mean over a fiftieth of them is drawn above it.
MANY = 200


class Mistake(NamedTuple):
    """An image (HWC, uint8) that was taken for another class, how probable that seemed, and the image's key."""

    image: np.ndarray
    true: str
    predicted: str
    probability: float
    key: str


# ---- curves ----------------------------------------------------------------------------------------------------------


def draw_curves(history: History) -> bytes:
    """Loss, accuracy, learning rate and speed over steps, each in a panel where it was recorded."""
    shown = {title: [key for key in keys if history.get(key)] for title, keys in PANELS.items()}
    shown = {title: keys for title, keys in shown.items() if keys}
    if not shown:
        return _draw_words("nothing recorded yet")
    columns = min(2, len(shown))
    figure = _figure(5.0 * columns, 2.7 * math.ceil(len(shown) / columns))
    for place, (title, keys) in enumerate(shown.items()):
        axis = figure.add_subplot(math.ceil(len(shown) / columns), columns, place + 1)
        said = [_draw_line(axis, history[key], colour) for key, colour in zip(keys, (BLUE, ORANGE), strict=False)]
        axis.set_title(title, loc="left", color=INK, fontsize=10)
        if len(keys) == 1:
            axis.set_title(said[0], loc="right", color=PALE, fontsize=8)
        else:
            labels = [f"{key}: {words}" for key, words in zip(keys, said, strict=True)]
            axis.legend(labels, fontsize=7, frameon=False, labelcolor=INK)
        _dress(axis)
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
        axis.set_xlabel("step", color=PALE, fontsize=8)
    return _png(figure)


def _draw_line(axis: Axes, points: list[tuple[int, float]], colour: str) -> str:
    """Draw one measure and say where it ended; what is not finite leaves a gap and is counted."""
    steps, values = (np.array(column, dtype=float) for column in zip(*sorted(points), strict=True))
    finite = np.isfinite(values)
    values = np.where(finite, values, np.nan)
    said = []
    if finite.any():
        last = int(np.flatnonzero(finite)[-1])
        said.append(f"last {values[last]:.4g} at {steps[last]:,.0f}")
    if not finite.all():
        said.append(f"{np.count_nonzero(~finite)} not finite")
    if len(values) <= MANY:
        axis.plot(steps, values, color=colour, linewidth=1.4, marker="o" if len(values) < 30 else "", markersize=3)
        return ", ".join(said)
    window = len(values) // 50
    means = np.convolve(values, np.full(window, 1 / window), "valid")
    axis.plot(steps[window // 2 :][: len(means)], means, color=colour, linewidth=1.4)
    axis.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8)
    return ", ".join([*said, f"bold is the mean of {window}"])


# ---- confusion -------------------------------------------------------------------------------------------------------


def draw_confusion(counts_KK: np.ndarray, classes: Sequence[str]) -> bytes:
    """How often each class (rows) was taken for each (columns); of many classes, the pairs most often confused."""
    counts_KK = np.asarray(counts_KK)
    if counts_KK.shape != (len(classes), len(classes)):
        raise ValueError(f"got counts of shape {counts_KK.shape} for {len(classes)} classes")
    if len(classes) > MOST_NAMED:
        return _draw_pairs(counts_KK, classes)
    return _draw_matrix(counts_KK, classes)


def _draw_matrix(counts_KK: np.ndarray, classes: Sequence[str]) -> bytes:
    number = len(classes)
    counted = number <= MOST_COUNTED
    side = max(2.4, number * (0.44 if counted else 0.17))
    small = 8 if counted else 6
    names = [_plain(name, 24) for name in classes]
    # Names stand beside the matrix and below it; its side does not depend on them.
    room = 0.075 * small / 8 * max(len(name) for name in names) + 0.5
    figure = _figure(side + room + 1.1, side + room + 0.4)
    axis = figure.add_subplot()
    shares_KK = counts_KK / np.maximum(counts_KK.sum(axis=1, keepdims=True), 1)
    # The square root, because one image in a hundred should be seen beside the diagonal.
    drawn = axis.imshow(shares_KK, cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
    flat = number > 3 or max(map(len, names)) > 8
    axis.set_xticks(range(number), names, rotation=90 if flat else 0, fontsize=small, color=INK)
    axis.set_yticks(range(number), names, fontsize=small, color=INK)
    axis.tick_params(length=0)
    axis.set_xlabel("predicted", color=PALE, fontsize=9)
    axis.set_ylabel("true", color=PALE, fontsize=9)
    axis.set_title(_summary(counts_KK), color=INK, fontsize=9, loc="left")
    for line in axis.spines.values():
        line.set_visible(False)
    if counted:
        for row, column in zip(*np.nonzero(counts_KK), strict=True):
            colour = PAPER if shares_KK[row, column] > 0.35 else INK
            said = _short_number(int(counts_KK[row, column]))
            axis.text(column, row, said, ha="center", va="center", fontsize=7, color=colour)
    bar = figure.colorbar(drawn, ax=axis, shrink=0.8, aspect=35, pad=0.02, ticks=[0, 0.01, 0.1, 0.25, 0.5, 1])
    bar.ax.set_yticklabels(["0", "1 %", "10 %", "25 %", "50 %", "100 %"], fontsize=7, color=PALE)
    bar.ax.tick_params(length=0)
    bar.outline.set_visible(False)  # type: ignore[operator] - typed as a method it is not
    bar.set_label("share of the true class", color=PALE, fontsize=8)
    return _png(figure)


def _draw_pairs(counts_KK: np.ndarray, classes: Sequence[str]) -> bytes:
    wrong_KK = np.where(np.eye(len(classes), dtype=bool), 0, counts_KK)
    order = np.argsort(-wrong_KK, axis=None, kind="stable")[:MOST_PAIRS]
    pairs = [(row, column) for row, column in zip(*np.unravel_index(order, wrong_KK.shape), strict=True)]
    pairs = [(row, column) for row, column in pairs if wrong_KK[row, column]]
    if not pairs:
        return _draw_words(f"{_summary(counts_KK)}: no two classes confused")
    names = [f"{_plain(classes[row], 28)} → {_plain(classes[column], 28)}" for row, column in pairs]
    values = [int(wrong_KK[row, column]) for row, column in pairs]
    figure = _figure(4.2 + 0.075 * max(map(len, names)), 0.24 * len(pairs) + 0.9)
    axis = figure.add_subplot()
    bars = axis.barh(range(len(pairs)), values, color=BLUE, height=0.7)
    of = [counts_KK[row].sum() for row, _ in pairs]
    said = [f"{value:,} of {total:,}" for value, total in zip(values, of, strict=True)]
    axis.bar_label(bars, said, padding=3, fontsize=7, color=PALE)
    axis.set_yticks(range(len(pairs)), names, fontsize=8, color=INK)
    axis.invert_yaxis()
    axis.margins(x=0.2, y=0.01)
    axis.set_title(_summary(counts_KK), color=INK, fontsize=9, loc="left")
    axis.set_xlabel("images, true class → predicted", color=PALE, fontsize=8)
    _dress(axis)
    axis.tick_params(axis="y", labelsize=8, labelcolor=INK)
    axis.grid(False, axis="y")
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return _png(figure)


def _summary(counts_KK: np.ndarray) -> str:
    total, right = int(counts_KK.sum()), int(np.trace(counts_KK))
    return f"{100 * right / max(total, 1):.1f} % of {total:,} images right"


def _short_number(count: int) -> str:
    return str(count) if count < 100_000 else f"{count / 1000:.0f}k"


# ---- mistakes --------------------------------------------------------------------------------------------------------


def draw_mistakes(mistakes: Sequence[Mistake]) -> bytes:
    """The most confident mistakes as a contact sheet: what was seen, what it is, and which image that was."""
    if not mistakes:
        return _draw_words("no mistakes")
    ranked = sorted(mistakes, key=lambda mistake: (-mistake.probability, mistake.key))[:MOST_MISTAKES]
    columns = min(MISTAKES_WIDE, max(3, len(ranked)))
    width, height = CELL * columns + GAP, (CELL + WORDS) * math.ceil(len(ranked) / columns) + TITLE
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    said = f"{len(mistakes)} mistakes" if len(ranked) == len(mistakes) else f"{len(ranked)} of {len(mistakes)} mistakes"
    title = f"{said}, most confident first"
    figure.text(GAP / width, 1 - TITLE / 2 / height, title, color=INK, fontsize=10, va="center")
    for place, mistake in enumerate(ranked):
        left = GAP + CELL * (place % columns)
        bottom = height - TITLE - (CELL + WORDS) * (place // columns) - CELL + GAP
        side = CELL - GAP
        axis = figure.add_axes((left / width, bottom / height, side / width, side / height), facecolor=GRID)
        with _any_letter():
            _draw_mistake(axis, mistake)
    return _png(figure)


def _draw_mistake(axis: Axes, mistake: Mistake) -> None:
    height, width = mistake.image.shape[:2]
    side = max(height, width)
    left, top = (side - width) / 2, (side - height) / 2
    # Tiny images show their pixels instead of a blur.
    smooth = "nearest" if side <= 72 else "antialiased"
    axis.imshow(mistake.image, extent=(left, left + width, top + height, top), interpolation=smooth)
    axis.set(xlim=(0, side), ylim=(side, 0), xticks=[], yticks=[])
    for line in axis.spines.values():
        line.set_visible(False)
    percent = f" {100 * mistake.probability:.0f} %"
    _write(axis, 0, mistake.predicted, 8, ORANGE, after=percent)
    _write(axis, 1, mistake.true, 8, INK, before="is ")
    _write(axis, 2, mistake.key, 6, PALE, keep_end=True)


def _write(
    axis: Axes, row: int, name: str, size: int, colour: str, before: str = "", after: str = "", keep_end: bool = False
) -> None:
    """One line below an image, the name as short as the image is wide."""
    place = {"transform": axis.transAxes, "va": "top", "fontsize": size, "color": colour}
    text = axis.text(0, -0.04 - 0.105 * row, "", **place)  # type: ignore[arg-type]
    for length in range(40, 1, -1):
        text.set_text(before + _plain(name, length, keep_end) + after)
        if text.get_window_extent().width <= axis.bbox.width:
            break


# ---- what was predicted ----------------------------------------------------------------------------------------------


def draw_pictures(pictures_RBCHW: np.ndarray, normalise: Normalise) -> bytes:
    """Images in columns: as they are, what is seen of them where some is hidden, and what was drawn from that."""
    names = {2: ("as they are", "drawn from codes"), 3: ("as they are", "seen", "predicted")}[len(pictures_RBCHW)]
    mean, std = (np.array(values)[:, None, None] for values in (normalise.mean, normalise.std))
    shown_RBHWC = np.clip(pictures_RBCHW * std + mean, 0, 1).transpose(0, 1, 3, 4, 2)
    high, wide = shown_RBHWC.shape[2:4]
    cell_height = CELL * high / wide
    width = CELL * shown_RBHWC.shape[1] + GAP
    height = (cell_height + TITLE) * len(names) + GAP
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    for row, (name, images_BHWC) in enumerate(zip(names, shown_RBHWC, strict=True)):
        top = height - (cell_height + TITLE) * row
        figure.text(GAP / width, (top - TITLE / 2) / height, name, color=INK, fontsize=10, va="center")
        for column, image_HWC in enumerate(images_BHWC):
            place = (GAP + CELL * column, top - TITLE - cell_height + GAP, CELL - GAP, cell_height - GAP)
            box = (place[0] / width, place[1] / height, place[2] / width, place[3] / height)
            axis = figure.add_axes(box)
            axis.imshow(image_HWC, interpolation="nearest" if max(high, wide) <= 72 else "antialiased", aspect="auto")
            axis.set_axis_off()
    return _png(figure)


# ---- shared ----------------------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    return figure


def _dress(axis: Axes) -> None:
    """Pale ticks and lines, and no box."""
    axis.set_facecolor(PAPER)
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, labelsize=8, labelcolor=PALE)
    for line in axis.spines.values():
        line.set_visible(False)


def _draw_words(words: str) -> bytes:
    figure = _figure(5, 1.2)
    figure.text(0.5, 0.5, words, ha="center", va="center", color=PALE, fontsize=10)
    return _png(figure)


def _plain(name: str, length: int, keep_end: bool = False) -> str:
    """A name on one line, of so many letters at most, in which a dollar begins no formula."""
    name = " ".join(name.split())
    if len(name) > length:
        name = f"…{name[1 - length :]}" if keep_end else f"{name[: length - 1].rstrip()}…"
    return name.replace("$", r"\$")


def _png(figure: Figure) -> bytes:
    png = io.BytesIO()
    with _any_letter():
        figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


@contextmanager
def _any_letter() -> Iterator[None]:
    """A letter that the font lacks is drawn as a box, which says enough: matplotlib warns of each besides."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield
