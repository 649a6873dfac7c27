"""The figures of attention: maps over images, distance and entropy by head and level."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitray.inspection.attention_distance import AttentionSpread, patch_distances
from vitray.inspection.report.drawings import DPI, Drawing, FigureResult, Table, file_name
from vitray.inspection.report.heat_maps import add_legend, number_levels, prepare
from vitray.inspection.report.subjects import Subject
from vitray.plotting import Theme, new_figure

PROSE = (
    "A dot is a head: the mean over queries and images, and the thin line through it is one standard deviation over"
    " images. The line is the mean of the heads of a level; the dashed line is attention to all alike. Distance is that"
    " between a query patch and the patches that it attends to, without the tokens before the patches; entropy is that"
    " of the attention to all tokens."
)


class _Spread(NamedTuple):
    """One value of each head and image (LPHB) of a network, with its level numbers and its uniform value."""

    name: str
    levels: Sequence[int]
    values: np.ndarray
    uniform: float


def distance_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return attention distance (ViT paper, figures 7 and 11) and entropy by head and level."""
    measured = [(subject, _joined(subject.measured["distance"])) for subject in subjects]
    top = max(float(spread.distance.mean(-1).max()) for _, spread in measured)
    drawings, rows = [], [_header("distance_pixels", "renormalized_pixels", "entropy_nats")]
    for subject, spread in measured:
        distances_MM, prefix = patch_distances(subject.vit.model.grid, subject.vit.stem.patch), subject.vit.num_prefix
        tokens = len(distances_MM) + prefix
        # Each query has its share of the class token too, and the distances do not count it.
        far, most = distances_MM.mean().item() * len(distances_MM) / tokens, math.log(tokens)
        caption = f"{subject.name}: {_circumstances(subject, spread)}; uniform attention has"
        values = _Spread(subject.name, _levels(subject), spread.distance.numpy(), far)
        texts = "attention distance, pixels", f"{caption} {far:.1f} pixels."
        drawings.append(_by_level(values, texts, max(top, far)))
        entropies = values._replace(values=spread.entropy.numpy(), uniform=most)
        drawings.append(_by_level(entropies, ("entropy of attention, nats", f"{caption} {most:.2f} nats."), most))
        rows += _rows(values, *spread)
    return FigureResult("distance", "Attention distance and entropy", PROSE, drawings, [Table("distance", rows)])


def _joined(parts: Sequence[AttentionSpread]) -> AttentionSpread:
    return AttentionSpread(*(torch.cat(tensors, dim=-1) for tensors in zip(*parts, strict=True)))


def _levels(subject: Subject) -> Sequence[int]:
    return range(len(subject.vit.blocks)) if subject.levels is None else subject.levels


def _circumstances(subject: Subject, spread: AttentionSpread) -> str:
    _, branches, heads, images = spread.distance.shape
    of_branches = f" in each of {branches} branches" if branches > 1 else ""
    return f"{subject.over(images)}, {heads} heads{of_branches}"


def _header(*names: str) -> Sequence[Any]:
    parts = [f"{name}{end}" for name in names for end in ("", "_sd_over_images")]
    return ["model", "level", "branch", "head", "images", *parts]


def _rows(spread: _Spread, *tensors: torch.Tensor) -> list[Sequence[Any]]:
    """A row for each head: the mean and the standard deviation over images of each value."""
    _, branches, heads, images = spread.values.shape
    summaries = [part for values in tensors for part in (values.mean(-1), _deviation(values))]
    return [
        [spread.name, number, branch + 1, head + 1, images]
        + [summary[place, branch, head].item() for summary in summaries]
        for place, number in enumerate(spread.levels)
        for branch in range(branches)
        for head in range(heads)
    ]


def _deviation(values_LPHB: torch.Tensor) -> torch.Tensor:
    """The standard deviation over images; nan for a single one."""
    return values_LPHB.std(-1) if values_LPHB.shape[-1] > 1 else torch.full_like(values_LPHB[..., 0], torch.nan)


def _by_level(spread: _Spread, texts: tuple[str, str], top: float) -> Drawing:
    """Dots by head and a line by level, in the color of each branch."""
    label, caption = texts
    measured = label.partition(",")[0]
    name = file_name(measured.replace(" ", "_"), spread.name)
    alt = f"{measured.capitalize()} by head and level of {spread.name}"
    return Drawing(name, alt, caption, partial(_draw, spread, label=label, top=top))


def _draw(spread: _Spread, theme: Theme, label: str, top: float) -> Figure:
    figure = new_figure(theme, 5.2, 3.6, DPI)
    axis = figure.add_subplot()
    prepare(axis, theme, spread.name, label)
    number_levels(axis, theme, "level")
    for branch in range(spread.values.shape[1]):
        _draw_branch(axis, spread, branch, theme)
    axis.axhline(spread.uniform, color=theme.pale, linewidth=1, linestyle=(0, (4, 3)))
    axis.set(ylim=(0, 1.08 * top), xlim=(min(spread.levels) - 0.6, max(spread.levels) + 0.6))
    if spread.values.shape[1] > 1:
        add_legend(axis, theme)
    return figure


def _draw_branch(axis: Axes, spread: _Spread, branch: int, theme: Theme) -> None:
    values_LHB, branches = spread.values[:, branch], spread.values.shape[1]
    levels, color = np.array(spread.levels), theme.series[branch % len(theme.series)]
    places = levels + (branch - (branches - 1) / 2) * 0.22
    means_LH, deviations_LH = values_LHB.mean(-1), values_LHB.std(-1, ddof=min(1, values_LHB.shape[-1] - 1))
    for head in range(means_LH.shape[1]):
        low, high = means_LH[:, head] - deviations_LH[:, head], means_LH[:, head] + deviations_LH[:, head]
        axis.vlines(places, low, high, color=color, linewidth=0.7, alpha=0.45)
        axis.plot(places, means_LH[:, head], "o", color=color, markersize=3.6, markeredgewidth=0)
    axis.plot(places, means_LH.mean(1), color=color, linewidth=1.4, label=f"branch {branch + 1}")
