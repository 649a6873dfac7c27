"""A figure of an inspection as a value: texts, functions that draw it, numbers; and the parts that drawings share."""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vitray.pages.files import csv_text
from vitray.pages.plotting import DARK, LIGHT, Theme, one_line, style_axis, to_png, to_svg

DPI = 200
Rows = list[Sequence[Any]]


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
    rows: Rows

    def csv(self) -> bytes:
        """Return the table as CSV."""
        return csv_text([_plain(value) for value in row] for row in self.rows).encode(errors="backslashreplace")


def _plain(value: Any) -> Any:
    """Numbers with seven digits; no number where there is none."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.7g}"
    return value


class Thumbnail(NamedTuple):
    """A small picture in a gallery."""

    content: bytes
    kind: str
    """The media type."""
    is_tiny: bool
    """Whether its pixels are shown enlarged."""
    alt: str
    name: str


class Strip(NamedTuple):
    """Pictures of one image, side by side, with text below."""

    pictures: list[Thumbnail]
    title: str
    guesses: str
    """The predicted classes; empty without any."""
    is_wrong: bool


class FigureResult(NamedTuple):
    """A figure of an inspection: a section of its page."""

    name: str
    title: str
    prose: str
    drawings: list[Drawing]
    tables: list[Table]
    galleries: Sequence[tuple[str, list[Strip]]] = ()
    """Images above the drawings, with the name of their network where there are several."""
    reasons: tuple[str, ...] = ()
    """Why some networks are not in the figure: a sentence each, which `prose` has too."""

    def add(
        self, name: str, alt: str, caption: str, draw: Callable[..., Figure], rows: Rows | None = None, file: str = ""
    ) -> None:
        """Add a drawing, and its table if there is one, of a network or of a pair.

        `draw` takes a theme and the title of the picture, which is the name; `file` begins the names of the files, by
        default that of the figure.
        """
        file = file_name(file or self.name, name)
        self.drawings.append(Drawing(file, f"{alt} of {name}", f"{name}: {caption}", partial(draw, title=name)))
        if rows is not None:
            self.tables.append(Table(file, rows))

    def without(self, reason: str) -> "FigureResult":
        """Return it with a sentence that says why a network is not in it."""
        return self._replace(prose=f"{self.prose} {reason}".strip(), reasons=(*self.reasons, reason))


def file_name(*parts: str) -> str:
    """Return parts as the name of a file."""
    return "-".join(re.sub(r"[^\w.]+", "-", part) for part in parts)


# ---- parts of drawings -----------------------------------------------------------------------------------------------


def to_array(values: Tensor) -> np.ndarray:
    """Return a tensor as an array in float64."""
    return values.detach().double().cpu().numpy()


def prepare(axis: Axes, theme: Theme, title: str, label: str = "") -> None:
    """Style an axis, and write its title and the name of its values."""
    style_axis(axis, theme)
    axis.set_title(one_line(title, 64), loc="left", color=theme.ink, fontsize=9.5)
    axis.set_ylabel(label, color=theme.pale, fontsize=8)


def add_title(figure: Figure, theme: Theme, title: str) -> None:
    """Write the title of a picture with several panels."""
    figure.suptitle(title.replace("$", r"\$"), x=0.01, ha="left", color=theme.ink, fontsize=9.5)


def number_levels(axis: Axes, theme: Theme, label: str = "levels passed") -> None:
    """Number the horizontal axis by levels, or by states: 0 before the first level, then after each."""
    axis.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axis.set_xlabel(label, color=theme.pale, fontsize=8)


def add_legend(axis: Axes, theme: Theme) -> None:
    """Draw a legend where the fewest points are."""
    axis.legend(fontsize=7.5, frameon=False, labelcolor=theme.ink)


def add_bar(figure: Figure, axes: Axes | Sequence[Axes], image: AxesImage, theme: Theme, label: str) -> None:
    """Draw the scale of a heat map beside its axis, or beside all axes that share it."""
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=35, pad=0.02)
    bar.ax.tick_params(length=0, labelsize=7, labelcolor=theme.pale)
    bar.outline.set_visible(False)  # type: ignore[operator] - the stubs call it a method
    bar.set_label(label, color=theme.pale, fontsize=8)


def draw_band(axis: Axes, values_SX: np.ndarray, color: str, label: str) -> None:
    """Draw the median of each row as a line over the rows, in a band from the 5th to the 95th percentile."""
    low, middle, high = np.nanpercentile(values_SX, [5, 50, 95], axis=1)
    places = np.arange(len(values_SX))
    axis.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
    axis.plot(places, middle, color=color, linewidth=1.4, marker="o" if len(places) < 30 else "", ms=3, label=label)


def tiled(tiles_RQHWC: np.ndarray, gap: float) -> np.ndarray:
    """Return rows and columns of tiles as one image, with one pixel of the value `gap` between them."""
    padded = np.pad(tiles_RQHWC, ((0, 0), (0, 0), (1, 0), (1, 0), (0, 0)), constant_values=gap)
    rows, columns, height, width, colors = padded.shape
    image = padded.transpose(0, 2, 1, 3, 4).reshape(rows * height, columns * width, colors)
    return image[1:, 1:]
