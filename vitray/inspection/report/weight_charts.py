"""The figures of weights: filters, positions, LayerScale, spectra, and the change of every tensor."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vitray.inspection.changes import TensorChange
from vitray.inspection.positions import WindowTerms
from vitray.inspection.report.drawings import DPI
from vitray.inspection.report.heat_maps import add_bar, add_legend, heat, number_levels, prepare, tiled, to_array
from vitray.inspection.tensors import KINDS, Kind, LayerScale, Spectrum
from vitray.plotting import Theme, new_figure

# Tiles of each side of the figure of positions, and levels with numbers in the cells of a heat map.
MOST_TILES, MOST_NUMBERED = 14, 16
FILTERS_WIDE = 7
MATRICES: tuple[Kind, ...] = ("query", "key", "value", "output", "up", "down", "convolution", "linear")
LABELS: dict[Kind, str] = {
    "class_token": "class token",
    "distillation_token": "distillation token",
    "layerscale": "LayerScale",
}


def draw_filters(components_KCHW: Tensor, theme: Theme, title: str) -> Figure:
    """Draw filters or their components as RGB, each scaled to its largest entry; mid-gray is zero."""
    components_KHWC = to_array(components_KCHW).transpose(0, 2, 3, 1)
    number, height, width, _ = components_KHWC.shape
    largest = np.abs(components_KHWC).max(axis=(1, 2, 3), keepdims=True)
    pictures = 0.5 + 0.5 * components_KHWC / np.maximum(largest, np.finfo(float).tiny)
    columns = min(FILTERS_WIDE, number)
    rows = math.ceil(number / columns)
    tiles = np.broadcast_to(np.array(to_rgb(theme.paper)), (rows * columns, height, width, 3)).copy()
    tiles[:number] = pictures
    figure = new_figure(theme, 0.62 * columns + 0.4, 0.62 * rows + 0.5, DPI)
    axis = figure.add_subplot()
    prepare(axis, theme, title)
    image = tiled(tiles.reshape(rows, columns, height, width, 3), np.nan)
    image = np.where(np.isnan(image), to_rgb(theme.paper), image)
    axis.imshow(image, interpolation="nearest")
    axis.set_axis_off()
    return figure


def draw_positions(levels: Sequence[Tensor], theme: Theme, title: str) -> Figure:
    """Draw a tile for each position, its similarity (RQRQ) to all others; of a large grid, not for every position.

    Similarities of several levels are panels.
    """
    arrays = [to_array(each) for each in levels]
    rows, columns = arrays[0].shape[:2]
    step = math.ceil(max(rows, columns) / MOST_TILES)
    across = min(4, len(arrays))
    down = math.ceil(len(arrays) / across)
    side = 4.4 if across == 1 else 2.2
    height = side * math.ceil(rows / step) / math.ceil(columns / step) * rows / columns
    figure = new_figure(theme, side * across + 0.9, 0.6 + (height if across == 1 else height + 0.3) * down, DPI)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for axis in axes[len(arrays) :]:
        axis.set_axis_off()
    low = min(0, *(values.min() for values in arrays))
    drawn: Any = None
    for level, (values, axis) in enumerate(zip(arrays, axes, strict=False)):
        image = tiled(values[step // 2 :: step, step // 2 :: step, ..., None], np.nan)[..., 0]
        prepare(axis, theme, title if across == 1 else f"level {level}")
        axis.grid(False)
        drawn = axis.imshow(image, cmap=heat(theme), vmin=low, vmax=1, interpolation="nearest")
        for side_axis, size in ((axis.yaxis, rows), (axis.xaxis, columns)):
            numbers = range(step // 2, size, step)
            places = [(size + 1) * place + (size - 1) / 2 for place in range(len(numbers))]
            side_axis.set_ticks(places, [str(number + 1) for number in numbers])
        axis.set_xlabel("column of the patch", color=theme.pale, fontsize=8)
    for axis in axes[::across]:
        axis.set_ylabel("row of the patch", color=theme.pale, fontsize=8)
    if across > 1:
        figure.suptitle(title.replace("$", r"\$"), x=0.01, ha="left", color=theme.ink, fontsize=9.5)
    add_bar(figure, axes[: len(arrays)].tolist(), drawn, theme, "cosine similarity")
    return figure


def draw_offset_terms(values_LPHK: Tensor, theme: Theme, title: str, label: str) -> Figure:
    """Draw a value of each offset, a panel for each level and a line for each head; branches have colors."""
    values = to_array(values_LPHK)
    levels, branches, heads, offsets = values.shape
    columns = min(4, levels)
    figure = new_figure(theme, 2.1 * columns + 0.6, 1.6 * math.ceil(levels / columns) + 0.6, DPI)
    figure.suptitle(title.replace("$", r"\$"), x=0.01, ha="left", color=theme.ink, fontsize=9.5)
    axes = figure.subplots(math.ceil(levels / columns), columns, sharex=True, sharey=True, squeeze=False).ravel()
    places = np.arange(offsets) - offsets // 2
    for level, axis in enumerate(axes):
        if level >= levels:
            axis.set_axis_off()
            continue
        prepare(axis, theme, f"level {level}")
        for branch, head in np.ndindex(branches, heads):
            color = theme.series[branch % len(theme.series)]
            axis.plot(places, values[level, branch, head], color=color, linewidth=0.8, alpha=0.8)
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    figure.supxlabel("place of the query minus that of the key, in raster order", color=theme.pale, fontsize=8)
    figure.supylabel(label, color=theme.pale, fontsize=8)
    return figure


def draw_window_terms(terms: Sequence[WindowTerms], theme: Theme, title: str) -> Figure:
    """Draw a tile for each head: its terms by offset of rows (down) and columns; a row for each attention."""
    arrays = [to_array(each.values) for each in terms]
    height, width = (max(array.shape[side] for array in arrays) for side in (1, 2))
    tiles = np.full((len(arrays), max(map(len, arrays)), height, width, 1), np.nan)
    for row, array in enumerate(arrays):
        tiles[row, : len(array), : array.shape[1], : array.shape[2], 0] = array
    image = tiled(tiles, np.nan)[..., 0]
    figure = new_figure(theme, 1.6 + 0.34 * tiles.shape[1], 0.8 + 0.34 * len(arrays), DPI)
    axis = figure.add_subplot()
    prepare(axis, theme, title)
    axis.grid(False)
    drawn = axis.imshow(image, cmap=heat(theme), interpolation="nearest")
    axis.set_yticks([(height + 1) * (row + 0.5) for row in range(len(arrays))], [str(each.level) for each in terms])
    heads = range(0, tiles.shape[1], max(1, tiles.shape[1] // 6))
    axis.set_xticks([(width + 1) * (head + 0.5) for head in heads], [str(head + 1) for head in heads])
    axis.set_xlabel("head", color=theme.pale, fontsize=8)
    axis.set_ylabel("stage", color=theme.pale, fontsize=8)
    add_bar(figure, axis, drawn, theme, "added to the logit")
    return figure


def draw_layerscales(scales: Sequence[LayerScale], theme: Theme, title: str) -> Figure:
    """Draw the median size of LayerScale by level, in a band from the 5th to the 95th percentile of channels."""
    figure = new_figure(theme, 6.4, 3.0, DPI)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (kind, half) in zip(axes, {"attn": "attention", "ffn": "feed-forward"}.items(), strict=True):
        prepare(axis, theme, f"{title}, {half}", "size of the scale" if kind == "attn" else "")
        number_levels(axis, theme, "level")
        branches = sorted({each.branch for each in scales if each.branch.startswith(kind)})
        for place, branch in enumerate(branches):
            levels = [each.level for each in scales if each.branch == branch]
            sizes = [np.abs(to_array(each.values)) for each in scales if each.branch == branch]
            low, middle, high = np.percentile(sizes, [5, 50, 95], axis=1)
            color = theme.series[place % len(theme.series)]
            axis.fill_between(levels, low, high, color=color, alpha=0.15, linewidth=0)
            axis.plot(levels, middle, color=color, linewidth=1.4, marker="o", markersize=3, label=branch)
        if len(branches) > 1:
            add_legend(axis, theme)
    if min(float(each.values.abs().min()) for each in scales) > 0:
        axes[0].set_yscale("log")
    return figure


def draw_spectra(spectra: Sequence[Spectrum], theme: Theme, title: str) -> Figure:
    """Draw the singular values of each matrix over the largest, a panel for each kind; the last level is darkest."""
    kinds = [kind for kind in MATRICES if any(each.kind == kind for each in spectra)]
    columns = min(3, len(kinds))
    figure = new_figure(theme, 2.3 * columns + 0.6, 2.0 * math.ceil(len(kinds) / columns) + 0.5, DPI)
    figure.suptitle(title.replace("$", r"\$"), x=0.01, ha="left", color=theme.ink, fontsize=9.5)
    axes = figure.subplots(math.ceil(len(kinds) / columns), columns, sharey=True, squeeze=False).ravel()
    levels = sorted({each.level or 0 for each in spectra})
    for axis, kind in zip(axes, kinds, strict=False):
        prepare(axis, theme, kind)
        for each in spectra:
            if each.kind == kind and len(each.values) and float(each.values[0]) > 0:
                depth = (levels.index(each.level or 0) + 1) / len(levels)
                values = to_array(each.values)
                axis.plot(
                    np.linspace(0, 1, len(values)),
                    values / values[0],
                    color=heat(theme)(0.2 + 0.8 * depth),
                    linewidth=0.8,
                )
        axis.set(ylim=(0, 1.03), xlim=(0, 1))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.xaxis.set_major_locator(MaxNLocator(3))
    for axis in axes[len(kinds) :]:
        axis.set_axis_off()
    figure.supxlabel("rank, as a share of all", color=theme.pale, fontsize=8)
    figure.supylabel("over the largest singular value", color=theme.pale, fontsize=8)
    return figure


def draw_tensor_changes(changes: Sequence[TensorChange], theme: Theme, title: str) -> Figure:
    """Draw the relative change by level and kind, empty where equal, and of the tensors outside the levels as bars."""
    sizes = relative_by_kind(changes)
    levels = sorted({level for level, _ in sizes if level is not None})
    kinds: list[Kind] = [kind for kind in KINDS if any((level, kind) in sizes for level in levels)]
    others: list[Kind] = [kind for kind in KINDS if (None, kind) in sizes]
    figure = new_figure(theme, 2.2 + max(2.4, 0.34 * len(levels)), 0.9 + 0.3 * (len(kinds) + len(others)), DPI)
    upper, lower = figure.subplots(2, 1, height_ratios=(len(kinds), max(len(others), 1)))
    prepare(upper, theme, title)
    upper.grid(False)
    cells = np.array([[sizes.get((level, kind), np.nan) for level in levels] for kind in kinds])
    shown = np.where(cells > 0, cells, np.nan)
    drawn = upper.imshow(shown, cmap=heat(theme), vmin=0, aspect="auto", interpolation="nearest")
    upper.set_yticks(range(len(kinds)), [LABELS.get(kind, kind) for kind in kinds], color=theme.ink)
    upper.set_xticks(range(len(levels)), [str(level) for level in levels])
    upper.set_xlabel("level", color=theme.pale, fontsize=8)
    if len(levels) <= MOST_NUMBERED:
        _write_cells(upper, shown, theme)
    add_bar(figure, upper, drawn, theme, "relative change")
    style_bars(lower, others, [sizes[None, kind] for kind in others], theme)
    return figure


def style_bars(axis: Axes, kinds: Sequence[Kind], sizes: Sequence[float], theme: Theme) -> None:
    """Draw the relative change of the tensors outside the levels."""
    prepare(axis, theme, "")
    axis.grid(False, axis="y")
    bars = axis.barh(range(len(kinds)), np.nan_to_num(sizes), color=theme.series[0], height=0.6)
    texts = ["from zero" if math.isnan(size) else f"{size:.2g}" if size else "equal" for size in sizes]
    axis.bar_label(bars, texts, padding=3, fontsize=7, color=theme.pale)
    axis.set_yticks(range(len(kinds)), ["final norm" if kind == "norm" else LABELS.get(kind, kind) for kind in kinds])
    axis.tick_params(axis="y", labelcolor=theme.ink)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_xlabel("relative change", color=theme.pale, fontsize=8)


def relative_by_kind(changes: Sequence[TensorChange]) -> dict[tuple[int | None, Kind], float]:
    """Return the relative change of all comparable tensors of a level and kind together; nan where they were zero."""
    squares: dict[tuple[int | None, Kind], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for each in changes:
        if each.status in ("equal", "changed"):
            squares[each.level, each.kind] += each.change**2, each.base**2
    return {
        place: 0.0 if change == 0 else math.sqrt(change / base) if base else math.nan
        for place, (change, base) in squares.items()
    }


def _write_cells(axis: Axes, shown: np.ndarray, theme: Theme) -> None:
    most = np.nanmax(shown) if np.isfinite(shown).any() else 1
    for row, column in np.argwhere(np.isfinite(shown)):
        color = theme.paper if shown[row, column] > 0.5 * most else theme.ink
        text = f"{shown[row, column]:.2g}".replace("0.", ".")
        axis.text(column, row, text, ha="center", va="center", fontsize=5.5, color=color)
