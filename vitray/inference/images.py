"""Images by address: a dataset of ours, or any source that `vitray shard` reads, without writing shards first.

Images have numbers from 0: the stored order of a split, or the order in which their source lists them. Any process
reads some of them by their numbers.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vitray.data.shards.manifest import MANIFEST, open_dataset, row_keys
from vitray.data.shards.options import Kind, ShardRequest, ShardSettings
from vitray.data.shards.sources import DetectedSource, Listing, SourceEntry, detect_source, list_source, read_items
from vitray.data.stream.decoding import SplitRows, locate_rows, read_rows
from vitray.errors import ConfigError
from vitray.system import storage


class EncodedImage(NamedTuple):
    """One image as it is stored."""

    content: bytes
    label: int
    """Negative where there is none."""
    key: str


class ListedItems(NamedTuple):
    """The images of a source that is no dataset of ours."""

    kind: Kind
    request: ShardRequest
    items: list[SourceEntry]


class ImageSet(NamedTuple):
    """The images of one split; picklable."""

    url: str
    name: str
    """The end of the address, for titles and folders."""
    split: str
    images: int
    classes: tuple[str, ...]
    identity: str
    """A hash of the images and their order; of a source, of its files' names, sizes and times of change."""
    source: SplitRows | ListedItems
    set_aside: tuple[str, ...] = ()
    """Images of a source that were refused unread, each with its reason."""


def open_images(url: str, split: str) -> ImageSet:
    """Return the images of a split at an address."""
    name = url.rstrip("/").rpartition("/")[2] or "images"
    is_drawn = url.lower().rstrip("/") == "demo"
    url = storage.absolute(url)  # actors on a cluster have other working folders
    if storage.exists(storage.join(url, MANIFEST)):
        dataset = open_dataset(url)
        rows = locate_rows(dataset, split)
        identity = _hash([dataset.identity, split])
        return ImageSet(url, name, split, int(rows.starts[-1]), dataset.classes, identity, rows)
    url = "demo" if is_drawn else url
    request = ShardRequest(url, "", ShardSettings(), keep=(split,))
    detected = detect_source(request)
    listing = list_source(request, detected, lambda function, calls: [function(*call) for call in calls])
    set_aside = tuple(f"{reject.file} ({reject.reason})" for reject in listing.rejects)
    source, identity = ListedItems(listing.kind, request, listing.items), _identity(listing, detected, url)
    return ImageSet(url, name, split, len(listing.items), listing.classes, identity, source, set_aside)


def read_encoded(images: ImageSet, numbers: Sequence[int]) -> list[EncodedImage]:
    """Return some images with their labels, in the order of their numbers."""
    encoded = read_with_or_without_labels(images, numbers)
    for image in encoded:
        if image.label < 0:
            raise ConfigError(f"{images.url}: {images.split} has no labels: got none for image {image.key}")
    return encoded


def read_with_or_without_labels(images: ImageSet, numbers: Sequence[int]) -> list[EncodedImage]:
    """Return some images, in the order of their numbers; the label of an image without one is negative."""
    match images.source:
        case SplitRows():
            stored = read_rows(np.asarray(numbers), images.source)
            items = [stored[number] for number in numbers]
        case ListedItems(kind, request, listed):
            chosen = [listed[number] for number in numbers]
            contents = read_items(kind, chosen, request)
            items = [(*content, item.name) for item, content in zip(chosen, contents, strict=True)]
    return [EncodedImage(content, -1 if label is None else label, key) for content, label, key in items]


def read_names(images: ImageSet) -> list[str]:
    """Return the name of each image: the same in a source and in the dataset that `vitray shard` wrote from it."""
    match images.source:
        case SplitRows():
            return [name_of(key) for key in row_keys(open_dataset(images.url), images.split)]
        case ListedItems(items=items):
            return [item.name for item in items]


def name_of(key: str) -> str:
    """Return the name in the key of a dataset's row, which has a hash before it."""
    return key.partition(":")[2] or key


def _identity(listing: Listing, detected: DetectedSource, url: str) -> str:
    """A hash of the listed images, and of size and time of change of the files that hold them."""
    used = {item.file.partition("::")[0] for item in listing.items}
    files = {name: each for name, each in detected.files.items() if {storage.join(detected.folder, name), url} & used}
    if not detected.files and listing.kind != "demo":
        files = {"": storage.file_version(url)}
    items = [[item.name, item.place, item.size, item.label] for item in listing.items]
    return _hash([listing.kind, listing.classes, items, files])


def _hash(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
