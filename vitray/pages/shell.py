"""The frame of a page: one HTML file without a script, which loads nothing."""

from collections.abc import Sequence
from typing import NamedTuple

from vitray.pages.markup import Html, tag
from vitray.pages.styling import SHEET

# No script runs and nothing is fetched, even if a name contains markup.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class PageSection(NamedTuple):
    """A part of the page under a heading."""

    anchor: str
    title: str
    body: Html


def html_page(title: str, header: Html, parts: Sequence[PageSection], footer: Html) -> str:
    """Return a page with a list of links to its sections."""
    entries = [tag("li", tag("a", part.title, has={"href": f"#{part.anchor}"})) for part in parts]
    nav = tag("nav", tag("ul", *entries), has={"aria-label": "Sections"})
    bodies = [tag("section", tag("h2", part.title), part.body, has={"id": part.anchor}) for part in parts]
    head = tag(
        "head",
        tag("meta", has={"charset": "utf-8"}),
        tag("meta", has={"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("meta", has={"http-equiv": "Content-Security-Policy", "content": POLICY}),
        tag("meta", has={"name": "color-scheme", "content": "light dark"}),
        tag("title", title),
        tag("style", Html(SHEET)),
    )
    body = tag("body", tag("main", header, nav, *bodies, footer))
    return f"<!doctype html>\n{tag('html', head, body, has={'lang': 'en'}).markup}\n"
