"""Filters of the stem (ViT paper, figure 7): their leading components, or those of a first convolution themselves."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from torch import Tensor

from vitray.inspection.filters import StemFilters, first_filters, receptive_field, stem_filters
from vitray.inspection.report.drawings import DPI, FigureResult, prepare, tiled, to_array
from vitray.inspection.report.subjects import Subject
from vitray.models.other_networks import OtherNetwork
from vitray.pages.plotting import Theme, new_figure

# Filters of a first convolution that are drawn, and tiles in a row.
MOST_KERNELS = 112
FILTERS_WIDE = 7
PROSE = (
    "The leading principal components of the stem's filters, one filter for each channel of a token, the largest share"
    " of their variance first; of a stem with max pools and of another network, the filters of its first convolution"
    " themselves. Each is"
    " scaled to its largest entry; mid-gray is zero."
)


def make(subjects: Sequence[Subject], result: FigureResult) -> FigureResult:
    """Return the result with a drawing and a table of each network whose stem has filters."""
    for subject in subjects:
        if isinstance(subject.network, OtherNetwork) or subject.vit.model.shape.has_pools:
            kernels_KCHW = first_filters(subject.network)
            if kernels_KCHW is None:
                result = result.without(f"{subject.name} has none: it has no convolution.")
                continue
            shown, size = kernels_KCHW[:MOST_KERNELS], " x ".join(map(str, kernels_KCHW.shape[2:]))
            of_all = "" if len(shown) == len(kernels_KCHW) else f"the first {len(shown)} of "
            caption = f"{of_all}the {len(kernels_KCHW)} filters of {size} pixels of its first convolution."
            numbered = enumerate(kernels_KCHW.flatten(1).tolist(), start=1)
            rows = [["filter", *_entries(kernels_KCHW)], *([place, *flat] for place, flat in numbered)]
            result.add(subject.name, "Filters", caption, partial(_draw, shown), rows)
        elif subject.vit.model.shape.is_hybrid:
            reason = f"{subject.name} has none: its tokens come from a ResNet, which reads the whole image."
            result = result.without(reason)
        else:
            filters = stem_filters(subject.vit, subject.batch())
            components, shares = filters.components
            numbered = enumerate(zip(shares.tolist(), components.flatten(1).tolist(), strict=True), start=1)
            heading = ["component", "variance_share", *_entries(components)]
            rows = [heading, *([place, share, *flat] for place, (share, flat) in numbered)]
            result.add(subject.name, "Filters", _caption(subject, filters), partial(_draw, components), rows)
    return result


def _entries(filters_KCHW: Tensor) -> list[str]:
    """The names of the entries of a filter: color by color, row by row."""
    return [f"{color}_{row}_{column}" for color, row, column in np.ndindex(*filters_KCHW.shape[1:])]


def _caption(subject: Subject, filters: StemFilters) -> str:
    shares, size = filters.components.shares, receptive_field(subject.vit).size
    caption = (
        f"{len(shares)} components of {size} x {size} pixels with {float(shares.sum()):.1%} of the"
        f" variance of {subject.vit.model.shape.size:,} filters."
    )
    if subject.vit.model.shape.stem in ("linear", "linear_bn"):
        return caption
    caption += " The stem is not linear: these are the derivatives of a token at an image of one color,"
    if filters.linear_share is None or subject.images is None:
        return f"{caption} the mean of the normalization."
    images = subject.over(len(subject.images))
    return f"{caption} the mean of {images}. Of the variance of their tokens they predict {filters.linear_share:.1%}."


def _draw(filters_KCHW: Tensor, theme: Theme, title: str) -> Figure:
    """Filters or their components as RGB, each scaled to its largest entry; mid-gray is zero."""
    filters_KHWC = to_array(filters_KCHW).transpose(0, 2, 3, 1)
    number, height, width, _ = filters_KHWC.shape
    largest = np.abs(filters_KHWC).max(axis=(1, 2, 3), keepdims=True)
    columns = min(FILTERS_WIDE, number)
    rows = math.ceil(number / columns)
    tiles = np.broadcast_to(np.array(to_rgb(theme.paper)), (rows * columns, height, width, 3)).copy()
    tiles[:number] = 0.5 + 0.5 * filters_KHWC / np.maximum(largest, np.finfo(float).tiny)
    figure = new_figure(theme, 0.62 * columns + 0.4, 0.62 * rows + 0.5, DPI)
    axis = figure.add_subplot()
    prepare(axis, theme, title)
    image = tiled(tiles.reshape(rows, columns, height, width, 3), np.nan)
    axis.imshow(np.where(np.isnan(image), to_rgb(theme.paper), image), interpolation="nearest")
    axis.set_axis_off()
    return figure
