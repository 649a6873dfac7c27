"""Spectra of weights: the singular values of each matrix."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitray.inspection.report.drawings import DPI, FigureResult, Rows, add_title, prepare, to_array
from vitray.inspection.report.subjects import Subject
from vitray.inspection.tensors import Kind, Spectrum, spectra
from vitray.pages.plotting import Theme, heat, new_figure

MATRICES: tuple[Kind, ...] = ("query", "key", "value", "output", "up", "down", "convolution", "linear")
PROSE = (
    "The singular values of each matrix over its largest; the last level has the strongest color. A line that falls at"
    " once is a matrix of low rank. The kernel of a convolution is a matrix with a row for each output channel; of a"
    " network of torchvision, all matrices but the head's."
)


def make(subjects: Sequence[Subject], result: FigureResult) -> FigureResult:
    """Return the result with a drawing and a table of each network."""
    for subject in subjects:
        found = spectra(subject.network)
        alt, caption = "Singular values of the weights", f"{len(found):,} matrices."
        result.add(subject.name, alt, caption, partial(draw_spectra, found), spectrum_rows(found))
    return result


def spectrum_rows(spectra: Sequence[Spectrum]) -> Rows:
    """Return a row for each matrix: its ranks and its singular values."""
    most = max((len(each.values) for each in spectra), default=0)
    heading = ["tensor", "kind", "level", "branch", "effective_rank", "stable_rank"]
    rows: Rows = [[*heading, *(f"value_{place + 1}" for place in range(most))]]
    for each in spectra:
        ranks = [each.effective_rank, each.stable_rank]
        values = each.values.tolist()
        rows.append([each.name, each.kind, each.level, each.branch, *ranks, *values, *[None] * (most - len(values))])
    return rows


def draw_spectra(spectra: Sequence[Spectrum], theme: Theme, title: str) -> Figure:
    """Draw the singular values of each matrix over the largest, a panel for each kind; the last level is darkest."""
    kinds = [kind for kind in MATRICES if any(each.kind == kind for each in spectra)]
    columns = min(3, len(kinds))
    figure = new_figure(theme, 2.3 * columns + 0.6, 2.0 * math.ceil(len(kinds) / columns) + 0.5, DPI)
    add_title(figure, theme, title)
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
