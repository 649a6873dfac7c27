"""One style for all pictures: themes, figures, axes without boxes, and PNGs whose bytes repeat.

Nothing here uses pyplot, so a figure is freed when its last reference goes.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

# Matplotlib's warning of a letter that the font lacks, which has no class of its own.
MISSING_GLYPH = "Glyph .* missing from font"


class Theme(NamedTuple):
    """The colors of a page and of its pictures."""

    paper: str
    ink: str
    pale: str
    grid: str
    rest: str
    """Marks and lines without a label."""
    raised: str
    """Background of boxes on the page."""
    low: str
    high: str
    """The ends of a heat map."""
    series: tuple[str, ...]
    """Distinct for red-blind and green-blind readers, with a contrast of 4.5 : 1 on the paper."""
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
# Of pictures beside a web page's own; the report draws finer ones.
DPI = 130


def new_figure(theme: Theme, width: float, height: float, dpi: int = DPI) -> Figure:
    """Return an empty figure of a size in inches, with a layout that fits its axes."""
    figure = Figure(figsize=(width, height), dpi=dpi, facecolor=theme.paper)
    FigureCanvasAgg(figure)  # has a renderer to measure text; the default canvas starts a drawing for each
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    return figure


def style_axis(axis: Axes, theme: Theme) -> None:
    """Pale ticks and grid lines, and no box."""
    axis.set_facecolor(theme.paper)
    axis.grid(color=theme.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(which="both", length=0, labelsize=8, labelcolor=theme.pale)
    axis.spines[:].set_visible(False)


def heat(theme: Theme) -> LinearSegmentedColormap:
    """Return the colors of a heat map; cells without a value are transparent."""
    return LinearSegmentedColormap.from_list("heat", [theme.low, theme.high])


def one_line(text: str, length: int, keep_end: bool = False) -> str:
    """Return a text on one line, cut to a number of letters, with dollars escaped so that none starts a formula."""
    text = " ".join(text.split())
    if len(text) > length:
        text = f"…{text[1 - length :]}" if keep_end else f"{text[: length - 1].rstrip()}…"
    return text.replace("$", r"\$")


def to_png(figure: Figure) -> bytes:
    """Return a figure as PNG; equal figures have equal bytes."""
    png = io.BytesIO()
    with missing_glyphs():
        figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def to_svg(figure: Figure) -> bytes:
    """Return a figure as SVG; equal figures have equal bytes."""
    svg = io.BytesIO()
    with missing_glyphs(), rc_context({"svg.hashsalt": "vitray"}):
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return svg.getvalue()


@contextmanager
def missing_glyphs() -> Iterator[None]:
    """Silence Matplotlib's warning of each letter that the font lacks; a box stands in its place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", MISSING_GLYPH)
        yield
