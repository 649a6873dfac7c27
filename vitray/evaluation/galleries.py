"""Images on the page: the most confident mistakes, and images on which two networks differ."""

import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitray.evaluation.results import Result, Scored
from vitray.inference.images import ImageSet

# Pixels of a thumbnail's longer side; images below the second are shown enlarged, with their pixels visible.
THUMBNAIL, TINY = 192, 96
MOST_DIFFERING = 12


class Example(NamedTuple):
    """An image with lines of text below it."""

    row: int
    """The number of the image in its set."""
    key: str
    lines: tuple[str, str]
    """The class, and the prediction."""


class Thumbnail(NamedTuple):
    """The picture of an example."""

    example: Example
    jpeg: bytes
    is_tiny: bool
    """Whether its pixels are shown enlarged."""


def mistakes(result: Result, scored: Scored) -> list[Example]:
    """Return the most confident mistakes of a network."""
    classes = result.classes
    return [
        Example(
            int(result.outputs.rows[each.row]),
            result.outputs.keys[each.row],
            (classes[each.label], f"predicted {classes[each.predicted]}, {each.probability:.0%}"),
        )
        for each in scored.classification.mistakes
    ]


def differing(right: Result, wrong: Result, most: int = MOST_DIFFERING) -> list[Example]:
    """Return images that only the first network has right, the most confident mistakes of the second first."""
    assert right.scored is not None
    assert wrong.scored is not None
    whole, classes, labels = wrong.scored.classification, wrong.classes, wrong.scored.labels
    rows = np.flatnonzero(right.scored.hits & ~wrong.scored.hits)
    rows = rows[np.argsort(-whole.confidences[rows], kind="stable")[:most]]
    return [
        Example(
            int(wrong.outputs.rows[row]),
            wrong.outputs.keys[row],
            (
                classes[labels[row]],
                f"{wrong.name}: {classes[whole.predictions[row]]}, {whole.confidences[row]:.0%}",
            ),
        )
        for row in rows.tolist()
    ]


def gallery(images: ImageSet, examples: Sequence[Example]) -> list[Thumbnail]:
    """Return the pictures of examples."""
    places = sorted({example.row for example in examples})
    thumbnails = dict(zip(places, _thumbnails(images, places), strict=True))
    return [Thumbnail(example, *thumbnails[example.row]) for example in examples]


def _thumbnails(images: ImageSet, places: Sequence[int]) -> Iterator[tuple[bytes, bool]]:
    for encoded in images.read(places):
        image = Image.fromarray(encoded.pixels())
        is_tiny = max(image.size) <= TINY
        image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
        image.save(content := io.BytesIO(), "JPEG", quality=88)
        yield content.getvalue(), is_tiny
