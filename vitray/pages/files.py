"""The folder of a report: the page, and beside it files of its numbers."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vitray.system import storage

PAGE = "index.html"
# The characters with which a text becomes a formula in a spreadsheet; the wide ones in some languages.
FORMULA_STARTS = tuple("=+-@\t\r\n＝＋－＠")


def write_files(folder: str, files: Mapping[str, str], page: str) -> str:
    """Write or replace the files and then the page, each whole, and return the page's address.

    Names may quote bytes that are not valid text.
    """
    for name, text in {**files, PAGE: page}.items():
        storage.write_bytes(storage.join(folder, name), text.encode(errors="backslashreplace"))
    return storage.join(folder, PAGE)


def csv_text(rows: Iterable[Sequence[Any]], line_end: str = "\r\n") -> str:
    """Return rows as CSV.

    A text that a spreadsheet would run as a formula, such as a file's name, gets an apostrophe in front; numbers stay.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator=line_end).writerows([_inert(cell) for cell in row] for row in rows)
    return text.getvalue()


def _inert(cell: Any) -> Any:
    if not isinstance(cell, str) or not cell.startswith(FORMULA_STARTS):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell
