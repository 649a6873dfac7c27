"""Pictures that compare groups: their seeds, their differences, depth by branches, and what they cost.

Only finished trials count. A mark is a group's mean over its seeds, a bar one standard deviation.
"""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox

from vitray.sweep.report.drawing import Drawing, Label, Theme, dressed, label_points, listed, new_figure, plain
from vitray.sweep.report.groups import MODEL, Group, Pair, Results, pairs_of, pareto_front

MOST_ROWS = 24
# An axis of costs is logarithmic from this ratio of the largest to the smallest on.
WIDE = 8


# ---- groups ----------------------------------------------------------------------------------------------------------


def draw_groups(results: Results) -> Drawing | None:
    """Every seed of every group, best group first."""
    groups, measure = results.scored[:MOST_ROWS], results.measure
    if len(groups) < 2 or not results.is_repeated:
        return None
    more = len(results.scored) - len(groups)
    several = any(len(group.scores) > 1 for group in groups)
    caption = "A ring is a seed, the mark their mean, the bar one standard deviation." if several else "One seed each."
    caption += f" The best {len(groups)}; {more} more are in the table." if more else ""

    def draw(theme: Theme) -> Figure:
        figure = new_figure(theme, 0.27 * len(groups) + 0.75)
        axis = dressed(figure, theme, measure.title)
        for row, group in enumerate(groups):
            _draw_seeds(axis, row, group, results, theme.series[0] if row == 0 else theme.pale)
            at = axis.get_yaxis_transform()
            axis.text(1.02, row, results.said(group), color=theme.ink, transform=at, va="center", fontsize=8)
        axis.set_yticks(range(len(groups)), [plain(group.label, 30) for group in groups])
        axis.tick_params(axis="y", labelcolor=theme.ink)
        axis.set_ylim(len(groups) - 0.4, -0.6)
        axis.grid(False, axis="y")
        axis.xaxis.set_major_locator(MaxNLocator(4))
        return figure

    said = listed([f"{group.label} {results.said(group)}" for group in groups])
    return Drawing("groups", f"{measure.title} of {len(groups)} groups: {said}", caption, draw)


def _draw_seeds(axis: Axes, row: int, group: Group, results: Results, colour: str) -> None:
    measure = results.measure
    if group.sd is not None:
        ends = [measure.scaled(group.mean - group.sd), measure.scaled(group.mean + group.sd)]
        scores = [measure.scaled(value) for value in group.scores.values()]
        axis.plot(ends, [row, row], color=colour, linewidth=5, alpha=0.3, solid_capstyle="butt")
        axis.plot(scores, [row] * len(scores), "o", mfc="none", mec=colour, markersize=5, mew=1)
    axis.plot([measure.scaled(group.mean)], [row], "d", color=colour, markersize=5.5)


# ---- differences -----------------------------------------------------------------------------------------------------


def draw_differences(results: Results) -> Drawing | None:
    """How far groups lie apart over the same seeds."""
    pairs, measure = pairs_of(results), results.measure
    if not pairs:
        return None
    left_out = max(0, len(pairs) - MOST_ROWS // 2)  # two lines each
    pairs = pairs[: MOST_ROWS // 2]

    def draw(theme: Theme) -> Figure:
        figure = new_figure(theme, 0.42 * len(pairs) + 0.8)
        axis = dressed(figure, theme, f"Differences of {measure.goal}" + ", points" * measure.is_share)
        for row, pair in enumerate(pairs):
            mean, low, high = (measure.scaled(value) for value in pair.difference[:3])
            colour = theme.series[0] if pair.difference.is_clear else theme.pale
            axis.plot([low, high], [row, row], color=colour, linewidth=1.6)
            axis.plot([mean], [row], "d", color=colour, markersize=5.5)
            for x, words, ink in ((0, plain(_named(pair), 46), theme.ink), (1, _interval(pair, results), theme.pale)):
                at, side = axis.get_yaxis_transform(), "right" if x else "left"
                text = axis.text(x, row - 0.42, words, color=ink, transform=at, va="center", ha=side, fontsize=7.5)
                text.set_bbox({"facecolor": theme.paper, "linewidth": 0, "pad": 1})  # hides lines behind the words
        axis.axvline(0, color=theme.ink, linewidth=0.9, zorder=1)
        axis.set_ylim(len(pairs) - 0.5, -0.75)
        axis.set_yticks([])
        axis.grid(False, axis="y")
        axis.xaxis.set_major_locator(MaxNLocator(5))
        return figure

    alt = listed([f"{_named(pair)} {_interval(pair, results)}" for pair in pairs])
    caption = "The line is the interval of 95 % confidence, in colour where it leaves out zero."
    caption += f" {left_out} more are in the table." if left_out else ""
    return Drawing("differences", f"Paired differences of {measure.goal}: {alt}", caption, draw)


def _named(pair: Pair) -> str:
    return f"{pair.one.label} − {pair.other.label}"


def _interval(pair: Pair, results: Results) -> str:
    mean, low, high = (results.measure.signed(value) for value in pair.difference[:3])
    return f"{mean}  [{low}, {high}]"


# ---- depth and branches ----------------------------------------------------------------------------------------------


def of_its_best(results: Results) -> str:
    """The end of a caption: whether a network stands for several groups."""
    networks = {group.settings.get(MODEL) for group in results.scored}
    return " Of each network the best of its settings." if len(networks) < len(results.scored) else ""


def draw_maps(results: Results) -> list[Drawing]:
    """A map of depth by branches for each family of networks in which either varies while the other is the same."""
    measure, drawings = results.measure, []
    for family, cells in results.families.items():
        # A map with one cell in each row, or in each column, is a line that is drawn elsewhere.
        if any(len({shape[place] for shape in cells}) == len(cells) for place in (0, 1)):
            continue

        def draw(theme: Theme, family: str = family, cells: dict[tuple[int, int], Group] = cells) -> Figure:
            return _draw_map(results, theme, f"{family}: {measure.title}", cells)

        said = [
            f"depth {depth} with {branches} branches {measure.say(group.mean)}"
            for (depth, branches), group in cells.items()
        ]
        caption = f"{family}: the stronger the colour, the better." + of_its_best(results)
        alt = f"{measure.goal} of {family}: {listed(said)}"
        drawings.append(Drawing(f"depth_branches_{len(drawings)}", alt, caption, draw))
    return drawings


def _draw_map(results: Results, theme: Theme, title: str, cells: dict[tuple[int, int], Group]) -> Figure:
    measure = results.measure
    depths, branches = (sorted({shape[place] for shape in cells}) for place in (0, 1))
    figure = new_figure(theme, 0.56 * len(depths) + 0.85)
    axis = dressed(figure, theme, title, "parallel branches")
    colours = LinearSegmentedColormap.from_list("report", [theme.low, theme.high])
    best, *_, worst = sorted((group.mean for group in cells.values()), key=measure.rank)
    for (depth, branch), group in cells.items():
        colour = colours(0.5 if best == worst else (group.mean - worst) / (best - worst))
        x, y = branches.index(branch), depths.index(depth)
        axis.fill_between([x - 0.48, x + 0.48], y - 0.47, y + 0.47, color=colour, linewidth=0)
        ink = _readable(colour, theme)
        spread = "" if group.sd is None else f"± {measure.digits(group.sd)}, "
        for up, words, size in (
            (-0.21, measure.digits(group.mean), 9.5),
            (0.07, f"{spread}n = {len(group.scores)}", 6.8),
            (0.29, f"{depth * branch} blocks", 6.8),
        ):
            axis.text(x, y + up, words, ha="center", va="center", color=ink, fontsize=size)
    axis.set(xlim=(-0.5, len(branches) - 0.5), ylim=(len(depths) - 0.5, -0.5))
    axis.set_xticks(range(len(branches)), [str(each) for each in branches])
    axis.set_yticks(range(len(depths)), [str(each) for each in depths])
    axis.set_ylabel("depth", color=theme.pale, fontsize=8)
    axis.grid(False)
    return figure


def _readable(colour: tuple[float, float, float, float], theme: Theme) -> str:
    """Ink or paper, whichever stands out from a colour."""
    return max((theme.ink, theme.paper), key=lambda ink: contrast(to_rgb(ink), colour[:3]))


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """How far two colours stand apart, from 1 to 21, as WCAG 2 defines it."""

    def light(rgb: Sequence[float]) -> float:
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, bright = sorted([light(one), light(other)])
    return (bright + 0.05) / (dark + 0.05)


# ---- costs -----------------------------------------------------------------------------------------------------------


# Costs so little apart are one.
ALIKE = 1.05


class Cost(NamedTuple):
    """What a trial takes: its field, its unit, and how much of the field one unit is."""

    field: str
    unit: str
    one: float


COSTS = (
    Cost("device_seconds", "device hours", 3600),
    Cost("latency_ms", "ms an image", 1),
    Cost("peak_memory_bytes", "GiB", 2**30),
    Cost("gflops", "GFLOPs an image", 1),
    Cost("params", "million parameters", 1e6),
)


def draw_cost(results: Results, cost: Cost) -> Drawing | None:
    """Groups over what they cost, and those that no other beats at lower cost."""
    measure = results.measure
    spent = [(group, found) for group in results.scored if (found := group.cost(cost.field)) is not None]
    groups, x = [group for group, _ in spent], [found / cost.one for _, found in spent]
    y = [measure.scaled(group.mean) for group in groups]
    networks = {(group.cost("params"), group.cost("gflops")) for group in groups}
    # What hardly differs is no trade-off, and one network's latency differs by chance alone.
    if not x or max(x) <= ALIKE * min(x) or (cost.field == "latency_ms" and len(networks) < 2):
        return None
    front = pareto_front(x, y, measure.mode)

    def draw(theme: Theme) -> Figure:
        figure = new_figure(theme, 3.0)
        axis = dressed(figure, theme, measure.title, cost.unit)
        if min(x) > 0 and max(x) / min(x) > WIDE:
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.grid(False, which="minor")
        else:
            axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        edge = ([x[place] for place in front], [y[place] for place in front])
        axis.plot(*edge, color=theme.series[0], drawstyle="steps-post", linewidth=1.4, alpha=0.6)
        labels = []
        for place, group in enumerate(groups):
            colour = theme.series[0] if place in front else theme.pale
            sd = measure.scaled(group.sd or 0)
            ends = [y[place] - sd, y[place] + sd]
            axis.plot([x[place]] * 2, ends, color=colour, linewidth=4, alpha=0.3, solid_capstyle="butt")
            axis.plot([x[place]], [y[place]], "o", color=colour, markersize=5)
            labels.append(Label(x[place], y[place], group.label, colour, place in front))
        axis.margins(x=0.12, y=0.15)
        label_points(figure, axis, labels, theme, _steps(*edge), measure.mode == "max")
        return figure

    ends = [(groups[place].label, measure.digits(groups[place].mean), f"{x[place]:.3g}") for place in front]
    said = "On the line: " + listed([f"{label}, {value} at {at}" for label, value, at in ends], 4) + f" {cost.unit}."
    return Drawing(f"cost_{cost.field}", f"{measure.title} over {cost.unit}. {said}", said, draw)


def _steps(x: Sequence[float], y: Sequence[float]) -> list[Bbox]:
    """The room that the line of the front takes: across at each height, then up."""
    across = [Bbox([[x[place], y[place]], [x[place + 1], y[place]]]) for place in range(len(x) - 1)]
    up = [Bbox([[x[place + 1], y[place]], [x[place + 1], y[place + 1]]]) for place in range(len(x) - 1)]
    return [*across, *up]
