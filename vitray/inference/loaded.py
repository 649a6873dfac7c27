"""A trained network for images in hand: `vitray.load`. It answers what `vitray predict` writes.

Shapes: B images, H x W pixels, C colors, D features, K classes, R x Q rows and columns of patches.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitray.config.parsing import short
from vitray.data.augment.decode import UndecodableImage, as_pixels, decode_image
from vitray.errors import ConfigError
from vitray.inference.models import describe_network
from vitray.inference.network_spec import Numerics, Wanted
from vitray.inference.networks import Networks, prepared
from vitray.inspection.attention import attention_maps
from vitray.models.network import AnyNetwork
from vitray.models.probabilities import present_labels, probabilities_of
from vitray.models.vit import ViT
from vitray.system import storage

# An image: of Pillow, its pixels (HWC, uint8), its encoded bytes, or its path or s3:// address.
AnyImage = Image.Image | np.ndarray | bytes | str | os.PathLike[str]
# Images of a forward pass.
BATCH = 64


class Prediction(NamedTuple):
    """The most probable class of an image."""

    label: int
    name: str
    """Of the class; the label where the network has no names."""
    probability: float
    probabilities: np.ndarray
    """Of all classes (K)."""
    labels: list[str] | None = None
    """Of a network of several labels an image: the classes that it takes as present, the most probable first."""


class LoadedNetwork:
    """A trained network. Its methods take an image or several, and return a row for each."""

    def __init__(self, address: str | os.PathLike[str], device: str | torch.device | None = None) -> None:
        """See `load`."""
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._spec, module = describe_network(os.fspath(address))
        self.module: AnyNetwork = module.to(self._device).eval()
        """The network as a torch module, in evaluation mode."""
        how = Numerics("cuda" if self._device.type == "cuda" else "cpu", torch.get_num_threads(), BATCH)
        wanted = Wanted(logits=self._spec.num_classes is not None, features=True)
        self._networks = Networks([self._spec], wanted, how, {self._spec.name: self.module})

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, by label; None if it has none."""
        return None if self._spec.classes is None else list(self._spec.classes)

    def preprocess(self, images: AnyImage | Iterable[AnyImage]) -> Tensor:
        """Return images as the module takes them (BCHW): cropped as in its evaluation, and normalized."""
        return prepared(np.stack(list(self._views(images))), self._spec, self.module)

    def predict(self, images: AnyImage | Iterable[AnyImage]) -> list[Prediction]:
        """Return the most probable class of each image, and the probabilities of all."""
        if self._spec.num_classes is None:
            raise ConfigError(f"{self._spec.url}: a network without classes; its features are what it has to say")
        logits_BK = torch.cat([outputs["logits"] for outputs in self._outputs(images)])
        rows = probabilities_of(logits_BK, self._spec.probability).cpu().numpy()
        labels = [int(row_K.argmax()) for row_K in rows]
        names = self.classes or [str(label) for label in range(self._spec.num_classes)]
        limits = self._spec.thresholds
        present = [None if limits is None else [names[each] for each in present_labels(row, limits)] for row in rows]
        columns = zip(labels, rows, present, strict=True)
        return [Prediction(label, names[label], float(row[label]), row, shown) for label, row, shown in columns]

    def features(self, images: AnyImage | Iterable[AnyImage]) -> np.ndarray:
        """Return the pooled features of each image before the head (BD), for a classifier or a search of your own."""
        return torch.cat([outputs["features"] for outputs in self._outputs(images)]).float().cpu().numpy()

    def attention(self, images: AnyImage | Iterable[AnyImage]) -> np.ndarray:
        """Return how much the output attends to each patch of each image, by attention rollout (BRQ)."""
        if not isinstance(self.module, ViT):
            raise ConfigError(f"{self._spec.url}: {self._spec.network} has no attention to show")
        return attention_maps(self.module, self.preprocess(images)).rollout.cpu().numpy()

    def _outputs(self, images: AnyImage | Iterable[AnyImage]) -> Iterator[dict[str, Tensor]]:
        views = self._views(images)
        while batch := list(islice(views, BATCH)):
            yield self._networks.outputs([np.stack(batch)])[self._spec.name]

    def _views(self, images: AnyImage | Iterable[AnyImage]) -> Iterator[np.ndarray]:
        """Yield the view of each image."""
        is_one = isinstance(images, Image.Image | bytes | str | os.PathLike)
        is_one = is_one or (isinstance(images, np.ndarray) and images.ndim == 3)
        number = -1
        for number, image in enumerate([images] if is_one else images):  # pyright: ignore[reportArgumentType]
            try:
                yield self._spec.view.of(_pixels(image))
            except UndecodableImage as error:
                name = short(os.fspath(image)) if isinstance(image, str | os.PathLike) else "in memory"
                raise ConfigError(f"image {number} ({name}): {error}") from None
        if number < 0:
            raise ConfigError("got no image")


def load(address: str | os.PathLike[str], device: str | torch.device | None = None) -> LoadedNetwork:
    """Return a trained network, ready for images; on a GPU if there is one.

    `address`: a model folder, `zoo/NAME`, `models:/name@alias`, `runs:/ID/PATH`, `s3://`, or a file of weights of
    another library
    """
    return LoadedNetwork(address, device)


def _pixels(image: AnyImage) -> np.ndarray:
    """Return the pixels of an image, HWC."""
    if isinstance(image, Image.Image):
        return as_pixels(image)
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise UndecodableImage(f"got an array of {image.dtype} {image.shape}, expected uint8 (height, width, 3)")
        return image
    if isinstance(image, bytes):
        return decode_image(image)
    if isinstance(image, str | os.PathLike):
        url = os.fspath(image)
        if not storage.is_remote(url) and not Path(url).is_file():
            raise UndecodableImage("no such file")
        return decode_image(storage.read_bytes(url))
    raise UndecodableImage(f"got {type(image).__name__}, expected an image of Pillow, an array, bytes or a path")
