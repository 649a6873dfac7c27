"""Similarity of levels: linear CKA between the levels of each network, and between those of two."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vitray.inspection.report.drawings import DPI, FigureResult, Rows, add_bar, prepare, to_array
from vitray.inspection.report.subjects import Subject, View
from vitray.inspection.similarity import FEWEST_IMAGES, cka, level_grams
from vitray.inspection.tokens import has_levels
from vitray.pages.plotting import Theme, heat, new_figure

PROSE = (
    "Linear CKA between the tokens before the first level (0) and after each, all tokens of an image as one vector (the"
    " levels of a network of torchvision are its stages, its tokens the positions of an image): 1"
    " where two representations differ by a rotation and a scale, 0 where they have nothing in common. It is the"
    " mini-batch estimate with unbiased HSIC, so that few images do not raise it, but make it noisy."
)


def measure(view: View) -> Tensor | None:
    """Return the Gram matrices of a chunk, JBB; None without levels."""
    if not has_levels(view.network):
        return None
    return level_grams(view.network, view.images, batch=len(view.images))[0].cpu()


def make(subjects: Sequence[Subject], result: FigureResult) -> FigureResult:
    """Return the result with a drawing and a table of each network with levels, and of two together."""
    for subject in subjects:
        if not has_levels(subject.network):
            model = subject.network.model.name
            result = result.without(f"{subject.name} is not in this figure: {model} has no numbered stages.")
    subjects = [subject for subject in subjects if has_levels(subject.network)]
    grams = [subject.measured["similarity"] for subject in subjects]
    if not any(grams):
        return result.without(f"It needs at least {FEWEST_IMAGES} images.") if subjects else result
    caption = f"{subjects[0].over(sum(gram_JBB.shape[-1] for gram_JBB in grams[0]))}."
    names = [subject.name for subject in subjects]
    pairs = list(zip(names, grams, grams, strict=True))
    if len(subjects) == 2:
        pairs.append((" and ".join(names), grams[0], grams[1]))
    for title, first, second in pairs:
        cka_JK = cka(first, second)
        # A row for each state of the first network, a column for each of the second; empty where none varies.
        rows: Rows = [["levels_passed", *(f"passed_{state}" for state in range(cka_JK.shape[1]))]]
        for state, values in enumerate(cka_JK.tolist()):
            rows.append([state, *(None if np.isnan(value) else value for value in values)])
        draw = partial(_draw, cka_JK, ("", "") if first is second else [f", {name}" for name in names])
        result.add(title, "Similarity of the levels", caption, draw, rows)
    return result


def _draw(cka_JK: Tensor, ends: Sequence[str], theme: Theme, title: str) -> Figure:
    """The CKA of every two states, the first network's down; `ends` are those of the labels of both axes."""
    values = to_array(cka_JK)
    figure = new_figure(theme, 4.4, 0.7 + 3.4 * min(1.6, max(0.6, values.shape[0] / values.shape[1])), DPI)
    axis = figure.add_subplot()
    prepare(axis, theme, title)
    axis.grid(False)
    drawn = axis.imshow(values, cmap=heat(theme), vmin=0, vmax=1, origin="lower", interpolation="nearest")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(8, integer=True))
    first, second = (f"levels passed{end}".replace("$", r"\$") for end in ends)
    axis.set_xlabel(second, color=theme.pale, fontsize=8)
    axis.set_ylabel(first, color=theme.pale, fontsize=8)
    add_bar(figure, axis, drawn, theme, "linear CKA")
    return figure
