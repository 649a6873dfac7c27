"""The charts of a sweep: groups, differences, depth by branches, learning rates, curves and costs.

Except for learning curves, only finished trials count. A diamond or another marker is a group's mean over its seeds, a
ring a seed, a bar one standard deviation.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from matplotlib.transforms import Bbox

from vitray.pages.plotting import Theme, one_line
from vitray.sweeps.report.drawing import (
    Drawing,
    Label,
    column_axis,
    draw_seeds,
    label_ends,
    label_points,
    listed,
    plain_ticks,
)
from vitray.sweeps.report.results import (
    LR,
    Cost,
    Group,
    Pair,
    Results,
    TrialResult,
    canonical,
    label_of,
    pareto_front,
    varied_settings,
)

MOST_ROWS = 24
# Ratio of the largest to the smallest cost above which the axis is logarithmic.
WIDE = 8
# Costs within this ratio count as equal.
ALIKE = 1.05
MOST_COLORS = 6
MARKERS = ("o", "s", "^", "D", "v", "P")
# A curve of more than MANY points is drawn as its running mean over 1 / PART of them.
MANY, PART = 60, 25


# ---- groups ----------------------------------------------------------------------------------------------------------


def draw_groups(results: Results) -> Drawing | None:
    """Draw every seed of every group, the best group first."""
    groups, measure = results.scored[:MOST_ROWS], results.measure
    if len(groups) < 2 or not results.is_repeated:
        return None
    more = len(results.scored) - len(groups)
    several = any(len(group.scores) > 1 for group in groups)
    caption = "A ring is a seed, a diamond the mean, a bar one standard deviation." if several else "One seed each."
    caption += f" The best {len(groups)} groups; the table lists {more} more." if more else ""

    def draw(theme: Theme) -> Figure:
        figure, axis = column_axis(theme, 0.27 * len(groups) + 0.75, measure.title)
        right = axis.get_yaxis_transform()
        for row, group in enumerate(groups):
            color = theme.series[0] if row == 0 else theme.pale
            draw_seeds(axis, group, measure, row, color, upright=False)
            axis.plot([measure.scaled(group.mean)], [row], "d", color=color, markersize=5.5)
            score = results.score_text(group)
            axis.text(1.02, row, score, color=theme.ink, transform=right, va="center", fontsize=8)
        axis.set_yticks(range(len(groups)), [one_line(group.label, 30) for group in groups])
        axis.tick_params(axis="y", labelcolor=theme.ink)
        axis.set_ylim(len(groups) - 0.4, -0.6)
        axis.grid(False, axis="y")
        axis.xaxis.set_major_locator(MaxNLocator(4))
        return figure

    scores = listed([f"{group.label} {results.score_text(group)}" for group in groups])
    return Drawing("groups", f"{measure.title} of {len(groups)} groups: {scores}", caption, draw)


# ---- differences -----------------------------------------------------------------------------------------------------


def draw_differences(results: Results) -> Drawing | None:
    """Draw the differences of groups with their intervals."""
    pairs, measure = results.pairs, results.measure
    if not pairs:
        return None
    left_out = max(0, len(pairs) - MOST_ROWS // 2)  # a pair takes two rows
    pairs = pairs[: MOST_ROWS // 2]

    def draw(theme: Theme) -> Figure:
        title = f"Differences of {measure.goal}" + ", points" * measure.is_share
        figure, axis = column_axis(theme, 0.42 * len(pairs) + 0.8, title)
        for row, pair in enumerate(pairs):
            mean, low, high = (measure.scaled(value) for value in pair.difference[:3])
            color = theme.series[0] if pair.difference.is_clear else theme.pale
            axis.plot([low, high], [row, row], color=color, linewidth=1.6)
            axis.plot([mean], [row], "d", color=color, markersize=5.5)
            texts = ((0, "left", _pair_name(pair), theme.ink), (1, "right", _interval(pair, results), theme.pale))
            for x, side, text, ink in texts:
                label = axis.text(x, row - 0.42, one_line(text, 46), color=ink, fontsize=7.5, va="center", ha=side)
                label.set_transform(axis.get_yaxis_transform())
                label.set_bbox({"facecolor": theme.paper, "linewidth": 0, "pad": 1})  # hides the lines behind it
        axis.axvline(0, color=theme.ink, linewidth=0.9, zorder=1)
        axis.set_ylim(len(pairs) - 0.5, -0.75)
        axis.set_yticks([])
        axis.grid(False, axis="y")
        axis.xaxis.set_major_locator(MaxNLocator(5))
        return figure

    alt = listed([f"{_pair_name(pair)} {_interval(pair, results)}" for pair in pairs])
    caption = "A line is a 95 % interval that holds for all pairs together, colored if it excludes zero."
    caption += f" The table lists {left_out} more." if left_out else ""
    return Drawing("differences", f"Differences of {measure.goal}: {alt}", caption, draw)


def _pair_name(pair: Pair) -> str:
    return f"{pair.one.label} − {pair.other.label}"


def _interval(pair: Pair, results: Results) -> str:
    mean, low, high = (results.measure.signed(value) for value in pair.difference[:3])
    return f"{mean}  [{low}, {high}]"


# ---- depth and branches ----------------------------------------------------------------------------------------------


def draw_maps(results: Results) -> list[Drawing]:
    """Draw a map of depth by branches for each family with several cells in some row and in some column."""
    measure, drawings = results.measure, []
    for family, cells in results.families.items():
        # With one cell in each row or column, a line shows the same, and is drawn elsewhere.
        if any(len({shape[place] for shape in cells}) == len(cells) for place in (0, 1)):
            continue
        scores = [
            f"depth {depth} with {branches} branches {measure.text(group.mean)}"
            for (depth, branches), group in cells.items()
        ]
        caption = f"{family}: the stronger the color, the better." + results.families_note
        alt = f"{measure.goal} of {family}: {listed(scores)}"
        draw = partial(_draw_map, results, f"{family}: {measure.title}", cells)
        drawings.append(Drawing(f"depth_branches_{len(drawings)}", alt, caption, draw))
    return drawings


def _draw_map(results: Results, title: str, cells: dict[tuple[int, int], Group], theme: Theme) -> Figure:
    measure = results.measure
    depths, branches = (sorted({shape[place] for shape in cells}) for place in (0, 1))
    figure, axis = column_axis(theme, 0.56 * len(depths) + 0.85, title, "parallel branches")
    colors = LinearSegmentedColormap.from_list("report", [theme.low, theme.high])
    best, *_, worst = sorted((group.mean for group in cells.values()), key=measure.rank)
    for (depth, branch), group in cells.items():
        color = colors(0.5 if best == worst else (group.mean - worst) / (best - worst))
        x, y = branches.index(branch), depths.index(depth)
        axis.fill_between([x - 0.48, x + 0.48], y - 0.47, y + 0.47, color=color, linewidth=0)
        ink = _readable(color, theme)
        spread = "" if group.sd is None else f"± {measure.digits(group.sd)}, "
        for offset, text, size in (
            (-0.21, measure.digits(group.mean), 9.5),
            (0.07, f"{spread}n = {len(group.scores)}", 6.8),
            (0.29, f"{depth * branch} blocks", 6.8),
        ):
            axis.text(x, y + offset, text, ha="center", va="center", color=ink, fontsize=size)
    axis.set(xlim=(-0.5, len(branches) - 0.5), ylim=(len(depths) - 0.5, -0.5))
    axis.set_xticks(range(len(branches)), [str(each) for each in branches])
    axis.set_yticks(range(len(depths)), [str(each) for each in depths])
    axis.set_ylabel("depth", color=theme.pale, fontsize=8)
    axis.grid(False)
    return figure


def _readable(color: tuple[float, float, float, float], theme: Theme) -> str:
    """Return the theme's ink or paper, whichever contrasts more with a color."""
    return max((theme.ink, theme.paper), key=lambda ink: contrast(to_rgb(ink), color[:3]))


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the contrast ratio of two colors, from 1 to 21, as WCAG 2 defines it."""

    def luminance(rgb: Sequence[float]) -> float:
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, bright = sorted([luminance(one), luminance(other)])
    return (bright + 0.05) / (dark + 0.05)


class Line(NamedTuple):
    """Groups by their place on the x axis."""

    label: str
    points: list[tuple[float, Group]]


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
        drawings.append(_draw_lines(results, f"blocks_{len(drawings)}", title, "blocks in all", caption, named))
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
    return _draw_lines(results, "branches", results.measure.title, "parallel branches", caption, named)


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
    return _draw_lines(results, "lr", results.measure.title, "learning rate", caption, named, rates)


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


def _draw_lines(
    results: Results,
    name: str,
    title: str,
    x_label: str,
    caption: str,
    lines: Sequence[Line],
    failed: Sequence[float] = (),
) -> Drawing:
    """Draw lines of scores over one setting; `failed` are the places where a trial failed."""
    measure, log = results.measure, name == "lr"
    lines = [Line(label, sorted(points, key=lambda point: point[0])) for label, points in lines]
    places = sorted({x for line in lines for x, _ in line.points} | set(failed))

    def draw(theme: Theme) -> Figure:
        figure, axis = column_axis(theme, 3.0, title, x_label)
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
        if failed:
            bottom, heights = axis.get_xaxis_transform(), [0.04] * len(failed)
            axis.plot(failed, heights, "x", color=theme.bad, transform=bottom, markersize=6, mew=1.6)
        if len(places) > 7:  # too many ticks to read
            axis.xaxis.set_major_locator(LogLocator() if log else MaxNLocator(6))
        else:
            axis.set_xticks(places)
        plain_ticks(axis.xaxis)
        label_ends(figure, axis, labels, theme)
        return figure

    scores = [f"{line.label} {x:g}: {results.score_text(group)}".strip() for line in lines for x, group in line.points]
    several = any(len(group.scores) > 1 for line in lines for _, group in line.points)
    caption += " Rings are seeds, bars one standard deviation." if several else " One seed each."
    if len(lines) > MOST_COLORS:
        caption += f" {MOST_COLORS} of {len(lines)} lines have labels, the others are gray."
    return Drawing(name, f"{title} over {x_label}: {listed(scores)}", " ".join(caption.split()), draw)


# ---- learning curves -------------------------------------------------------------------------------------------------


def draw_curves(results: Results, key: str) -> Drawing | None:
    """Draw a metric over the steps, a line for each trial in the color of its group."""
    groups: list[tuple[str, list[tuple[TrialResult, list[tuple[int, float]]]]]] = []
    for group in results.groups:
        finite = [
            (trial, sorted(point for point in trial.curves.get(key, []) if math.isfinite(point[1])))
            for trial in group.trials
        ]
        if curves := [(trial, points) for trial, points in finite if len(points) > 1]:
            groups.append((group.label, curves))
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
    caption = "A line is a trial, a color a group."
    if any(trial.state in ("failed", "stopped early") for trial, _ in shown):
        caption += " Dotted: failed or stopped early."
    if len(groups) > MOST_COLORS:
        caption += f" The best {MOST_COLORS} groups have labels."
    if any(len(points) > MANY for _, points in shown):
        caption += f" Smoothed by a running mean over {100 // PART} % of the points."
    return Drawing(f"curve_{'goal' if is_goal else 'loss'}", f"{key} of {len(shown)} trials by step", caption, draw)


def smooth(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Return steps and values; of many points, their running mean."""
    steps, values = np.array(points, dtype=float).T
    if len(values) > MANY:
        window = len(values) // PART
        values = np.convolve(values, np.full(window, 1 / window), "valid")
        steps = steps[window // 2 :][: len(values)]
    return steps.tolist(), values.tolist()


# ---- costs -----------------------------------------------------------------------------------------------------------


def draw_cost(results: Results, cost: Cost) -> Drawing | None:
    """Draw groups over a cost, with their Pareto front."""
    measure = results.measure
    groups = [group for group in results.scored if group.cost(cost.field) is not None]
    x = [(group.cost(cost.field) or 0) / cost.scale for group in groups]
    y = [measure.scaled(group.mean) for group in groups]
    networks = {(group.cost("params"), group.cost("gflops")) for group in groups}
    # Nearly equal costs are no trade-off, and the latency of a single network varies by chance alone.
    if not x or max(x) <= ALIKE * min(x) or (cost.field == "latency_ms" and len(networks) < 2):
        return None
    front = pareto_front(x, y, measure.mode)

    def draw(theme: Theme) -> Figure:
        figure, axis = column_axis(theme, 3.0, measure.title, cost.unit)
        if min(x) > 0 and max(x) / min(x) > WIDE:
            axis.set_xscale("log")
        else:
            axis.xaxis.set_major_locator(MaxNLocator(5))
        plain_ticks(axis.xaxis)
        edge_x, edge_y = [x[place] for place in front], [y[place] for place in front]
        axis.plot(edge_x, edge_y, color=theme.series[0], drawstyle="steps-post", linewidth=1.4, alpha=0.6)
        labels = []
        for place, group in enumerate(groups):
            color = theme.series[0] if place in front else theme.pale
            sd = measure.scaled(group.sd or 0)
            ends = [y[place] - sd, y[place] + sd]
            axis.plot([x[place]] * 2, ends, color=color, linewidth=4, alpha=0.3, solid_capstyle="butt")
            axis.plot([x[place]], [y[place]], "o", color=color, markersize=5)
            labels.append(Label(x[place], y[place], group.label, color, place in front))
        axis.margins(x=0.12, y=0.15)
        # The segments of the front's line: across at each height, then up.
        across = [Bbox([[left, at], [right, at]]) for left, right, at in zip(edge_x, edge_x[1:], edge_y, strict=False)]
        up = [Bbox([[at, low], [at, high]]) for at, low, high in zip(edge_x[1:], edge_y, edge_y[1:], strict=False)]
        label_points(figure, axis, labels, theme, [*across, *up], measure.mode == "max")
        return figure

    points = [f"{groups[place].label}, {measure.digits(groups[place].mean)} at {x[place]:.3g}" for place in front]
    caption = f"On the line: {listed(points, 4)} {cost.unit}."
    return Drawing(f"cost_{cost.field}", f"{measure.title} over {cost.unit}. {caption}", caption, draw)
