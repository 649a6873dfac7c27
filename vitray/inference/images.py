"""Images by address: a dataset of ours, or any source that `vitray shard` reads, without writing shards first.

Images have numbers from 0: the stored order of a split, or the order in which their source lists them. Any process
reads some of them by their numbers.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.augment.views import View, decode_views, usable
from vitray.data.shards.label_lists import LabelList, label_states
from vitray.data.shards.manifest import MANIFEST, Dataset, Labels, open_dataset, row_keys
from vitray.data.shards.options import Kind, ShardRequest, ShardSettings
from vitray.data.shards.sources import DetectedSource, Listing, SourceEntry, detect_source, list_source, read_items
from vitray.data.stream.decoding import SplitRows, locate_rows, read_rows
from vitray.errors import ConfigError
from vitray.system import storage

# Encoded images that are in memory together.
READ_AT_ONCE = 256


class EncodedImage(NamedTuple):
    """One image as it is stored."""

    content: bytes | str
    """A text in place of the bytes is the reason why it cannot be read."""
    label: int | np.ndarray
    """Negative where there is none; of several labels an image, the states of all classes (K)."""
    key: str

    def pixels(self) -> np.ndarray:
        """Return the decoded image (HWC, uint8)."""
        if isinstance(self.content, str):
            raise UndecodableImage(self.content)
        return decode_image(self.content)


class Images(Protocol):
    """Images in a fixed order, which any process reads by their numbers from 0; picklable."""

    def __len__(self) -> int: ...

    def read(self, numbers: Sequence[int]) -> list[EncodedImage]:
        """Return some images, in the order of their numbers."""
        ...


class ListedItems(NamedTuple):
    """The images of a source that is no dataset of ours."""

    kind: Kind
    request: ShardRequest
    items: list[SourceEntry]


@dataclass(frozen=True)
class ImageSet:
    """The images of one split, with classes and mostly with labels."""

    url: str
    name: str
    """The end of the address, for titles and folders."""
    split: str
    classes: tuple[str, ...]
    identity: str
    """A hash of the images and their order; of a source, of its files' names, sizes and times of change."""
    source: SplitRows | ListedItems
    set_aside: tuple[str, ...] = ()
    """Images of a source that were refused unread, each with its reason."""
    chosen: np.ndarray | None = None
    """The numbers of these images in the source; None for all of them."""
    labels: Labels = "one"
    """How many an image has."""

    def __len__(self) -> int:
        if self.chosen is not None:
            return len(self.chosen)
        match self.source:
            case SplitRows(starts=starts):
                return int(starts[-1])
            case ListedItems(items=items):
                return len(items)

    def read(self, numbers: Sequence[int]) -> list[EncodedImage]:
        """Return some images, in the order of their numbers."""
        if self.chosen is not None:
            numbers = self.chosen[np.asarray(numbers, np.int64)].tolist()
        match self.source:
            case SplitRows():
                stored = read_rows(np.asarray(numbers), self.source)
                items = [stored[number] for number in numbers]
            case ListedItems(kind, request, listed):
                chosen = [listed[number] for number in numbers]
                contents = read_items(kind, chosen, request)
                items = [(*content, item.name) for item, content in zip(chosen, contents, strict=True)]
        return [EncodedImage(content, self._label(label), key) for content, label, key in items]

    def _label(self, label: Any) -> int | np.ndarray:
        if isinstance(label, LabelList):
            return label_states([label], len(self.classes))[0]
        return -1 if label is None else label

    def read_labeled(self, numbers: Sequence[int]) -> list[EncodedImage]:
        """Return some images; refuse one without a label."""
        encoded = self.read(numbers)
        self.check_labels([image.key for image in encoded], [image.label for image in encoded])
        return encoded

    def read_views(self, numbers: Sequence[int], view: View) -> tuple[np.ndarray, np.ndarray]:
        """Return the views (BHWC, uint8) and labels of those of some images that can be decoded."""
        parts: list[np.ndarray] = [np.zeros((0, *view.size, 3), np.uint8)]
        labels: list[int | np.ndarray] = []
        for at in range(0, len(numbers), READ_AT_ONCE):
            images = self.read(numbers[at : at + READ_AT_ONCE])
            [views_BHWC], reasons = decode_views([image.content for image in images], [view])
            parts.append(views_BHWC[usable(reasons)])
            labels += [image.label for image, reason in zip(images, reasons, strict=True) if reason is None]
        return np.concatenate(parts), np.array(labels, np.int8 if self.labels == "several" else np.int64)

    def check_labels(self, keys: Sequence[str], labels: Sequence[int | np.ndarray]) -> None:
        """Refuse an image without a label; of several labels, none is a label, too."""
        if missing := [key for key, label in zip(keys, labels, strict=True) if np.ndim(label) == 0 and label < 0]:
            raise ConfigError(f"{self.url}: {self.split} has no labels: got none for image {missing[0]}")

    def read_names(self) -> list[str]:
        """Return the name of each image: the same in a source and in the dataset that `vitray shard` wrote from it."""
        match self.source:
            case SplitRows():
                names = [name_of(key) for key in row_keys(open_dataset(self.url), self.split)]
            case ListedItems(items=items):
                names = [item.name for item in items]
        return names if self.chosen is None else [names[number] for number in self.chosen]

    def part(self, rows: np.ndarray, name: str) -> "ImageSet":
        """Return some of the images, under a name that tells different parts apart."""
        return replace(self, chosen=rows, identity=_hash([self.identity, name]))


def open_images(url: str, split: str) -> ImageSet:
    """Return the images of a split at an address."""
    is_drawn = url.lower().rstrip("/") == "demo"
    url = storage.absolute(url)  # actors on a cluster have other working folders
    if storage.exists(storage.join(url, MANIFEST)):
        return split_images(open_dataset(url), split)
    request = ShardRequest("demo" if is_drawn else url, "", ShardSettings(), keep=(split,))
    detected = detect_source(request)
    listing = list_source(request, detected, lambda function, calls: [function(*call) for call in calls])
    set_aside = tuple(f"{reject.file} ({reject.reason})" for reject in listing.rejects)
    source = ListedItems(listing.kind, request, listing.items)
    identity = _identity(listing, detected, request.source)
    place = request.source, _end(url), split
    return ImageSet(*place, listing.classes, identity, source, set_aside, labels=listing.labels)


def split_images(dataset: Dataset, split: str) -> ImageSet:
    """Return the images of a split of a dataset."""
    identity = _hash([dataset.identity, split])
    place, rows = (dataset.url, _end(dataset.url), split), locate_rows(dataset, split)
    return ImageSet(*place, dataset.classes, identity, rows, labels=dataset.labels)


def _end(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2] or "images"


def undecodable(images: Sequence[EncodedImage]) -> list[str | None]:
    """Return for each image the reason why it cannot be decoded, or None."""
    return decode_views([image.content for image in images], [])[1]


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
