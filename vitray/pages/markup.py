"""HTML as values. All text is escaped unless it already is markup, so no name can inject elements into the page."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from vitray.pages.styling import STATE_COLORS

VOID = {"img", "link", "meta", "source"}


class Html(NamedTuple):
    """Escaped markup."""

    markup: str


Content = Html | str | None


def tag(selector: str, *inside: Content, has: Mapping[str, str] | None = None) -> Html:
    """Return an element with classes as in a style sheet, `td.number`, and with attributes; None inside is skipped."""
    name, *classes = selector.split(".")
    attributes = {"class": " ".join(classes)} if classes else {}
    pairs = "".join(f' {key}="{escape(value)}"' for key, value in {**attributes, **(has or {})}.items())
    return Html(f"<{name}{pairs}>" + ("" if name in VOID else f"{joined(*inside).markup}</{name}>"))


def joined(*parts: Content) -> Html:
    """Return parts one after the other."""
    return Html("".join(part.markup if isinstance(part, Html) else escape(part or "") for part in parts))


def link(url: str | None, *inside: Content) -> Html:
    """Return a link to a web address; any other address, such as javascript:, is left out."""
    if url is None or not url.lower().startswith(("http://", "https://")):
        return joined(*inside)
    return tag("a", *inside, has={"href": url, "rel": "noopener noreferrer"})


def data_url(kind: str, content: bytes) -> str:
    """Return a file as an address that holds its bytes."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


# ---- tables ----------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of a table: its heading, and whether it holds numbers."""

    head: Content
    number: bool = False


def table(label: str, columns: Sequence[Column], rows: Sequence[Sequence[Content]], marked: bool = False) -> Html:
    """Return a table that scrolls sideways in a narrow window; `marked` highlights the first row."""
    heads = [tag("th.number" if each.number else "th", each.head, has={"scope": "col"}) for each in columns]
    lines = []
    for place, row in enumerate(rows):
        cells = [tag("td.number" if column.number else "td", cell) for column, cell in zip(columns, row, strict=True)]
        lines.append(tag("tr.best" if marked and place == 0 else "tr", *cells))
    whole = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *lines))
    # Focusable, so that the keyboard scrolls it too.
    return tag("div.scroll", whole, has={"role": "region", "aria-label": label, "tabindex": "0"})


# ---- parts of the page -----------------------------------------------------------------------------------------------


class Picture(NamedTuple):
    """A drawing as PNG in both themes."""

    alt: str
    caption: str
    light: bytes
    dark: bytes


def illustrated(prose: Sequence[str], pictures: Sequence[Picture]) -> Html:
    """Return text above several pictures, or beside a single one."""
    paragraphs = [tag("p", each) for each in prose if each]
    if len(pictures) == 1:
        text = tag("div.prose", *paragraphs, tag("p.pale", pictures[0].caption))
        return tag("div.single", text, _figure(pictures[0]._replace(caption="")))
    text = tag("div.prose", *paragraphs)
    return joined(text, tag("div.pictures", *(_figure(picture) for picture in pictures)) if pictures else None)


def stacked(pictures: Sequence[Picture]) -> Html:
    """Return pictures in the full width of the page, one below the other."""
    return tag("div.stacked", *(_figure(picture) for picture in pictures))


def _figure(picture: Picture) -> Html:
    dark = {"srcset": data_url("image/png", picture.dark), "media": "(prefers-color-scheme: dark)"}
    light = {"src": data_url("image/png", picture.light), "alt": picture.alt}
    image = tag("picture", tag("source", has=dark), tag("img", has=light))
    return tag("figure", image, tag("figcaption", picture.caption) if picture.caption else None)


def state_dot(state: str) -> Html:
    """Return a dot in the color of a trial's state."""
    return tag("span.dot", has={"style": f"background: var(--{STATE_COLORS[state]})", "aria-hidden": "true"})


def fact_list(facts: Mapping[str, Content]) -> Html:
    """Return names with what they stand for."""
    return tag("dl", *(part for name, fact in facts.items() for part in (tag("dt", name), tag("dd", fact))))


def command_box(command: str) -> Html:
    """Return a command that one click selects."""
    return tag("code.command", command, has={"title": "one click selects the whole command"})
