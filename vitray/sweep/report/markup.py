"""HTML as values: every text is escaped unless it is markup already, so that no name can become a part of the page."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

VOID = {"img", "link", "meta", "source"}


class Html(NamedTuple):
    """Markup, safe as it stands."""

    markup: str


Content = Html | str | None


def tag(selector: str, *inside: Content, has: Mapping[str, str] | None = None) -> Html:
    """An element, named as in a style sheet: `td.number`; None inside is nothing."""
    name, *classes = selector.split(".")
    attributes = {"class": " ".join(classes)} if classes else {}
    said = "".join(f' {key}="{escape(value)}"' for key, value in {**attributes, **(has or {})}.items())
    return Html(f"<{name}{said}>" + ("" if name in VOID else f"{joined(*inside).markup}</{name}>"))


def joined(*parts: Content) -> Html:
    """Parts one after the other."""
    return Html("".join(part.markup if isinstance(part, Html) else escape(part or "") for part in parts))


def link(url: str | None, *inside: Content) -> Html:
    """A link where the address is one of the web: anything else, such as javascript:, is left out."""
    if url is None or not url.lower().startswith(("http://", "https://")):
        return joined(*inside)
    return tag("a", *inside, has={"href": url, "rel": "noopener noreferrer"})


class Column(NamedTuple):
    """A column of a table: its head, and whether it holds numbers."""

    head: Content
    number: bool = False


def table(label: str, columns: Sequence[Column], rows: Sequence[Sequence[Content]], marked: bool = False) -> Html:
    """A table in a box of its own, in which it scrolls sideways where the window is narrow; `marked`: its first row."""
    heads = [tag("th.number" if each.number else "th", each.head, has={"scope": "col"}) for each in columns]
    lines = []
    for place, row in enumerate(rows):
        cells = [tag("td.number" if column.number else "td", cell) for column, cell in zip(columns, row, strict=True)]
        lines.append(tag("tr.best" if marked and place == 0 else "tr", *cells))
    whole = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *lines))
    # Focusable, so that the keyboard scrolls it too.
    return tag("div.scroll", whole, has={"role": "region", "aria-label": label, "tabindex": "0"})
