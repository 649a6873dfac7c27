"""Attention distance (ViT paper, figures 7 and 11) and entropy by head and level.

Shapes: L levels, P branches, H heads, B images, M patches.
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure

from vitray.inspection.attention import AttentionSpread, attention_distances, patch_distances
from vitray.inspection.report.drawings import DPI, FigureResult, Rows, Table, add_legend, number_levels, prepare
from vitray.inspection.report.subjects import Subject, View
from vitray.pages.plotting import Theme, new_figure

PROSE = (
    "A dot is a head: the mean over queries and images, and the thin line through it is one standard deviation over"
    " images. The line is the mean of the heads of a level; the dashed line is attention to all alike. Distance is that"
    " between a query patch and the patches that it attends to, without the tokens before the patches; entropy is that"
    " of the attention to all tokens."
)


def measure(view: View) -> AttentionSpread:
    """Return the distance and the entropy of each head and image of a chunk."""
    return AttentionSpread(*(each.cpu() for each in attention_distances(view.vit, view.images, view.levels)))


def make(subjects: Sequence[Subject], result: FigureResult) -> FigureResult:
    """Return the result with two drawings of each network and one table of all."""
    chunks = [subject.measured["distance"] for subject in subjects]
    spreads = [AttentionSpread(*(torch.cat(each, dim=-1) for each in zip(*parts, strict=True))) for parts in chunks]
    top = max(float(spread.distance.mean(-1).max()) for spread in spreads)
    names = ("distance_pixels", "renormalized_pixels", "entropy_nats")
    heading = [f"{name}{end}" for name in names for end in ("", "_sd_over_images")]
    rows: Rows = [["model", "level", "branch", "head", "images", *heading]]
    for subject, spread in zip(subjects, spreads, strict=True):
        levels = range(len(subject.vit.blocks)) if subject.levels is None else subject.levels
        distances_MM, prefix = patch_distances(subject.vit.model.grid, subject.vit.stem.patch), subject.vit.num_prefix
        tokens = len(distances_MM) + prefix
        # Each query has its share of the class token too, and the distances do not count it.
        far, most = distances_MM.mean().item() * len(distances_MM) / tokens, math.log(tokens)
        _, branches, heads, images = spread.distance.shape
        of_branches = f" in each of {branches} branches" if branches > 1 else ""
        caption = f"{subject.over(images)}, {heads} heads{of_branches}; uniform attention has"
        draw = partial(_draw, levels, spread.distance.numpy(), far, max(top, far), "attention distance, pixels")
        alt, text = "Attention distance by head and level", f"{caption} {far:.1f} pixels."
        result.add(subject.name, alt, text, draw, file="attention_distance")
        draw = partial(_draw, levels, spread.entropy.numpy(), most, most, "entropy of attention, nats")
        alt, text = "Entropy of attention by head and level", f"{caption} {most:.2f} nats."
        result.add(subject.name, alt, text, draw, file="entropy_of_attention")
        means = [values_LPHB.mean(-1) for values_LPHB in spread]
        # A single image has no deviation.
        deviations = [values.std(-1) if images > 1 else torch.full_like(values[..., 0], torch.nan) for values in spread]
        for place, branch, head in np.ndindex(len(levels), branches, heads):
            pairs = zip(means, deviations, strict=True)
            values = [each_LPH[place, branch, head].item() for pair in pairs for each_LPH in pair]
            rows.append([subject.name, levels[place], branch + 1, head + 1, images, *values])
    result.tables.append(Table("distance", rows))
    return result


def _draw(
    levels: Sequence[int], values_LPHB: np.ndarray, uniform: float, top: float, label: str, theme: Theme, title: str
) -> Figure:
    """Dots by head and a line by level, in the color of each branch."""
    figure = new_figure(theme, 5.2, 3.6, DPI)
    axis = figure.add_subplot()
    prepare(axis, theme, title, label)
    number_levels(axis, theme, "level")
    branches, images = values_LPHB.shape[1], values_LPHB.shape[3]
    for branch in range(branches):
        values_LHB, color = values_LPHB[:, branch], theme.series[branch % len(theme.series)]
        places = np.array(levels) + (branch - (branches - 1) / 2) * 0.22
        means_LH, deviations_LH = values_LHB.mean(-1), values_LHB.std(-1, ddof=min(1, images - 1))
        for head in range(means_LH.shape[1]):
            low, high = means_LH[:, head] - deviations_LH[:, head], means_LH[:, head] + deviations_LH[:, head]
            axis.vlines(places, low, high, color=color, linewidth=0.7, alpha=0.45)
            axis.plot(places, means_LH[:, head], "o", color=color, markersize=3.6, markeredgewidth=0)
        axis.plot(places, means_LH.mean(1), color=color, linewidth=1.4, label=f"branch {branch + 1}")
    axis.axhline(uniform, color=theme.pale, linewidth=1, linestyle=(0, (4, 3)))
    axis.set(ylim=(0, 1.08 * top), xlim=(min(levels) - 0.6, max(levels) + 0.6))
    if branches > 1:
        add_legend(axis, theme)
    return figure
