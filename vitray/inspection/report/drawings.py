"""A figure of an inspection as a value: its texts, a function that draws it in a theme, and its numbers."""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from vitray.inspection.report.subjects import Subject
from vitray.pages.files import csv_text
from vitray.plotting import DARK, LIGHT, Theme, to_png, to_svg

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


class Part(NamedTuple):
    """What a figure shows of one network."""

    caption: str
    draw: Callable[..., Figure]
    """Takes a theme, and the title of the picture."""
    rows: Rows


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

    def add(self, name: str, alt: str, caption: str, draw: Callable[[Theme], Figure], rows: Rows) -> None:
        """Add the drawing and the table of one network, or of a pair."""
        file = file_name(self.name, name)
        self.drawings.append(Drawing(file, f"{alt} of {name}", f"{name}: {caption}", draw))
        self.tables.append(Table(file, rows))

    def of_each(self, subjects: Sequence[Subject], alt: str, show: Callable[[Subject], Part | str]) -> "FigureResult":
        """Return it with a drawing and a table of each network; the text says why a network has none."""
        result = self
        for subject in subjects:
            match show(subject):
                case Part(caption, draw, rows):
                    self.add(subject.name, alt, caption, partial(draw, title=subject.name), rows)
                case reason:
                    result = result.without(reason)
        return result

    def without(self, reason: str) -> "FigureResult":
        """Return it with a sentence that says why a network is not in it."""
        return self._replace(prose=f"{self.prose} {reason}".strip(), reasons=(*self.reasons, reason))


def _plain(value: Any) -> Any:
    """Numbers with seven digits; no number where there is none."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.7g}"
    return value


def file_name(*parts: str) -> str:
    """Return parts as the name of a file."""
    return "-".join(re.sub(r"[^\w.]+", "-", part) for part in parts)
