"""LayerScale by level."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from vitray.inspection.report.drawings import DPI, FigureResult, Rows, add_legend, number_levels, prepare, to_array
from vitray.inspection.report.subjects import Subject
from vitray.inspection.tensors import LayerScale, layerscales
from vitray.pages.plotting import Theme, new_figure

PROSE = (
    "The size of LayerScale by level: the median over channels, in a band from the 5th to the 95th percentile. It"
    " weighs the output of a branch before it is added to the residual stream."
)


def make(subjects: Sequence[Subject], result: FigureResult) -> FigureResult:
    """Return the result with a drawing and a table of each network with LayerScale."""
    for subject in subjects:
        scales = layerscales(subject.vit)
        if scales is None:
            result = result.without(f"{subject.name} has no LayerScale.")
            continue
        caption = f"{len(scales[0].values):,} channels; {subject.vit.model.layerscale:g} at the start."
        rows: Rows = [["level", "branch", "p5", "median", "p95", "negative_share"]]
        for each in scales:
            values = to_array(each.values)
            percentiles = np.percentile(np.abs(values), [5, 50, 95]).tolist()
            rows.append([each.level, each.branch, *percentiles, float((values < 0).mean())])
        result.add(subject.name, "LayerScale by level", caption, partial(_draw, scales), rows)
    return result


def _draw(scales: Sequence[LayerScale], theme: Theme, title: str) -> Figure:
    """The median size by level, in a band from the 5th to the 95th percentile of channels."""
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
