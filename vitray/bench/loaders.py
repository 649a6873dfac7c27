"""What the stream is measured against: a plain loop, and torch's DataLoader with three ways to make a view."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from vitray.data.stream import Stream
from vitray.data.stream.decoding import Order, Rows, View, decode_rows, read_rows

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def loop(stream: Stream, epoch: int, images: int) -> Iterator[int]:
    """The limit: the same decoding in this process, with nothing around it."""
    order = stream.order(epoch)
    view = View(stream.size, stream.crop, stream.seed, epoch)
    for start in range(0, images, stream.batch):
        positions = np.arange(start, start + stream.batch)
        for block in decode_rows(positions, stream.rows, order, view):
            yield len(block["image"])


Decode = Callable[[np.ndarray, Rows, Order, View], Any]


class Batches(IterableDataset):
    """An epoch of the plan, a batch an item, dealt to the workers of a DataLoader."""

    def __init__(self, stream: Stream, epoch: int, images: int, decode: Decode) -> None:
        self.plan = stream.rows, stream.order(epoch), View(stream.size, stream.crop, stream.seed, epoch)
        self.starts, self.batch, self.decode = range(0, images, stream.batch), stream.batch, decode

    def __iter__(self) -> Iterator[Any]:
        torch.set_num_threads(1)
        worker = get_worker_info()
        mine = self.starts if worker is None else self.starts[worker.id :: worker.num_workers]
        for start in mine:
            yield self.decode(np.arange(start, start + self.batch), *self.plan)


def loader(stream: Stream, epoch: int, images: int, workers: int, decode: Decode) -> Iterator[int]:
    """A DataLoader over the same plan, its processes as many as Ray has CPUs."""
    batches = Batches(stream, epoch, images, decode)
    # Forked, as is usual on Linux; the processes touch neither Ray nor threads.
    loader = DataLoader(batches, batch_size=None, num_workers=workers, multiprocessing_context="fork")
    for pixels, _ in loader:
        yield len(pixels)


def ours(positions: np.ndarray, rows: Rows, order: Order, view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """The same decoding as the stream's."""
    blocks = list(decode_rows(positions, rows, order, view))
    image, label = (np.concatenate([block[name] for block in blocks]) for name in ("image", "label"))
    return torch.from_numpy(image), torch.from_numpy(label)


def torchvision_v2(positions: np.ndarray, rows: Rows, order: Order, view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """Its tensor pipeline: decode_jpeg, crop, resize and flip on uint8."""
    change: Any = v2.Compose([v2.RandomResizedCrop(view.size, antialias=True), v2.RandomHorizontalFlip()])
    found = read_rows(order.rows[positions], rows)
    chosen = [found[int(row)] for row in order.rows[positions]]
    pixels = [
        decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB) for data, _, _ in chosen
    ]
    return torch.stack([change(image) for image in pixels]), torch.tensor([label for _, label, _ in chosen])


def pil(positions: np.ndarray, rows: Rows, order: Order, view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual way: Pillow, ToTensor, Normalize, float32."""
    change: Any = transforms.Compose(
        [
            transforms.RandomResizedCrop(view.size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    found = read_rows(order.rows[positions], rows)
    chosen = [found[int(row)] for row in order.rows[positions]]
    pixels = [change(Image.open(io.BytesIO(data)).convert("RGB")) for data, _, _ in chosen]
    return torch.stack(pixels), torch.tensor([label for _, label, _ in chosen])
