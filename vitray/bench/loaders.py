"""Alternatives to the stream: a plain loop, and torch's DataLoader with three ways to decode and crop."""

import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from vitray.data.stream.decoding import Images, SplitRows, ViewSettings, decode_positions, read_rows
from vitray.data.stream.epoch_order import EpochOrder
from vitray.data.stream.stream import Stream

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class EpochInput(NamedTuple):
    """The images of an epoch, their order, and their crop."""

    rows: SplitRows
    order: EpochOrder
    view: ViewSettings

    def encoded(self, positions: np.ndarray) -> tuple[list[bytes], Tensor]:
        """The encoded images at some positions, and their labels."""
        rows = self.order.at(positions)[0]
        stored = read_rows(rows, self.rows)
        contents, labels, _ = zip(*(stored[int(row)] for row in rows), strict=True)
        return list(contents), torch.tensor(labels)


# Returns images and labels of some positions of an epoch.
Decode = Callable[[np.ndarray, EpochInput], tuple[Tensor, Tensor]]


def loop(stream: Stream, epoch: int, images: int) -> Iterator[int]:
    """Yield batch sizes of the lower limit: the stream's decoding in this process, without any overhead."""
    return (len(block["image"]) for block in blocks_of(stream, epoch, images))


def blocks_of(stream: Stream, epoch: int, images: int) -> Iterator[Images]:
    """Yield the batches of an epoch, decoded in this process."""
    source = EpochInput(stream.rows, stream.order(epoch), stream.view(epoch))
    for start in range(0, images, stream.spec.batch):
        yield from decode_positions([np.arange(start, start + stream.spec.batch)], *source)


def loader(stream: Stream, epoch: int, images: int, workers: int, decode: Decode) -> Iterator[int]:
    """Yield batch sizes of a DataLoader over the same epoch."""
    source = EpochInput(stream.rows, stream.order(epoch), stream.view(epoch))
    starts: Any = range(0, images, stream.spec.batch)

    def decode_batch(start: Any) -> tuple[Tensor, Tensor]:
        return decode(np.arange(start, start + stream.spec.batch), source)

    # Forked, as is usual on Linux; the processes use neither Ray nor threads.
    forked: Any = {"num_workers": workers, "multiprocessing_context": "fork"}
    for pixels, _ in DataLoader(starts, batch_size=None, collate_fn=decode_batch, **forked):
        yield len(pixels)


def ours(positions: np.ndarray, source: EpochInput) -> tuple[Tensor, Tensor]:
    """Decode as the stream does."""
    blocks = list(decode_positions([positions], *source))
    image, label = (np.concatenate([block[name] for block in blocks]) for name in ("image", "label"))
    return torch.from_numpy(image), torch.from_numpy(label)


def torchvision_v2(positions: np.ndarray, source: EpochInput) -> tuple[Tensor, Tensor]:
    """Decode by torchvision's tensor pipeline: decode_jpeg, crop, resize and flip on uint8."""
    transform: Any = v2.Compose([v2.RandomResizedCrop(source.view.size, antialias=True), v2.RandomHorizontalFlip()])
    contents, labels = source.encoded(positions)
    buffers = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    return torch.stack([transform(decode_jpeg(buffer, ImageReadMode.RGB)) for buffer in buffers]), labels


def pil(positions: np.ndarray, source: EpochInput) -> tuple[Tensor, Tensor]:
    """Decode by the most common pipeline: Pillow, ToTensor, Normalize, float32."""
    transform: Any = transforms.Compose(
        [
            transforms.RandomResizedCrop(source.view.size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    contents, labels = source.encoded(positions)
    return torch.stack([transform(Image.open(io.BytesIO(content)).convert("RGB")) for content in contents]), labels
