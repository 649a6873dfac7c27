"""Several labels an image: the classes that it shows, and those of which it is not known whether it does.

Shapes: N images, K classes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

PRESENT, ABSENT, UNKNOWN = 1, 0, -1


class LabelList(NamedTuple):
    """The labels of an image: as its source has them, and in a listing as class numbers."""

    present: tuple[Any, ...] = ()
    unknown: tuple[Any, ...] | None = ()
    """Classes that are neither known to be present nor known to be absent; None is all that are not present."""

    def numbered(self, code: Mapping[Any, int]) -> "LabelList":
        """Return the classes by number, each once and ascending; `code` has those of all labels."""
        present = {code[label] for label in self.present}
        unknown = None if self.unknown is None else tuple(sorted({code[label] for label in self.unknown} - present))
        return LabelList(tuple(sorted(present)), unknown)


def names_of(label: int | np.ndarray, classes: Sequence[str]) -> str:
    """Return the class of an image, or all that are present, as text."""
    if isinstance(label, np.ndarray):
        return ", ".join(classes[each] for each in np.flatnonzero(label == PRESENT).tolist()) or "none"
    return classes[label]


def label_states(lists: Iterable[tuple[Sequence[int], Sequence[int] | None]], classes: int) -> np.ndarray:
    """Return NxK int8 states from the numbers of the present and the unknown classes of images; None is all others."""
    rows = list(lists)
    states_NK = np.zeros((len(rows), classes), np.int8)
    for row_K, (present, unknown) in zip(states_NK, rows, strict=True):
        row_K[slice(None) if unknown is None else list(unknown)] = UNKNOWN
        row_K[list(present)] = PRESENT
    return states_NK
