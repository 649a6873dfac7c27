"""Change of the features of images from one network to another, by level."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure

from vitray.inspection.changes import FeatureChange, feature_changes, tokens_of
from vitray.inspection.report.drawings import DPI, FigureResult, Rows, draw_band, number_levels, prepare, to_array
from vitray.inspection.report.subjects import Subject, View
from vitray.inspection.tokens import has_levels
from vitray.pages.plotting import Theme, new_figure

PROSE = (
    "Above: the length of the change of an image's tokens over their length in the first network. Below: the cosine"
    " between both networks' tokens, averaged over tokens. Medians over images, in bands from the 5th to the 95th"
    " percentile, before the first level (0) and after each."
)


def measure(view: View) -> FeatureChange | None:
    """Return the change from the first network to this one over a chunk; None for the first, or with other tokens."""
    base = view.base
    if base is None or tokens_of(base.network, base.images) != tokens_of(view.network, view.images):
        return None
    if not has_levels(view.network):
        return None
    changes = feature_changes(base.network, view.network, base.images, view.images)
    return FeatureChange(changes.relative.cpu(), changes.cosine.cpu())


def make(subjects: Sequence[Subject], result: FigureResult) -> FigureResult:
    """Return the result with a drawing and a table of the change, or the reason why there is none."""
    base, other = subjects
    parts: Sequence[FeatureChange] = other.measured["features"]
    if not parts:
        first, second = (tokens_of(each.network, torch.empty(0, 3, *each.spec.size)) for each in subjects)
        reason = f"{base.name} has {first}, {other.name} has {second}: only the similarity of levels compares them."
        if first == second and not has_levels(other.network):
            reason = f"{base.name} and {other.name} are not in this figure: they have no numbered stages."
        return result.without(reason)
    change = FeatureChange(*(torch.cat(each, dim=1) for each in zip(*parts, strict=True)))
    names = [f"{name}_{part}" for name in ("relative_change", "cosine") for part in ("p5", "median", "p95")]
    rows: Rows = [["levels_passed", *names]]
    for state, both in enumerate(zip(*map(to_array, change), strict=True)):
        rows.append([state, *(value for each in both for value in np.percentile(each, [5, 50, 95]).tolist())])
    caption = f"{other.over(change.relative.shape[1])}."
    result.add(f"{base.name} → {other.name}", "Change of the features", caption, partial(_draw, change), rows)
    return result


def _draw(change: FeatureChange, theme: Theme, title: str) -> Figure:
    """The relative change of tokens by level, and the cosine between old and new ones, in bands over images."""
    figure = new_figure(theme, 4.8, 4.2, DPI)
    upper, lower = figure.subplots(2, 1, sharex=True)
    prepare(upper, theme, title, "relative change")
    prepare(lower, theme, "", "cosine")
    number_levels(lower, theme)
    draw_band(upper, to_array(change.relative), theme.series[0], "")
    draw_band(lower, to_array(change.cosine), theme.series[1], "")
    upper.set_ylim(bottom=0)
    return figure
