"""Networks and images, as the figures of an inspection take them. B images, H x W pixels, C colors, K classes."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vitray.data.augment.views import decode_views
from vitray.data.shards.tasks import ProgressLine
from vitray.errors import ConfigError
from vitray.inference.images import EncodedImage, ImageSet, open_images, undecodable
from vitray.inference.network_spec import NetworkSpec
from vitray.inference.networks import prepared
from vitray.models.network import AnyNetwork, vit_of
from vitray.models.vit import ViT
from vitray.system import storage

IMAGE_FILE = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?|ppm|avif)$", re.IGNORECASE)
# Images that are shown one by one: the grid of figure 14 in the ViT paper.
MOST_SHOWN = 64
# Shown images that pass a network at a time, so that its progress is seen.
BATCH = 16


@dataclass(frozen=True)
class ChosenImages:
    """The images of an inspection, as they are stored."""

    name: str
    origin: str
    """The address and the split of a dataset, or the files."""
    identity: str
    """A hash of the dataset, or of the files."""
    source: ImageSet | Sequence[EncodedImage]
    numbers: Sequence[int]
    """Of the chosen images in their source."""
    shown: Sequence[EncodedImage]
    """Those that are shown one by one."""
    classes: tuple[str, ...]
    total: int
    """The number of images that they were chosen from."""
    left_out: tuple[str, ...] = ()
    """Images that cannot be decoded, each with the reason."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def used(self) -> int:
        """The number of chosen images that can be decoded."""
        return len(self.numbers) - len(self.left_out)

    def read(self, numbers: Sequence[int]) -> list[EncodedImage]:
        """Return some of the chosen images, by their places among these."""
        in_source = [self.numbers[number] for number in numbers]
        if isinstance(self.source, ImageSet):
            return self.source.read(in_source)
        return [self.source[number] for number in in_source]

    def shown_views(self, spec: NetworkSpec) -> np.ndarray:
        """Return the shown images as a network sees them: resized and cropped, uint8, BHWC."""
        [views_BHWC], _ = decode_views([image.content for image in self.shown], [spec.view])
        return views_BHWC

    def over(self, images: int) -> str:
        """Return a number of the images and where they are from, for a caption."""
        text = self.name
        if isinstance(self.source, ImageSet):
            of_all = f"{images:,} of {self.total:,}" if images < self.total else f"{images:,}"
            text = f"{of_all} images of {self.name}"
        return f"{text} (identity {self.identity[:8]})"


class Subject(NamedTuple):
    """A network with the images as it sees them."""

    name: str
    spec: NetworkSpec
    network: AnyNetwork
    chosen: ChosenImages | None
    """The images as they are stored, or None."""
    images: np.ndarray | None
    """The shown images, cropped, uint8, BHWC."""
    levels: Sequence[int] | None = None
    """The levels whose attention distance is measured; None is all."""
    measured: Mapping[str, Sequence[Any]] = {}
    """What was computed over chunks of all chosen images, by figure."""

    @property
    def vit(self) -> ViT:
        """The network of a figure that only Vision Transformers have."""
        return vit_of(self.network, "the figure")

    def over(self, images: int) -> str:
        """Return a number of images, their dataset and their size, for a caption."""
        assert self.chosen is not None
        return f"{self.chosen.over(images)} at {self.spec.size[0]} x {self.spec.size[1]} pixels"

    def batches(self, doing: str) -> Iterator[Tensor]:
        """Yield the shown images, normalized (BCHW), in batches on the network's device, with a line of progress."""
        assert self.images is not None
        progress = ProgressLine(f"{self.name}, {doing}:", len(self.images))
        for start in range(0, len(self.images), BATCH):
            batch_BHWC = self.images[start : start + BATCH]
            yield prepared(batch_BHWC, self.spec, self.network)
            progress.add(len(batch_BHWC))
        progress.end()

    def batch(self) -> Tensor | None:
        """Return all shown images, normalized (BCHW), on the network's device; None without images."""
        return None if self.images is None else prepared(self.images, self.spec, self.network)

    def class_name(self, number: int) -> str:
        """Return the name of a class of the network."""
        return f"class {number}" if self.spec.classes is None else self.spec.classes[number]


class View(NamedTuple):
    """A network and a chunk of images as it takes them, BCHW."""

    network: AnyNetwork
    images: Tensor
    levels: Sequence[int] | None = None
    base: "View | None" = None
    """The first of two networks, for the second."""

    @property
    def vit(self) -> ViT:
        """The network of a value that only Vision Transformers have."""
        return vit_of(self.network, "the figure")


def choose_images(words: Sequence[str], split: str, most: int) -> ChosenImages | None:
    """Return the images of files, or images of one dataset at even distances; None for no words."""
    if not words:
        return None
    if len(words) == 1 and not IMAGE_FILE.search(words[0]):
        return _of_dataset(words[0], split, most)
    contents = [_read_file(word) for word in words]
    encoded = [EncodedImage(content, -1, word) for content, word in zip(contents, words, strict=True)]
    for image, reason in zip(encoded, undecodable(encoded), strict=True):
        if reason is not None:
            raise ConfigError(f"{image.key}: {reason}; expected image files, or one dataset")
    name = words[0] if len(words) == 1 else f"{len(words)} image files"
    identity = hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()
    places, origin = range(len(encoded)), "the files " + ", ".join(words)
    shown = [encoded[place] for place in at_even_distances(len(encoded), MOST_SHOWN)]
    return ChosenImages(name, origin, identity, encoded, places, shown, (), len(words))


def _read_file(url: str) -> bytes:
    if not storage.exists(url):
        raise ConfigError(f"{url}: no such file; expected image files, or one dataset")
    try:
        return storage.read_bytes(url)
    except IsADirectoryError:
        raise ConfigError(f"{url}: a folder among files; expected image files, or one dataset") from None


def _of_dataset(url: str, split: str, most: int) -> ChosenImages:
    images = open_images(url, split)
    if not len(images):
        raise ConfigError(f"{images.url}: {images.split} has no images")
    return images_of(images, at_even_distances(len(images), most), len(images))


def images_of(images: ImageSet, numbers: Sequence[int], total: int) -> ChosenImages:
    """Return images of a dataset by their numbers, chosen from `total`; refuse them if none can be decoded."""
    few = images.read([numbers[place] for place in at_even_distances(len(numbers), MOST_SHOWN)])
    reasons = undecodable(few)
    usable = [image for image, reason in zip(few, reasons, strict=True) if reason is None]
    left_out = [f"{image.key} ({reason})" for image, reason in zip(few, reasons, strict=True) if reason is not None]
    if not usable:
        raise ConfigError(f"{images.url}: none of {len(left_out)} chosen images can be decoded: {left_out[0]}")
    name, origin = f"{images.name}, {images.split}", f"{images.url}, {images.split}"
    return ChosenImages(name, origin, images.identity, images, numbers, usable, images.classes, total, tuple(left_out))


def at_even_distances(total: int, most: int) -> list[int]:
    """Return at most `most` of the numbers from 0 to `total`, the first and the last among them."""
    return np.unique(np.linspace(0, total - 1, min(most, total)).round().astype(int)).tolist()
