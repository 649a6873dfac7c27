"""The figures of features: similarity of levels, lengths of tokens, and the change of features by level."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vitray.inspection.changes import FeatureChange
from vitray.inspection.report.drawings import DPI
from vitray.inspection.report.heat_maps import add_bar, add_legend, draw_band, heat, number_levels, prepare, to_array
from vitray.inspection.tokens import TokenNorms
from vitray.plotting import Theme, new_figure

# Outliers that are drawn as dots at each state, the longest; the rest is counted.
MOST_DOTS = 200


def draw_similarity(cka_JK: Tensor, theme: Theme, title: str, names: tuple[str, str] | None = None) -> Figure:
    """Draw the CKA of every two states, the first network's down; `names` are those of two networks."""
    values = to_array(cka_JK)
    figure = new_figure(theme, 4.4, 0.7 + 3.4 * min(1.6, max(0.6, values.shape[0] / values.shape[1])), DPI)
    axis = figure.add_subplot()
    prepare(axis, theme, title)
    axis.grid(False)
    drawn = axis.imshow(values, cmap=heat(theme), vmin=0, vmax=1, origin="lower", interpolation="nearest")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(8, integer=True))
    first, second = ("", "") if names is None else (f", {name}".replace("$", r"\$") for name in names)
    axis.set_xlabel(f"levels passed{second}", color=theme.pale, fontsize=8)
    axis.set_ylabel(f"levels passed{first}", color=theme.pale, fontsize=8)
    add_bar(figure, axis, drawn, theme, "linear CKA")
    return figure


def draw_token_norms(norms: TokenNorms, theme: Theme, title: str) -> Figure:
    """Draw the length of tokens by level: patches and the class token in bands, patches that stand out as dots."""
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


def draw_feature_changes(change: FeatureChange, theme: Theme, title: str) -> Figure:
    """Draw the relative change of tokens by level, and the cosine between old and new ones, in bands over images."""
    figure = new_figure(theme, 4.8, 4.2, DPI)
    upper, lower = figure.subplots(2, 1, sharex=True)
    prepare(upper, theme, title, "relative change")
    prepare(lower, theme, "", "cosine")
    number_levels(lower, theme)
    draw_band(upper, to_array(change.relative), theme.series[0], "")
    draw_band(lower, to_array(change.cosine), theme.series[1], "")
    upper.set_ylim(bottom=0)
    return figure
