"""Drawings of the report: figures as wide as a column, and labels placed beside their lines and points."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullFormatter
from matplotlib.transforms import Bbox

from vitray.pages.plotting import Theme, missing_glyphs, new_figure, one_line, style_axis
from vitray.sweeps.report.results import Group, Measure

# Inches of a column of the page, and the pixels of each, which suit screens of high resolution.
WIDTH, DPI = 4.0, 220
# Penalty for a label nearer to another point than to its own, in covered square pixels.
FAR = 10_000


class Drawing(NamedTuple):
    """A picture: its file name, its texts, and a function that draws it in a theme."""

    name: str
    alt: str
    caption: str
    draw: Callable[[Theme], Figure]


class Label(NamedTuple):
    """Text beside a point, in its color; an optional label is dropped if it does not fit."""

    x: float
    y: float
    text: str
    color: str
    needed: bool = True


def column_axis(theme: Theme, height: float, title: str, x_label: str = "") -> tuple[Figure, Axes]:
    """Return a figure as wide as a column, and its styled axes."""
    figure = new_figure(theme, WIDTH, height, DPI)
    axis = figure.add_subplot()
    style_axis(axis, theme)
    axis.set_title(one_line(title, 52), loc="left", color=theme.ink, fontsize=9.5)
    axis.set_xlabel(one_line(x_label, 60), color=theme.pale, fontsize=8)
    return figure, axis


def plain_ticks(axis: Axis) -> None:
    """Write the numbers of a logarithmic axis like others, and only at its major ticks."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
    axis.grid(False, which="minor")


def draw_seeds(axis: Axes, group: Group, measure: Measure, at: float, color: str, upright: bool) -> None:
    """Draw a bar of one standard deviation and a ring for each seed, if there are several; scores run up or across."""
    if group.sd is None:
        return
    size = 4 if upright else 5
    bar = {"color": color, "linewidth": size, "alpha": 0.3, "solid_capstyle": "butt"}
    rings = {"marker": "o", "linestyle": "", "mfc": "none", "mec": color, "markersize": size, "mew": size / 5}
    for values, style in (((group.mean - group.sd, group.mean + group.sd), bar), (group.scores.values(), rings)):
        scores = [measure.scaled(value) for value in values]
        places = [at] * len(scores)
        axis.plot(*((places, scores) if upright else (scores, places)), **style)


def listed(items: Sequence[str], most: int = 8) -> str:
    """Return the first items as text, and the number of the rest."""
    rest = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + rest


def label_ends(figure: Figure, axis: Axes, labels: Sequence[Label], theme: Theme) -> None:
    """Label lines at the right edge, each as near to the height of its end as the others allow."""
    limits = axis.get_xlim(), axis.get_ylim()
    at = axis.transAxes
    texts = [
        axis.text(1.03, 0.5, one_line(label.text, 24), color=label.color, fontsize=8, va="center", transform=at)
        for label in labels
    ]
    _lay_out(figure)
    axis.set(xlim=limits[0], ylim=limits[1])
    line = 8 * 1.25 / 72 * figure.dpi / axis.bbox.height
    ends = [at.inverted().transform(axis.transData.transform((label.x, label.y))) for label in labels]
    heights = spread_out([float(end[1]) for end in ends], line)
    for text, (across, up), height in zip(texts, ends, heights, strict=True):
        text.set_y(height)
        lead = Line2D([across, 1.02], [up, height], color=theme.grid, lw=0.8, clip_on=False, zorder=0.5, transform=at)
        lead.set_in_layout(False)
        axis.add_artist(lead)


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """Return heights moved as little as puts neighbors `gap` apart, in the same order; within 0 and 1 if all fit."""
    from scipy.optimize import isotonic_regression  # loads slowly

    if not heights:
        return []
    order = np.argsort(heights, kind="stable")
    offsets = gap * np.arange(len(heights))
    bases = isotonic_regression(np.array(heights)[order] - offsets).x
    spread = np.empty(len(heights))
    spread[order] = np.clip(bases, 0.0, max(0.0, 1 - offsets[-1])) + offsets
    return spread.tolist()


def label_points(
    figure: Figure, axis: Axes, labels: Sequence[Label], theme: Theme, lines: Sequence[Bbox], upwards: bool
) -> None:
    """Label points where there is room beside them and off some lines; the needed labels in any case.

    `upwards`: higher values are better, so the front is the upper left edge of the points.
    """
    _lay_out(figure)
    places = [tuple(map(float, axis.transData.transform((label.x, label.y)))) for label in labels]
    taken = [Bbox.from_bounds(x - 9, y - 9, 18, 18) for x, y in places]
    taken += [line.transformed(axis.transData).padded(3) for line in lines]
    for label, own in sorted(zip(labels, places, strict=True), key=lambda each: not each[0].needed):
        halo = [withStroke(linewidth=2, foreground=theme.paper)]
        text = axis.text(label.x, label.y, one_line(label.text, 24), color=label.color, fontsize=7.5, path_effects=halo)
        text.set_in_layout(False)
        with missing_glyphs():
            size = text.get_window_extent()
        # The outer side of the front is free for its labels; other points have theirs on the inner side.
        boxes = _around(own, size.width, size.height, label.needed, label.needed == upwards)
        ranked = [(_overlap(box, taken, axis.bbox) + FAR * _is_misleading(box, own, places), box) for box in boxes]
        least, box = min(ranked, key=lambda each: each[0])
        if not label.needed and least > 0:
            text.remove()
            continue
        taken.append(box)
        text.set(position=axis.transData.inverted().transform(box.p0), va="bottom")


def _is_misleading(box: Bbox, own: tuple[float, ...], places: Sequence[tuple[float, ...]]) -> bool:
    """Whether a label would stand nearer to another point than to its own."""

    def away(place: tuple[float, ...]) -> float:
        return math.hypot(*(max(low - at, 0, at - high) for low, at, high in zip(box.p0, place, box.p1, strict=True)))

    return any(away(place) < away(own) for place in places)


def _around(at: tuple[float, ...], width: float, height: float, left: bool, above: bool) -> Iterator[Bbox]:
    """Possible places of a label, in pixels: the preferred corner first, beside the point last."""
    (x, y), near, far = at, 12, 20
    sides, rows = [-near - width, -width / 2, near], [near, -near - height]
    for up in rows if above else rows[::-1]:
        for across in sides if left else sides[::-1]:
            yield Bbox.from_bounds(x + across, y + up, width, height)
    for across in (far, -far - width):
        yield Bbox.from_bounds(x + across, y - height / 2, width, height)


def _overlap(box: Bbox, taken: Sequence[Bbox], room: Bbox) -> float:
    """Square pixels of a box that cover others, plus ten times those outside the room."""
    shared = [both.width * both.height for other in taken if (both := Bbox.intersection(box, other))]
    inside = Bbox.intersection(box, room)
    outside = box.width * box.height - (inside.width * inside.height if inside else 0)
    return round(sum(shared) + 10 * outside, 3)


def _lay_out(figure: Figure) -> None:
    """Make the layout final, so that pixels can be measured."""
    with missing_glyphs():
        figure.draw_without_rendering()
