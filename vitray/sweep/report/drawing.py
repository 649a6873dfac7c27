"""How the report draws: two themes, axes without boxes, labels beside what they name, PNGs with the same bytes twice.

Nothing here knows pyplot, so no figure outlives its function.
"""

import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

WIDTH, DPI = 4.0, 220


class Theme(NamedTuple):
    """The colours of a page and of its pictures."""

    paper: str
    ink: str
    pale: str
    grid: str
    rest: str
    """What is drawn but not named."""
    raised: str
    """Behind what stands out from the page."""
    low: str
    high: str
    """The ends of a heat map."""
    series: tuple[str, ...]
    """Far apart for the red- and green-blind too, and 4.5 : 1 on the paper, so that words can have them."""
    good: str
    warn: str
    bad: str


LIGHT = Theme(
    paper="#fbfaf8",
    ink="#1f2430",
    pale="#5d6474",
    grid="#e7e4de",
    rest="#b9b8b6",
    raised="#f3f1ec",
    low="#eaf1f8",
    high="#1f5f9f",
    series=("#1f66ad", "#bf4e14", "#00835a", "#09299e", "#593c12", "#6b1654"),
    good="#00835a",
    warn="#9a7400",
    bad="#b3361f",
)
DARK = Theme(
    paper="#15181f",
    ink="#e9e7e2",
    pale="#a5abb8",
    grid="#2b303a",
    rest="#565c69",
    raised="#1c2029",
    low="#1d2733",
    high="#8cc0f5",
    series=("#6cabf0", "#e07c58", "#9bd7b3", "#f4caf7", "#e6bf33", "#ca79a5"),
    good="#6fcf9f",
    warn="#e6bf33",
    bad="#f4846c",
)
# What it costs words to stand nearer to another point than to their own, in square pixels that cover others.
FAR = 10_000
MARKS = ("o", "s", "^", "D", "v", "P")


class Drawing(NamedTuple):
    """A picture that says something: its file name, what it shows in words, and how to draw it."""

    name: str
    alt: str
    caption: str
    draw: Callable[[Theme], Figure]


class Label(NamedTuple):
    """Words beside a point, in its colour; of those that are not needed, some may find no room."""

    x: float
    y: float
    words: str
    colour: str
    needed: bool = True


def new_figure(theme: Theme, height: float) -> Figure:
    """A figure as wide as a column of the page."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor=theme.paper)
    FigureCanvasAgg(figure)  # measures words without drawing the figure for each
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    return figure


def dressed(figure: Figure, theme: Theme, title: str, across: str = "") -> Axes:
    """The axes of a figure: a title, pale ticks and lines, and no box."""
    axis = figure.add_subplot(facecolor=theme.paper)
    axis.set_title(plain(title, 52), loc="left", color=theme.ink, fontsize=9.5)
    axis.set_xlabel(plain(across, 60), color=theme.pale, fontsize=8)
    axis.grid(color=theme.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(which="both", length=0, labelsize=8, labelcolor=theme.pale)
    for line in axis.spines.values():
        line.set_visible(False)
    return axis


def plain(words: str, length: int) -> str:
    """Words on one line, of so many letters at most, in which a dollar begins no formula."""
    words = " ".join(words.split())
    words = words if len(words) <= length else f"{words[: length - 1].rstrip()}…"
    return words.replace("$", r"\$")


def listed(said: Sequence[str], most: int = 8) -> str:
    """Some of many words, and how many more there are."""
    rest = f"; and {len(said) - most} more" if len(said) > most else ""
    return "; ".join(said[:most]) + rest


def label_ends(figure: Figure, axis: Axes, labels: Sequence[Label], theme: Theme) -> None:
    """Name lines at the right edge, each at the height of its end as far as the others let it."""
    limits = axis.get_xlim(), axis.get_ylim()
    at, texts = axis.transAxes, []
    for label in labels:
        words = plain(label.words, 24)
        texts.append(axis.text(1.03, 0.5, words, color=label.colour, fontsize=8, va="center", transform=at))
    _settle(figure)
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
    """Heights moved as little as lets neighbours be `gap` apart, in the same order, within 0 and 1 if all fit."""
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    # Pools of labels that touch, each around the mean of what its labels want: isotonic regression, then its bounds.
    pools: list[tuple[float, int]] = []
    for rank, place in enumerate(order):
        pool = (heights[place] - rank * gap, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, count = pools.pop()
            pool = ((mean * count + pool[0] * pool[1]) / (count + pool[1]), count + pool[1])
        pools.append(pool)
    found = [0.0] * len(heights)
    top = max(0.0, 1 - gap * (len(heights) - 1))
    bases = [min(max(mean, 0.0), top) for mean, count in pools for _ in range(count)]
    for rank, (place, base) in enumerate(zip(order, bases, strict=True)):
        found[place] = base + rank * gap
    return found


def label_points(
    figure: Figure, axis: Axes, labels: Sequence[Label], theme: Theme, lines: Sequence[Bbox], upwards: bool
) -> None:
    """Name points where there is room around them and off some lines; the needed ones in any case."""
    _settle(figure)
    places = [tuple(map(float, axis.transData.transform((label.x, label.y)))) for label in labels]
    taken = [Bbox.from_bounds(x - 9, y - 9, 18, 18) for x, y in places]
    taken += [line.transformed(axis.transData).padded(3) for line in lines]
    for label, own in sorted(zip(labels, places, strict=True), key=lambda each: not each[0].needed):
        halo = [withStroke(linewidth=2, foreground=theme.paper)]
        text = axis.text(label.x, label.y, plain(label.words, 24), color=label.colour, fontsize=7.5, path_effects=halo)
        text.set_in_layout(False)
        with _any_letter():
            size = text.get_window_extent()
        # Before and beyond a point of a front there is no other; what lies behind it has its words on the far side.
        boxes = _around(own, size.width, size.height, label.needed, label.needed == upwards)
        troubles = [(_trouble(box, taken, axis.bbox) + FAR * _is_anothers(box, own, places), box) for box in boxes]
        least, box = min(troubles, key=lambda each: each[0])
        if not label.needed and least > 0:
            text.remove()
            continue
        taken.append(box)
        text.set(position=axis.transData.inverted().transform(box.p0), va="bottom")


def _is_anothers(box: Bbox, own: tuple[float, ...], places: Sequence[tuple[float, ...]]) -> bool:
    """Whether words would stand nearer to another point than to their own."""

    def away(place: tuple[float, ...]) -> float:
        return math.hypot(*(max(low - at, 0, at - high) for low, at, high in zip(box.p0, place, box.p1, strict=True)))

    return any(away(place) < away(own) for place in places)


def _around(at: tuple[float, ...], width: float, height: float, left: bool, above: bool) -> Iterator[Bbox]:
    """Where words may stand, in pixels, with the corner first that is asked for, and beside the point last."""
    (x, y), near, far = at, 12, 20
    sides, rows = [-near - width, -width / 2, near], [near, -near - height]
    for up in rows if above else rows[::-1]:
        for across in sides if left else sides[::-1]:
            yield Bbox.from_bounds(x + across, y + up, width, height)
    for across in (far, -far - width):
        yield Bbox.from_bounds(x + across, y - height / 2, width, height)


def _trouble(box: Bbox, taken: Sequence[Bbox], room: Bbox) -> float:
    """Square pixels of a box that lie on others, or outside of the room, which is worse."""
    shared = [found.width * found.height for other in taken if (found := Bbox.intersection(box, other))]
    inside = Bbox.intersection(box, room)
    outside = box.width * box.height - (inside.width * inside.height if inside else 0)
    return round(sum(shared) + 10 * outside, 3)


def _settle(figure: Figure) -> None:
    """Lets the layout be final, so that pixels can be measured."""
    with _any_letter():
        figure.draw_without_rendering()


def png(figure: Figure) -> bytes:
    """A figure's bytes."""
    found = io.BytesIO()
    with _any_letter():
        figure.savefig(found, format="png", metadata={"Software": None})
    return found.getvalue()


@contextmanager
def _any_letter() -> Iterator[None]:
    """A letter that the font lacks is drawn as a box, which says enough: matplotlib warns of each besides."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield
