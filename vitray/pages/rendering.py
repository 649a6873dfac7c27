"""Pages of reports: values that the templates lay out, and their rendering.

A page is one HTML file without a script, which loads nothing. The templates escape all text, so that no name can inject
elements.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from vitray.pages.plotting import DARK, LIGHT, Theme, to_png


class Picture(NamedTuple):
    """A drawing as PNG in both themes."""

    alt: str
    caption: str
    light: bytes
    dark: bytes


def draw_picture(alt: str, caption: str, draw: Callable[[Theme], Figure]) -> Picture:
    """Return a drawing in both themes."""
    return Picture(alt, caption, to_png(draw(LIGHT)), to_png(draw(DARK)))


class Column(NamedTuple):
    """A column of a table."""

    head: str
    number: bool = False
    """Whether it holds numbers."""
    cite: str = ""
    """The title of a work, at the end of the heading."""


class Table(NamedTuple):
    """A table."""

    label: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    """A text for each column, or what the page's template lays out as a row."""
    marked: bool = False
    """Whether the first row is highlighted."""


class PageSection(NamedTuple):
    """A part of a page under a heading."""

    anchor: str
    title: str
    content: Any

    @property
    def name(self) -> str:
        """The block of the page's template that shows the content, and the variable that holds it there."""
        return self.anchor.replace("-", "_")


def data_url(content: bytes, kind: str) -> str:
    """Return a file as an address that holds its bytes."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters["data_url"] = data_url
ENVIRONMENT.globals |= {"light": LIGHT, "dark": DARK}


def render_page(template: str, values: Mapping[str, Any], sections: Sequence[PageSection]) -> str:
    """Return a page with a list of links to its sections, of which those without content are left out."""
    shown = [section for section in sections if section.content]
    contents = {section.name: section.content for section in shown}
    return ENVIRONMENT.get_template(template).render(**values, **contents, sections=shown)
