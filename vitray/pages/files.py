"""The folder of a report: the page, and beside it files of its numbers."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vitray import storage
from vitray.pages.markup import Html, tag

PAGE = "index.html"


def write_files(folder: str, files: Mapping[str, str], page: str) -> str:
    """Write or replace the files and then the page, each whole, and return the page's address.

    Names may quote bytes that are not valid text.
    """
    for name, text in {**files, PAGE: page}.items():
        storage.write_bytes(storage.join(folder, name), text.encode(errors="backslashreplace"))
    return storage.join(folder, PAGE)


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def list_of_files(files: Mapping[str, str]) -> Html:
    """Return the end of a page: links to the files beside it, {name: content}."""
    links = [tag("li", tag("a", name, has={"href": name}), f", {text}") for name, text in files.items()]
    return tag("footer", "Beside this page:", tag("ul", *links))
