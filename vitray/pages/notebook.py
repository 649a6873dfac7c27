"""What a value shows in a notebook: facts, a table, a picture, a page."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from vitray.system import storage

if TYPE_CHECKING:
    import pandas as pd

# The first rows of a table.
MOST_ROWS = 20
# Bytes of a page that a notebook takes in; a larger one is named.
MOST_BYTES = 8 * 2**20
HEIGHT = 640


def facts_html(title: str, facts: Mapping[str, Any]) -> str:
    """Return a heading and named values."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    return f"<h4>{escape(title)}</h4><table>{rows}</table>"


def frame_html(frame: "pd.DataFrame") -> str:
    """Return the first rows of a table."""
    more = "" if len(frame) <= MOST_ROWS else f"<p>and {len(frame) - MOST_ROWS:,} more rows</p>"
    return frame.head(MOST_ROWS).to_html(index=False, na_rep="", border=0) + more


def picture_html(png: bytes) -> str:
    """Return a picture."""
    return f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def page_html(url: str) -> str:
    """Return a page as a frame, in which no script runs; of a large one only the address."""
    content = storage.read_bytes(url)
    named = f"<p>{escape(url)}</p>"
    if len(content) > MOST_BYTES:
        return named
    page = escape(content.decode(errors="replace"), quote=True)
    return f'<iframe sandbox srcdoc="{page}" style="width: 100%; height: {HEIGHT}px; border: 0"></iframe>{named}'


def joined_html(parts: Sequence[str]) -> str:
    """Return parts one below another."""
    return f"<div>{''.join(parts)}</div>"
