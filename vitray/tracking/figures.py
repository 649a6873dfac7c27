"""Pictures of a run: its curves, its confusion matrix, and its most confident mistakes, as PNGs.

Shapes: K classes, true ones down and predicted ones across; R rows of B images, each C x H x W.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitray.config.augmentation import Normalize
from vitray.pages.plotting import DPI, LIGHT, missing_glyphs, new_figure, one_line, style_axis, to_png

# Classes of a confusion matrix: up to the first number with counts in its cells, up to the second with names.
MOST_COUNTED, MOST_NAMED = 20, 60
MOST_PAIRS = 25
MOST_MISTAKES, MISTAKES_WIDE = 24, 6
# Inches of a contact sheet: an image with the gap beside it, the text below it, the title above.
CELL, GAP, TEXT, TITLE = 1.75, 0.15, 0.5, 0.45

History = dict[str, list[tuple[int, float]]]
# Title and metrics of each panel, the later metric on top.
PANELS = {
    "loss": ("train/loss",),
    "perplexity of the codes": ("train/perplexity", "val/perplexity"),
    "top1": ("val/top1", "val/top1_ema"),
    "mAP": ("val/map", "val/map_ema"),
    "learning rate": ("train/lr",),
    "images per second": ("train/images_per_second",),
}
# A line of more points is pale, under its running mean over a fiftieth of them.
MANY = 200


class MistakePicture(NamedTuple):
    """A misclassified image (HWC, uint8) with its classes, the predicted probability, and the image's key."""

    image: np.ndarray
    true: str
    predicted: str
    probability: float
    key: str


# ---- curves ----------------------------------------------------------------------------------------------------------


def draw_curves(history: History) -> bytes:
    """Draw loss, accuracy, learning rate and speed over steps, a panel for each that was recorded."""
    panels = {title: keys for title, names in PANELS.items() if (keys := [key for key in names if history.get(key)])}
    if not panels:
        return _draw_text("nothing recorded yet")
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(LIGHT, 5.0 * columns, 2.7 * rows)
    for place, (title, keys) in enumerate(panels.items()):
        axis = figure.add_subplot(rows, columns, place + 1)
        notes = [_draw_line(axis, history[key], color) for key, color in zip(keys, LIGHT.series, strict=False)]
        axis.set_title(title, loc="left", color=LIGHT.ink, fontsize=10)
        if len(keys) == 1:
            axis.set_title(notes[0], loc="right", color=LIGHT.pale, fontsize=8)
        else:
            labels = [f"{key}: {note}" for key, note in zip(keys, notes, strict=True)]
            bold = [line for line in axis.lines if line.get_alpha() is None]
            axis.legend(bold, labels, fontsize=7, frameon=False, labelcolor=LIGHT.ink)
        style_axis(axis, LIGHT)
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
        axis.set_xlabel("step", color=LIGHT.pale, fontsize=8)
    return to_png(figure)


def _draw_line(axis: Axes, points: list[tuple[int, float]], color: str) -> str:
    """Draw a metric and return its last value as text; values that are not finite leave a gap and are counted."""
    steps, values = (np.array(column, dtype=float) for column in zip(*sorted(points), strict=True))
    finite = np.isfinite(values)
    values = np.where(finite, values, np.nan)
    notes = []
    if finite.any():
        last = int(np.flatnonzero(finite)[-1])
        notes.append(f"last {values[last]:.4g} at {steps[last]:,.0f}")
    if not finite.all():
        notes.append(f"{np.count_nonzero(~finite)} not finite")
    if len(values) <= MANY:
        axis.plot(steps, values, color=color, linewidth=1.4, marker="o" if len(values) < 30 else "", markersize=3)
        return ", ".join(notes)
    window = len(values) // 50
    means = np.convolve(values, np.full(window, 1 / window), "valid")
    axis.plot(steps[window // 2 :][: len(means)], means, color=color, linewidth=1.4)
    axis.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
    return ", ".join([*notes, f"bold is the mean of {window}"])


# ---- confusion -------------------------------------------------------------------------------------------------------


def draw_confusion(counts_KK: np.ndarray, classes: Sequence[str]) -> bytes:
    """Draw the confusion matrix; of many classes, the pairs confused most often."""
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
    names = [one_line(name, 24) for name in classes]
    # Room for the names, so that they do not shrink the matrix.
    room = 0.075 * small / 8 * max(len(name) for name in names) + 0.5
    figure = new_figure(LIGHT, side + room + 1.1, side + room + 0.4)
    axis = figure.add_subplot()
    shares_KK = counts_KK / np.maximum(counts_KK.sum(axis=1, keepdims=True), 1)
    # A square-root scale, so that one image in a hundred is visible beside the diagonal.
    image = axis.imshow(shares_KK, cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
    vertical = number > 3 or max(map(len, names)) > 8
    axis.set_xticks(range(number), names, rotation=90 if vertical else 0, fontsize=small, color=LIGHT.ink)
    axis.set_yticks(range(number), names, fontsize=small, color=LIGHT.ink)
    axis.tick_params(length=0)
    axis.set_xlabel("predicted", color=LIGHT.pale, fontsize=9)
    axis.set_ylabel("true", color=LIGHT.pale, fontsize=9)
    axis.set_title(_summary(counts_KK), color=LIGHT.ink, fontsize=9, loc="left")
    axis.spines[:].set_visible(False)
    if counted:
        for row, column in zip(*np.nonzero(counts_KK), strict=True):
            color = LIGHT.paper if shares_KK[row, column] > 0.35 else LIGHT.ink
            count = int(counts_KK[row, column])
            text = str(count) if count < 100_000 else f"{count / 1000:.0f}k"
            axis.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
    bar = figure.colorbar(image, ax=axis, shrink=0.8, aspect=35, pad=0.02, ticks=[0, 0.01, 0.1, 0.25, 0.5, 1])
    bar.ax.set_yticklabels(["0", "1 %", "10 %", "25 %", "50 %", "100 %"], fontsize=7, color=LIGHT.pale)
    bar.ax.tick_params(length=0)
    bar.outline.set_visible(False)  # type: ignore[operator] - the stubs call it a method
    bar.set_label("share of the true class", color=LIGHT.pale, fontsize=8)
    return to_png(figure)


def _draw_pairs(counts_KK: np.ndarray, classes: Sequence[str]) -> bytes:
    wrong_KK = np.where(np.eye(len(classes), dtype=bool), 0, counts_KK)
    order = np.argsort(-wrong_KK, axis=None, kind="stable")[:MOST_PAIRS]
    pairs = [(row, column) for row, column in zip(*np.unravel_index(order, wrong_KK.shape), strict=True)]
    pairs = [(row, column) for row, column in pairs if wrong_KK[row, column]]
    if not pairs:
        return _draw_text(f"{_summary(counts_KK)}: no two classes confused")
    names = [f"{one_line(classes[row], 28)} → {one_line(classes[column], 28)}" for row, column in pairs]
    values = [int(wrong_KK[row, column]) for row, column in pairs]
    figure = new_figure(LIGHT, 4.2 + 0.075 * max(map(len, names)), 0.24 * len(pairs) + 0.9)
    axis = figure.add_subplot()
    bars = axis.barh(range(len(pairs)), values, color=LIGHT.series[0], height=0.7)
    totals = [counts_KK[row].sum() for row, _ in pairs]
    labels = [f"{value:,} of {total:,}" for value, total in zip(values, totals, strict=True)]
    axis.bar_label(bars, labels, padding=3, fontsize=7, color=LIGHT.pale)
    axis.set_yticks(range(len(pairs)), names, fontsize=8, color=LIGHT.ink)
    axis.invert_yaxis()
    axis.margins(x=0.2, y=0.01)
    axis.set_title(_summary(counts_KK), color=LIGHT.ink, fontsize=9, loc="left")
    axis.set_xlabel("images, true class → predicted", color=LIGHT.pale, fontsize=8)
    style_axis(axis, LIGHT)
    axis.tick_params(axis="y", labelcolor=LIGHT.ink)
    axis.grid(False, axis="y")
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return to_png(figure)


def _summary(counts_KK: np.ndarray) -> str:
    total, right = int(counts_KK.sum()), int(np.trace(counts_KK))
    return f"{100 * right / max(total, 1):.1f} % of {total:,} images right"


# ---- mistakes --------------------------------------------------------------------------------------------------------


def draw_mistakes(mistakes: Sequence[MistakePicture]) -> bytes:
    """Draw the most confident mistakes as a contact sheet, each with its classes and its key."""
    if not mistakes:
        return _draw_text("no mistakes")
    ranked = sorted(mistakes, key=lambda mistake: (-mistake.probability, mistake.key))[:MOST_MISTAKES]
    columns = min(MISTAKES_WIDE, max(3, len(ranked)))
    width, height = CELL * columns + GAP, (CELL + TEXT) * math.ceil(len(ranked) / columns) + TITLE
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=LIGHT.paper)
    shown = str(len(ranked)) if len(ranked) == len(mistakes) else f"{len(ranked)} of {len(mistakes)}"
    title = f"{shown} mistakes, most confident first"
    figure.text(GAP / width, 1 - TITLE / 2 / height, title, color=LIGHT.ink, fontsize=10, va="center")
    side = CELL - GAP
    for place, mistake in enumerate(ranked):
        left = GAP + CELL * (place % columns)
        bottom = height - TITLE - (CELL + TEXT) * (place // columns) - side
        box = (left / width, bottom / height, side / width, side / height)
        with missing_glyphs():
            _draw_mistake(figure.add_axes(box, facecolor=LIGHT.grid), mistake)
    return to_png(figure)


def _draw_mistake(axis: Axes, mistake: MistakePicture) -> None:
    height, width = mistake.image.shape[:2]
    side = max(height, width)
    left, top = (side - width) / 2, (side - height) / 2
    axis.imshow(mistake.image, extent=(left, left + width, top + height, top))
    axis.set(xlim=(0, side), ylim=(side, 0), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    percent = f"{100 * mistake.probability:.0f} %"
    _write_fitting(axis, 0, LIGHT.series[1], lambda length: f"{one_line(mistake.predicted, length)} {percent}")
    _write_fitting(axis, 1, LIGHT.ink, lambda length: f"is {one_line(mistake.true, length)}")
    _write_fitting(axis, 2, LIGHT.pale, lambda length: one_line(mistake.key, length, keep_end=True))


def _write_fitting(axis: Axes, row: int, color: str, text_of: Callable[[int], str]) -> None:
    """Write a line below an image, with the longest name that fits its width."""
    text = axis.text(0, -0.04 - 0.105 * row, "", transform=axis.transAxes, va="top", color=color)
    text.set_fontsize(8 if row < 2 else 6)
    for length in range(40, 1, -1):
        text.set_text(text_of(length))
        if text.get_window_extent().width <= axis.bbox.width:
            break


# ---- reconstructions -------------------------------------------------------------------------------------------------


def draw_pictures(pictures_RBCHW: np.ndarray, normalize: Normalize) -> bytes:
    """Draw columns of images: the originals, their visible parts if some are masked, and the reconstructions.

    A single row holds the originals.
    """
    titles = {2: ("as they are", "drawn from codes"), 3: ("as they are", "seen", "predicted")}
    names = titles.get(len(pictures_RBCHW), ("as they are",))
    mean, std = (np.array(values)[:, None, None] for values in (normalize.mean, normalize.std))
    images_RBHWC = np.clip(pictures_RBCHW * std + mean, 0, 1).transpose(0, 1, 3, 4, 2)
    high, wide = images_RBHWC.shape[2:4]
    cell_height = CELL * high / wide
    width = CELL * images_RBHWC.shape[1] + GAP
    height = (cell_height + TITLE) * len(names) + GAP
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=LIGHT.paper)
    for row, (name, images_BHWC) in enumerate(zip(names, images_RBHWC, strict=True)):
        top = height - (cell_height + TITLE) * row
        figure.text(GAP / width, (top - TITLE / 2) / height, name, color=LIGHT.ink, fontsize=10, va="center")
        bottom = top - TITLE - cell_height + GAP
        for column, image_HWC in enumerate(images_BHWC):
            left = GAP + CELL * column
            box = (left / width, bottom / height, (CELL - GAP) / width, (cell_height - GAP) / height)
            axis = figure.add_axes(box)
            axis.imshow(image_HWC, aspect="auto")
            axis.set_axis_off()
    return to_png(figure)


def _draw_text(text: str) -> bytes:
    figure = new_figure(LIGHT, 5, 1.2)
    figure.text(0.5, 0.5, text, ha="center", va="center", color=LIGHT.pale, fontsize=10)
    return to_png(figure)
