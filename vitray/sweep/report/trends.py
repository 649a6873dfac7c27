"""Pictures of lines: over blocks, over branches, over the learning rate, and over the steps of training.

But for the learning curves only finished trials count. A mark is a group's mean over its seeds, a ring a seed, a bar
one standard deviation.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from vitray.sweep.report.comparisons import of_its_best
from vitray.sweep.report.drawing import MARKS, Drawing, Label, Theme, dressed, label_ends, listed, new_figure
from vitray.sweep.report.groups import LR, Group, Results, label_of, spelled, varied_settings
from vitray.sweep.report.trials import Trial

MOST_COLOURS = 6
# Beyond so many points a curve is drawn as its running mean over a part of them.
MANY, PART = 60, 25


class Line(NamedTuple):
    """Groups of one kind by their place on the axis, in order."""

    label: str
    groups: list[tuple[float, Group]]


# ---- depth and branches ----------------------------------------------------------------------------------------------


def draw_blocks(results: Results) -> list[Drawing]:
    """Seed 000, Fig. 3: sequential and parallel networks over their number of blocks, for each family of networks."""
    drawings = []
    for family, cells in results.families.items():
        lines: dict[int, list[tuple[float, Group]]] = defaultdict(list)
        for (depth, branches), group in cells.items():
            lines[branches].append((depth * branches, group))
        if len(lines) < 2 or len({blocks for line in lines.values() for blocks, _ in line}) < 2:
            continue
        named = [
            Line("sequential" if branches == 1 else f"{branches} branches", line)
            for branches, line in sorted(lines.items(), key=lambda item: item[0])
        ]
        caption = "Blocks are depth times branches: what stands above each other costs the same."
        name, title = f"blocks_{len(drawings)}", f"{family}: {results.measure.title}"
        drawings.append(_lines(results, name, named, "blocks in all", caption + of_its_best(results), title))
    return drawings


def draw_branches(results: Results) -> Drawing | None:
    """Seed 000, Fig. 1: networks of one size over the number of their branches."""
    lines: dict[tuple[str, int], list[tuple[float, Group]]] = defaultdict(list)
    for family, cells in results.families.items():
        for (depth, branches), group in cells.items():
            lines[family, depth * branches].append((branches, group))
    alone = len(results.families) == 1
    named = [
        Line(f"{blocks} blocks" if alone else f"{family.removeprefix('ViT-')}, {blocks} blocks", line)
        for (family, blocks), line in sorted(lines.items(), key=lambda item: item[0])
        if len(line) > 1
    ]
    if not named:
        return None
    caption = "A line is of one size: the same blocks in sequence, or side by side." + of_its_best(results)
    return _lines(results, "branches", named, "parallel branches", caption, results.measure.title)


# ---- learning rates --------------------------------------------------------------------------------------------------


def draw_rates(results: Results) -> Drawing | None:
    """The goal over the learning rate, a line for each choice of the other settings."""
    lines: dict[str, Line] = {}
    others = {path: values for path, values in varied_settings(results.sweep.trials).items() if path != LR}
    for group in results.scored:  # the lines come as their best groups do
        if _is_rate(group.settings.get(LR)):
            same = {path: value for path, value in group.settings.items() if path != LR}
            line = lines.setdefault(spelled(same), Line(label_of(same, others) * bool(others), []))
            line.groups.append((group.settings[LR], group))
    named = [line for line in lines.values() if len(line.groups) > 1]
    if not named:
        return None
    failed: list[Any] = [trial.settings.get(LR) for trial in results.sweep.trials if trial.state == "failed"]
    rates = sorted({rate for rate in failed if _is_rate(rate)})
    caption = " ".join(_at_an_edge(line, results) for line in named[:MOST_COLOURS])
    caption += " A cross at the bottom is a rate at which a trial failed." if rates else ""
    return _lines(results, "lr", named, "learning rate", caption, results.measure.title, rates)


def _at_an_edge(line: Line, results: Results) -> str:
    """A sentence where the best rate is the last one tried on its side."""
    rates = sorted(rate for rate, _ in line.groups)
    best, _ = min(line.groups, key=lambda point: results.measure.rank(point[1].mean))
    if best not in (rates[0], rates[-1]):
        return ""
    ends = ("highest", "higher") if best == rates[-1] else ("lowest", "lower")
    name = f"of {line.label} " if line.label else ""
    return f"The best rate {name}is {best:g}, the {ends[0]} that finished: a {ends[1]} one may be better."


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


# ---- lines -----------------------------------------------------------------------------------------------------------


def _lines(
    results: Results,
    name: str,
    lines: Sequence[Line],
    across: str,
    caption: str,
    title: str,
    crosses: Sequence[float] = (),
) -> Drawing:
    measure, log = results.measure, name == "lr"
    lines = [Line(label, sorted(line, key=lambda point: point[0])) for label, line in lines]
    places = sorted({x for line in lines for x, _ in line.groups} | set(crosses))

    def draw(theme: Theme) -> Figure:
        figure = new_figure(theme, 3.0)
        axis = dressed(figure, theme, title, across)
        if log:
            axis.set_xscale("log")
        labels = []
        for place, line in reversed(list(enumerate(lines))):  # the first over the others
            colour = theme.series[place] if place < MOST_COLOURS else theme.rest
            _draw_line(axis, line, results, colour, MARKS[place % len(MARKS)])
            x, last = line.groups[-1]
            if line.label and place < MOST_COLOURS:
                labels.append(Label(x, measure.scaled(last.mean), line.label, colour))
        axis.margins(x=0.06, y=0.1)
        if crosses:
            at = axis.get_xaxis_transform()
            axis.plot(crosses, [0.04] * len(crosses), "x", color=theme.bad, transform=at, markersize=6, mew=1.6)
        _tick(axis, places, log)
        label_ends(figure, axis, labels, theme)
        return figure

    said = [f"{line.label} {x:g}: {results.said(group)}".strip() for line in lines for x, group in line.groups]
    several = any(len(group.scores) > 1 for line in lines for _, group in line.groups)
    parts = [
        " ".join(caption.split()),
        "Rings are seeds, bars one standard deviation." if several else "One seed each.",
    ]
    if len(lines) > MOST_COLOURS:
        parts.append(f"{MOST_COLOURS} of {len(lines)} lines are named, the others grey.")
    return Drawing(name, f"{title} over {across}: {listed(said)}", " ".join(filter(None, parts)), draw)


def _draw_line(axis: Axes, line: Line, results: Results, colour: str, mark: str) -> None:
    scaled = results.measure.scaled
    places = [x for x, _ in line.groups]
    axis.plot(places, [scaled(group.mean) for _, group in line.groups], color=colour, marker=mark, ms=5, linewidth=1.5)
    for x, group in line.groups:
        if group.sd is not None:
            ends = [scaled(group.mean - group.sd), scaled(group.mean + group.sd)]
            axis.plot([x, x], ends, color=colour, linewidth=4, alpha=0.3, solid_capstyle="butt")
            scores = [scaled(value) for value in group.scores.values()]
            axis.plot([x] * len(scores), scores, "o", mfc="none", mec=colour, markersize=4, mew=0.8)


def _tick(axis: Axes, places: Sequence[float], log: bool) -> None:
    """Ticks at what was tried, as long as they can be read."""
    if len(places) > 7:
        axis.xaxis.set_major_locator(LogLocator() if log else MaxNLocator(6))
    else:
        axis.set_xticks(places)
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.grid(False, which="minor")


# ---- learning curves -------------------------------------------------------------------------------------------------


def draw_curves(results: Results, key: str) -> Drawing | None:
    """A metric over the steps, a thin line for each trial in the colour of its group."""
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
        figure = new_figure(theme, 3.0)
        axis = dressed(figure, theme, (results.measure.title if is_goal else key) + ", logarithmic" * log, "step")
        labels = []
        for place, (label, curves) in reversed(list(enumerate(groups))):  # the best over the others
            colour = theme.series[place] if place < MOST_COLOURS else theme.rest
            ends = []
            for trial, points in curves:
                steps, values = smooth(points)
                style = ":" if trial.state in ("failed", "stopped early") else "-"
                axis.plot(steps, [scaled(value) for value in values], style, color=colour, linewidth=1.2)
                ends.append((steps[-1], scaled(values[-1])))
            if place < MOST_COLOURS and len(groups) > 1:
                x, y = max(ends)
                labels.append(Label(x, y, label, colour))
        axis.margins(x=0.02)
        if log:  # so that late differences show
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.grid(False, which="minor")
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
        label_ends(figure, axis, labels, theme)
        return figure

    shown = [curve for _, curves in groups for curve in curves]
    return Drawing(
        f"curve_{'goal' if is_goal else 'loss'}",
        f"{key} of {len(shown)} trials by step",
        _about_curves(shown, len(groups)),
        draw,
    )


def _about_curves(shown: Sequence[tuple[Trial, list[tuple[int, float]]]], groups: int) -> str:
    caption = "A line is a trial, a colour a group."
    if any(trial.state in ("failed", "stopped early") for trial, _ in shown):
        caption += " Dotted: failed or stopped early."
    if groups > MOST_COLOURS:
        caption += f" The best {MOST_COLOURS} groups are named."
    if any(len(points) > MANY for _, points in shown):
        caption += f" Smoothed by a running mean over {100 // PART} % of the points."
    return caption


def finite(trial: Trial, key: str) -> list[tuple[int, float]]:
    """A trial's curve in order, without what is no number."""
    return sorted((step, value) for step, value in trial.curves.get(key, []) if math.isfinite(value))


def smooth(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Steps and values, of many points as their running mean."""
    steps, values = np.array(points, dtype=float).T
    if len(values) > MANY:
        window = len(values) // PART
        values = np.convolve(values, np.full(window, 1 / window), "valid")
        steps = steps[window // 2 :][: len(values)]
    return steps.tolist(), values.tolist()
