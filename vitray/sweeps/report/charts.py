"""Charts that compare groups: scores by seed, differences, maps of depth by branches, and costs.

Only finished trials count. A diamond is a group's mean over its seeds, a bar one standard deviation.
"""

from collections.abc import Sequence
from functools import partial

from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from vitray.pages.plotting import Theme, one_line
from vitray.sweeps.report.drawing import Drawing, Label, column_axis, draw_seeds, label_points, listed, plain_ticks
from vitray.sweeps.report.groups import Group, Pair, Results, pairs_of, pareto_front
from vitray.sweeps.report.trials import Cost

MOST_ROWS = 24
# Ratio of the largest to the smallest cost above which the axis is logarithmic.
WIDE = 8
# Costs within this ratio count as equal.
ALIKE = 1.05


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
    """Draw the paired differences of groups with their intervals."""
    pairs, measure = pairs_of(results), results.measure
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
    caption = "A line is a 95 % confidence interval, colored if it excludes zero."
    caption += f" The table lists {left_out} more." if left_out else ""
    return Drawing("differences", f"Paired differences of {measure.goal}: {alt}", caption, draw)


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
        edge = ([x[place] for place in front], [y[place] for place in front])
        axis.plot(*edge, color=theme.series[0], drawstyle="steps-post", linewidth=1.4, alpha=0.6)
        labels = []
        for place, group in enumerate(groups):
            color = theme.series[0] if place in front else theme.pale
            sd = measure.scaled(group.sd or 0)
            ends = [y[place] - sd, y[place] + sd]
            axis.plot([x[place]] * 2, ends, color=color, linewidth=4, alpha=0.3, solid_capstyle="butt")
            axis.plot([x[place]], [y[place]], "o", color=color, markersize=5)
            labels.append(Label(x[place], y[place], group.label, color, place in front))
        axis.margins(x=0.12, y=0.15)
        label_points(figure, axis, labels, theme, _steps(*edge), measure.mode == "max")
        return figure

    points = [f"{groups[place].label}, {measure.digits(groups[place].mean)} at {x[place]:.3g}" for place in front]
    caption = f"On the line: {listed(points, 4)} {cost.unit}."
    return Drawing(f"cost_{cost.field}", f"{measure.title} over {cost.unit}. {caption}", caption, draw)


def _steps(x: Sequence[float], y: Sequence[float]) -> list[Bbox]:
    """The segments of the front's line: across at each height, then up."""
    across = [Bbox([[x[place], y[place]], [x[place + 1], y[place]]]) for place in range(len(x) - 1)]
    up = [Bbox([[x[place + 1], y[place]], [x[place + 1], y[place + 1]]]) for place in range(len(x) - 1)]
    return [*across, *up]
