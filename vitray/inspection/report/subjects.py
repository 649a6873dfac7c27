"""A network and its images, as the figures of an inspection take them. B images, H x W pixels, C colours, K classes."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitray import storage
from vitray.data.augment.batch import normalised
from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.augment.image import crop_centre
from vitray.data.shards.ray_tasks import ProgressLine
from vitray.errors import ConfigError
from vitray.inference.images import EncodedImage, open_images, read_with_or_without_labels
from vitray.inference.models import NetworkSpec
from vitray.models.vit import ViT

IMAGE_FILE = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?|ppm|avif)$", re.IGNORECASE)
# Images that a figure passes through a network at a time, so that its progress is seen.
BATCH = 16


class ChosenImages(NamedTuple):
    """The images of an inspection, as they are stored."""

    name: str
    origin: str
    """The address, the split and the identity of a dataset, or the files."""
    encoded: list[EncodedImage]
    classes: tuple[str, ...]
    total: int
    """The number of images that they were chosen from."""
    left_out: tuple[str, ...] = ()
    """Images that cannot be decoded, each with the reason."""


class Subject(NamedTuple):
    """A network with the images as it sees them."""

    name: str
    spec: NetworkSpec
    vit: ViT
    chosen: ChosenImages | None
    """The images as they are stored, or None."""
    images: np.ndarray | None
    """The same images, cropped, uint8, BHWC."""
    levels: Sequence[int] | None = None
    """The levels whose attention distance is measured; None is all."""

    def batches(self, doing: str) -> Iterator[Tensor]:
        """Yield the normalised images (BCHW) in batches on the network's device, with a line of progress."""
        assert self.images is not None
        progress = ProgressLine(f"{self.name}, {doing}:", len(self.images))
        for start in range(0, len(self.images), BATCH):
            batch_BHWC = torch.from_numpy(self.images[start : start + BATCH])
            yield self._normalised(batch_BHWC)
            progress.add(len(batch_BHWC))
        progress.end()

    def batch(self) -> Tensor:
        """Return all normalised images, BCHW, on the network's device."""
        assert self.images is not None
        return self._normalised(torch.from_numpy(self.images))

    def _normalised(self, images_BHWC: Tensor) -> Tensor:
        device = next(self.vit.parameters()).device
        return normalised(images_BHWC.to(device), self.spec.normalise).contiguous()

    def class_name(self, number: int) -> str:
        """Return the name of a class of the network."""
        return f"class {number}" if self.spec.classes is None else self.spec.classes[number]


def choose_images(words: Sequence[str], split: str, most: int) -> ChosenImages | None:
    """Return the images of files, or images of one dataset at even distances; None for no words."""
    if not words:
        return None
    if len(words) == 1 and not IMAGE_FILE.search(words[0]):
        return _of_dataset(words[0], split, most)
    encoded = [EncodedImage(_read_file(word), -1, word) for word in words]
    for image in encoded:
        try:
            decode_image(image.content)
        except UndecodableImage as error:
            raise ConfigError(f"{image.key}: {error}; wanted image files, or one dataset") from None
    name = words[0] if len(words) == 1 else f"{len(words)} image files"
    return ChosenImages(name, "the files " + ", ".join(words), encoded, (), len(words))


def _read_file(url: str) -> bytes:
    if not storage.exists(url):
        raise ConfigError(f"{url}: no such file; wanted image files, or one dataset")
    try:
        return storage.read_bytes(url)
    except IsADirectoryError:
        raise ConfigError(f"{url}: a folder among files; wanted image files, or one dataset") from None


def _of_dataset(url: str, split: str, most: int) -> ChosenImages:
    images = open_images(url, split)
    if not images.images:
        raise ConfigError(f"{images.url}: {images.split} has no images")
    numbers = np.unique(np.linspace(0, images.images - 1, min(most, images.images)).round().astype(int)).tolist()
    usable, left_out = [], []
    for image in read_with_or_without_labels(images, numbers):
        try:
            decode_image(image.content)
            usable.append(image)
        except UndecodableImage as error:
            left_out.append(f"{image.key} ({error})")
    if not usable:
        raise ConfigError(f"{images.url}: none of {len(left_out)} chosen images can be decoded: {left_out[0]}")
    origin = f"{images.url}, {images.split}, identity {images.identity}"
    return ChosenImages(
        f"{images.name}, {images.split}", origin, usable, images.classes, images.images, tuple(left_out)
    )


def views(images: ChosenImages, spec: NetworkSpec) -> np.ndarray:
    """Return the images as a network sees them before normalisation: resized and cropped, uint8, BHWC."""
    return np.stack([crop_centre(decode_image(image.content), spec.crop, spec.size) for image in images.encoded])
