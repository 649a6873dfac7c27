"""Positions (ViT paper, figures 7 and 10): the similarity of their embeddings, or the terms that attention adds.

Shapes: L levels, P branches, H heads, K offsets, R x Q rows and columns of patches.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vitray.inspection.positions import (
    WindowTerms,
    position_similarity,
    relative_lengths,
    relative_terms,
    window_terms,
)
from vitray.inspection.report.drawings import (
    DPI,
    FigureResult,
    Rows,
    add_bar,
    add_title,
    prepare,
    tiled,
    to_array,
)
from vitray.inspection.report.subjects import Subject
from vitray.models.vit import ViT
from vitray.pages.plotting import Theme, heat, new_figure

# Tiles of each side of the figure.
MOST_TILES = 14
PROSE = (
    "A tile for each position: the cosine between its embedding and those of all positions, which lie in the tile as in"
    " the image. Relative positions have no embeddings: of them, a term of the logits by offset of query and key."
)
KINDS = {
    "learned": "learned positions",
    "learned2d": "learned positions of column and row",
    "sincos2d": "fixed sines and cosines",
    "rope": "rotary positions (the cosine between a query and a key whose channels are all 1, after their rotation: the"
    " same for every level and head)",
}
Shown = tuple[str, Callable[..., Figure], Rows]


def make(subjects: Sequence[Subject], result: FigureResult) -> FigureResult:
    """Return the result with a drawing and a table of each network with positions."""
    for subject in subjects:
        if subject.network.model.positions.kind == "relative":
            shown = _show_offsets(subject)
        elif terms := window_terms(subject.network):
            shown = _show_windows(terms)
        else:
            shown = _show_similarity(subject)
        if shown is None:
            result = result.without(f"{subject.name} has no position embedding.")
        else:
            result.add(subject.name, "Similarity of the positions", *shown)
    return result


# ---- position embeddings ---------------------------------------------------------------------------------------------


def _show_similarity(subject: Subject) -> Shown | None:
    """Caption, drawing and table: a row for each level and position, its cosine to every position."""
    similarity_RQRQ = position_similarity(subject.network)
    if similarity_RQRQ is None:
        return None
    rows, columns = similarity_RQRQ.shape[:2]
    kind, grid = KINDS[subject.network.model.positions.kind], f"on a grid of {rows} x {columns} patches"
    where = subject.vit.positions_added_at if isinstance(subject.network, ViT) else "stem"
    if where == "levels":
        levels = [position_similarity(subject.network, level=level) for level in range(len(subject.vit.blocks))]
        similarities = [each for each in levels if each is not None]
        caption = f"{kind}, those of each level, {grid}."
    else:
        similarities = [similarity_RQRQ]
        caption = f"{kind}{', added before every level,' if where == 'shared' else ','} {grid}."
    heading = ["level", "row", "column", *(f"to_{row + 1}_{column + 1}" for row, column in np.ndindex(rows, columns))]
    cells = (
        [level, row + 1, column + 1, *values[row, column].flatten().tolist()]
        for level, values in enumerate(similarities)
        for row, column in np.ndindex(rows, columns)
    )
    return caption, partial(_draw_similarity, similarities), [heading, *cells]


def _draw_similarity(levels: Sequence[Tensor], theme: Theme, title: str) -> Figure:
    """A tile for each position, its similarity (RQRQ) to all others; of a large grid, not for every position.

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
        add_title(figure, theme, title)
    add_bar(figure, axes[: len(arrays)].tolist(), drawn, theme, "cosine similarity")
    return figure


# ---- relative positions ----------------------------------------------------------------------------------------------


def _show_offsets(subject: Subject) -> Shown:
    """Caption, drawing and table: a row for each head, the value of each offset, the most negative first."""
    images_BCHW = subject.batch()
    if images_BCHW is None:
        lengths_LPK = relative_lengths(subject.vit)
        assert lengths_LPK is not None
        values_LPHK, label = lengths_LPK[:, :, None], "length of the key"
        caption = "the length of the learned key of each offset, which the heads of a branch share."
    else:
        terms_LPHK = relative_terms(subject.vit, images_BCHW)
        assert terms_LPHK is not None
        values_LPHK, label = terms_LPHK, "added to the logit"
        over = subject.over(len(images_BCHW))
        caption = (
            f"{over}; a line for each head, in the color of its branch: the product of a query with the learned key of"
            " an offset, which attention adds to the logit, as the mean over images and all pairs of patches with that"
            " offset."
        )
    rows, columns = subject.vit.model.grid
    caption += (
        " Offsets are places of queries minus those of keys in raster order,"
        f" of {columns} for a row; {rows} x {columns} patches."
    )
    *shape, offsets = values_LPHK.shape
    heading = ["level", "branch", "head", *(f"offset_{place - offsets // 2}" for place in range(offsets))]
    cells = (
        [level, branch + 1, head + 1, *values_LPHK[level, branch, head].tolist()]
        for level, branch, head in np.ndindex(*shape)
    )
    return caption, partial(_draw_offsets, values_LPHK, label), [heading, *cells]


def _draw_offsets(values_LPHK: Tensor, label: str, theme: Theme, title: str) -> Figure:
    """A panel for each level and a line for each head; branches have colors."""
    values = to_array(values_LPHK)
    levels, branches, heads, offsets = values.shape
    columns = min(4, levels)
    figure = new_figure(theme, 2.1 * columns + 0.6, 1.6 * math.ceil(levels / columns) + 0.6, DPI)
    add_title(figure, theme, title)
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


# ---- attention in windows --------------------------------------------------------------------------------------------


def _show_windows(terms: Sequence[WindowTerms]) -> Shown:
    """Caption, drawing and table: a row for each offset of each head of each attention."""
    caption = (
        "the learned term that attention in windows (of MaxViT, also in grids) adds to the logit, by the offset, query"
        " minus key: rows down,"
        " columns across, zero in the middle of a tile. A row of tiles is an attention, with its stage, and a column a"
        " head."
    )
    rows: Rows = [["attention", "stage", "head", "row_offset", "column_offset", "term"]]
    for each in terms:
        _, height, width = each.values.shape
        for head, row, column in np.ndindex(*each.values.shape):
            value = float(each.values[head, row, column])
            rows.append([each.name, each.level, head + 1, row - height // 2, column - width // 2, value])
    return caption, partial(_draw_windows, terms), rows


def _draw_windows(terms: Sequence[WindowTerms], theme: Theme, title: str) -> Figure:
    """A tile for each head: its terms by offset of rows (down) and columns; a row for each attention."""
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
