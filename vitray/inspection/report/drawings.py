"""A figure of an inspection as a value: its texts, a function that draws it in a theme, and its numbers."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitray.pages.files import csv_text
from vitray.pages.markup import Html
from vitray.plotting import DARK, LIGHT, Theme, one_line, style_axis, to_png, to_svg

DPI = 200


class Rendered(NamedTuple):
    """A drawing as bytes: PNG in both themes, and SVG."""

    light: bytes
    dark: bytes
    svg: bytes


class Drawing(NamedTuple):
    """One picture of a network."""

    file: str
    """The name of its files, without an ending."""
    alt: str
    caption: str
    draw: Callable[[Theme], Figure]

    def rendered(self) -> Rendered:
        """Draw the picture."""
        figure = self.draw(LIGHT)
        return Rendered(to_png(figure), to_png(self.draw(DARK)), to_svg(figure))


class Table(NamedTuple):
    """The numbers of a figure; the first row has the names of the columns."""

    file: str
    rows: list[Sequence[Any]]

    def csv(self) -> bytes:
        """Return the table as CSV."""
        return csv_text([_plain(value) for value in row] for row in self.rows).encode(errors="backslashreplace")


class FigureResult(NamedTuple):
    """A figure of an inspection: a section of its page."""

    name: str
    title: str
    prose: str
    drawings: list[Drawing]
    tables: list[Table]
    gallery: Html | None = None
    """Pictures above the drawings."""


def _plain(value: Any) -> Any:
    """Numbers with seven digits; no number where there is none."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.7g}"
    return value


def file_name(*parts: str) -> str:
    """Return parts as the name of a file."""
    return "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in part) for part in parts)


def prepare_axis(axis: Axes, theme: Theme, title: str, label: str) -> None:
    """Style an axis with a title and the name of its values."""
    style_axis(axis, theme)
    axis.set_title(one_line(title, 60), loc="left", color=theme.ink, fontsize=9.5)
    axis.set_ylabel(label, color=theme.pale, fontsize=8)


def prepare_depth_axis(axis: Axes, theme: Theme) -> None:
    """Make the horizontal axis one of levels."""
    axis.set_xlabel("level", color=theme.pale, fontsize=8)
    axis.xaxis.set_major_locator(MaxNLocator(12, integer=True))
