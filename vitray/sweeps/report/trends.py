"""Line charts: over blocks, branches, learning rates, and the steps of training.

Except for learning curves, only finished trials count. A marker is a group's mean, a ring a seed, a bar one standard
deviation.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from vitray.pages.plotting import Theme
from vitray.sweeps.report.drawing import Drawing, Label, column_axis, draw_seeds, label_ends, listed, plain_ticks
from vitray.sweeps.report.groups import Group, Results
from vitray.sweeps.report.labels import LR, canonical, label_of, varied_settings
from vitray.sweeps.report.trials import TrialResult

MOST_COLORS = 6
MARKERS = ("o", "s", "^", "D", "v", "P")
# A curve of more than MANY points is drawn as its running mean over 1 / PART of them.
MANY, PART = 60, 25


class Line(NamedTuple):
    """Groups by their place on the x axis."""

    label: str
    points: list[tuple[float, Group]]


class LineChart(NamedTuple):
    """Lines of scores over one setting."""

    name: str
    title: str
    x_label: str
    caption: str
    lines: list[Line]
    failed: Sequence[float] = ()
    """Places where a trial failed."""


# ---- depth and branches ----------------------------------------------------------------------------------------------


def draw_blocks(results: Results) -> list[Drawing]:
    """Draw sequential and parallel networks of each family over their blocks, as Three things does in Fig. 3."""
    drawings = []
    for family, cells in results.families.items():
        lines: dict[int, list[tuple[float, Group]]] = defaultdict(list)
        for (depth, branches), group in cells.items():
            lines[branches].append((depth * branches, group))
        if len(lines) < 2 or len({blocks for points in lines.values() for blocks, _ in points}) < 2:
            continue
        named = [
            Line("sequential" if branches == 1 else f"{branches} branches", lines[branches])
            for branches in sorted(lines)
        ]
        caption = "Blocks are depth times branches; points above each other cost the same." + results.families_note
        title = f"{family}: {results.measure.title}"
        chart = LineChart(f"blocks_{len(drawings)}", title, "blocks in all", caption, named)
        drawings.append(_draw_lines(results, chart))
    return drawings


def draw_branches(results: Results) -> Drawing | None:
    """Draw networks of equal size over their branches, as Three things does in Fig. 1."""
    lines: dict[tuple[str, int], list[tuple[float, Group]]] = defaultdict(list)
    for family, cells in results.families.items():
        for (depth, branches), group in cells.items():
            lines[family, depth * branches].append((branches, group))
    alone = len(results.families) == 1
    named = [
        Line(f"{blocks} blocks" if alone else f"{family.removeprefix('ViT-')}, {blocks} blocks", lines[family, blocks])
        for family, blocks in sorted(lines)
        if len(lines[family, blocks]) > 1
    ]
    if not named:
        return None
    caption = "A line is one size: the same blocks in sequence or in parallel." + results.families_note
    return _draw_lines(results, LineChart("branches", results.measure.title, "parallel branches", caption, named))


# ---- learning rates --------------------------------------------------------------------------------------------------


def draw_rates(results: Results) -> Drawing | None:
    """Draw the goal over the learning rate, a line for each combination of the other settings."""
    lines: dict[str, Line] = {}
    others = {path: values for path, values in varied_settings(results.sweep.trials).items() if path != LR}
    for group in results.scored:  # so the lines come in the order of their best groups
        if _is_rate(group.settings.get(LR)):
            rest = {path: value for path, value in group.settings.items() if path != LR}
            line = lines.setdefault(canonical(rest), Line(label_of(rest, others) if others else "", []))
            line.points.append((group.settings[LR], group))
    named = [line for line in lines.values() if len(line.points) > 1]
    if not named:
        return None
    failed: list[Any] = [trial.settings.get(LR) for trial in results.sweep.trials if trial.state == "failed"]
    rates = sorted({rate for rate in failed if _is_rate(rate)})
    caption = " ".join(_edge_note(line, results) for line in named[:MOST_COLORS])
    caption += " A cross at the bottom marks the rate of a failed trial." if rates else ""
    return _draw_lines(results, LineChart("lr", results.measure.title, "learning rate", caption, named, rates))


def _edge_note(line: Line, results: Results) -> str:
    """A sentence if the best rate is the lowest or the highest one."""
    rates = sorted(rate for rate, _ in line.points)
    best, _ = min(line.points, key=lambda point: results.measure.rank(point[1].mean))
    if best not in (rates[0], rates[-1]):
        return ""
    extreme, further = ("highest", "higher") if best == rates[-1] else ("lowest", "lower")
    name = f"of {line.label} " if line.label else ""
    return f"The best rate {name}is {best:g}, the {extreme} that finished: a {further} one may be better."


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


# ---- lines -----------------------------------------------------------------------------------------------------------


def _draw_lines(results: Results, chart: LineChart) -> Drawing:
    measure, log = results.measure, chart.name == "lr"
    lines = [Line(label, sorted(points, key=lambda point: point[0])) for label, points in chart.lines]
    places = sorted({x for line in lines for x, _ in line.points} | set(chart.failed))

    def draw(theme: Theme) -> Figure:
        figure, axis = column_axis(theme, 3.0, chart.title, chart.x_label)
        if log:
            axis.set_xscale("log")
        labels = []
        for place, line in reversed(list(enumerate(lines))):  # the first line on top
            color = theme.series[place] if place < MOST_COLORS else theme.rest
            means = [measure.scaled(group.mean) for _, group in line.points]
            marker = MARKERS[place % len(MARKERS)]
            axis.plot([x for x, _ in line.points], means, color=color, marker=marker, ms=5, linewidth=1.5)
            for x, group in line.points:
                draw_seeds(axis, group, measure, x, color, upright=True)
            if line.label and place < MOST_COLORS:
                labels.append(Label(line.points[-1][0], means[-1], line.label, color))
        axis.margins(x=0.06, y=0.1)
        if chart.failed:
            bottom, heights = axis.get_xaxis_transform(), [0.04] * len(chart.failed)
            axis.plot(chart.failed, heights, "x", color=theme.bad, transform=bottom, markersize=6, mew=1.6)
        if len(places) > 7:  # too many ticks to read
            axis.xaxis.set_major_locator(LogLocator() if log else MaxNLocator(6))
        else:
            axis.set_xticks(places)
        plain_ticks(axis.xaxis)
        label_ends(figure, axis, labels, theme)
        return figure

    scores = [f"{line.label} {x:g}: {results.score_text(group)}".strip() for line in lines for x, group in line.points]
    several = any(len(group.scores) > 1 for line in lines for _, group in line.points)
    caption = [" ".join(chart.caption.split())]
    caption.append("Rings are seeds, bars one standard deviation." if several else "One seed each.")
    if len(lines) > MOST_COLORS:
        caption.append(f"{MOST_COLORS} of {len(lines)} lines have labels, the others are gray.")
    alt = f"{chart.title} over {chart.x_label}: {listed(scores)}"
    return Drawing(chart.name, alt, " ".join(filter(None, caption)), draw)


# ---- learning curves -------------------------------------------------------------------------------------------------


def draw_curves(results: Results, key: str) -> Drawing | None:
    """Draw a metric over the steps, a line for each trial in the color of its group."""
    groups = [
        (group.label, curves)
        for group in results.groups
        if (curves := [(trial, points) for trial in group.trials if len(points := finite(trial, key)) > 1])
    ]
    if not groups:
        return None
    is_goal = key == results.sweep.goal
    scaled = results.measure.scaled if is_goal else float
    log = key.endswith("loss") and all(value > 0 for _, curves in groups for _, points in curves for _, value in points)

    def draw(theme: Theme) -> Figure:
        title = (results.measure.title if is_goal else key) + ", logarithmic" * log
        figure, axis = column_axis(theme, 3.0, title, "step")
        labels = []
        for place, (label, curves) in reversed(list(enumerate(groups))):  # the best on top
            color = theme.series[place] if place < MOST_COLORS else theme.rest
            ends = []
            for trial, points in curves:
                steps, values = smooth(points)
                style = ":" if trial.state in ("failed", "stopped early") else "-"
                axis.plot(steps, [scaled(value) for value in values], style, color=color, linewidth=1.2)
                ends.append((steps[-1], scaled(values[-1])))
            if place < MOST_COLORS and len(groups) > 1:
                x, y = max(ends)
                labels.append(Label(x, y, label, color))
        axis.margins(x=0.02)
        if log:  # which shows late differences
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            plain_ticks(axis.yaxis)
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        label_ends(figure, axis, labels, theme)
        return figure

    shown = [curve for _, curves in groups for curve in curves]
    name, alt = f"curve_{'goal' if is_goal else 'loss'}", f"{key} of {len(shown)} trials by step"
    return Drawing(name, alt, _curves_caption(shown, len(groups)), draw)


def _curves_caption(shown: Sequence[tuple[TrialResult, list[tuple[int, float]]]], groups: int) -> str:
    caption = "A line is a trial, a color a group."
    if any(trial.state in ("failed", "stopped early") for trial, _ in shown):
        caption += " Dotted: failed or stopped early."
    if groups > MOST_COLORS:
        caption += f" The best {MOST_COLORS} groups have labels."
    if any(len(points) > MANY for _, points in shown):
        caption += f" Smoothed by a running mean over {100 // PART} % of the points."
    return caption


def finite(trial: TrialResult, key: str) -> list[tuple[int, float]]:
    """Return the finite points of a trial's curve, by step."""
    return sorted((step, value) for step, value in trial.curves.get(key, []) if math.isfinite(value))


def smooth(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Return steps and values; of many points, their running mean."""
    steps, values = np.array(points, dtype=float).T
    if len(values) > MANY:
        window = len(values) // PART
        values = np.convolve(values, np.full(window, 1 / window), "valid")
        steps = steps[window // 2 :][: len(values)]
    return steps.tolist(), values.tolist()
