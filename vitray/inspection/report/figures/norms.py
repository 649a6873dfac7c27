"""Lengths of tokens by level: patches, the class token, and the patches that stand out."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from vitray.inspection.report.drawings import (
    DPI,
    FigureResult,
    Rows,
    add_legend,
    draw_band,
    number_levels,
    prepare,
    to_array,
)
from vitray.inspection.report.subjects import Subject, View
from vitray.inspection.tokens import OUTLIER_FACTOR, TokenNorms, join_token_norms, token_norms
from vitray.pages.plotting import Theme, new_figure

# Outliers that are drawn as dots at each state, the longest; the rest is counted.
MOST_DOTS = 200
PROSE = (
    "The length of the tokens before the first level (0) and after each: medians, in bands from the 5th to the 95th"
    f" percentile over patches and images. A patch stands out if it is longer than {OUTLIER_FACTOR:g} times the median"
    " of its level; large networks use such patches as registers (Darcet et al., 2024)."
)


def measure(view: View) -> TokenNorms:
    """Return the lengths of the tokens of a chunk."""
    norms = token_norms(view.vit, view.images)
    token_SB = None if norms.class_token is None else norms.class_token.cpu()
    return TokenNorms(norms.patches.cpu(), token_SB, norms.median.cpu(), norms.is_outlier.cpu())


def make(subjects: Sequence[Subject], result: FigureResult) -> FigureResult:
    """Return the result with a drawing and a table of each network."""
    for subject in subjects:
        norms = join_token_norms(subject.measured["norms"])
        _, images, patches = norms.patches.shape
        outliers = int(norms.is_outlier[-1].sum())
        caption = (
            f"{subject.over(images)}, {patches:,} patches each. After the last level {outliers:,} of"
            f" {images * patches:,} patches stand out, in {int(norms.is_outlier[-1].any(dim=1).sum()):,} images."
        )
        heading = ["levels_passed", "p5", "median", "p95", "longest", "class_token_median", "outliers", "patches"]
        rows: Rows = [heading]
        for state, patches_BM in enumerate(to_array(norms.patches)):
            token = None if norms.class_token is None else float(np.median(norms.class_token[state].cpu().numpy()))
            numbers = [*np.percentile(patches_BM, [5, 50, 95]).tolist(), float(patches_BM.max())]
            rows.append([state, *numbers, token, int(norms.is_outlier[state].sum()), patches_BM.size])
        result.add(subject.name, "Lengths of the tokens by level", caption, partial(_draw, norms), rows)
    return result


def _draw(norms: TokenNorms, theme: Theme, title: str) -> Figure:
    """Patches and the class token in bands, patches that stand out as dots."""
    figure = new_figure(theme, 4.8, 3.4, DPI)
    axis = figure.add_subplot()
    prepare(axis, theme, title, "length of a token")
    number_levels(axis, theme)
    patches_SX = to_array(norms.patches.flatten(1))
    draw_band(axis, patches_SX, theme.series[0], "patches")
    if norms.class_token is not None:
        draw_band(axis, to_array(norms.class_token), theme.series[1], "class token")
    is_outlier_SX = norms.is_outlier.flatten(1).cpu().numpy()
    for state, is_outlier in enumerate(is_outlier_SX):
        longest = np.sort(patches_SX[state][is_outlier])[-MOST_DOTS:]
        label = "patches that stand out" if state == int(is_outlier_SX.any(axis=1).argmax()) and len(longest) else None
        places = np.full(len(longest), state)
        axis.plot(places, longest, ".", color=theme.bad, markersize=6, alpha=0.6, markeredgewidth=0, label=label)
    axis.set_yscale("log")
    share = f"{is_outlier_SX[-1].mean():.2%} of patches stand out after the last level"
    axis.set_title(share, loc="right", color=theme.pale, fontsize=7)
    add_legend(axis, theme)
    return figure
