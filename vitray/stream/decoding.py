"""What a Ray Data task does: read some rows of a split from its shards, decode them, augment them, in the plan's order.

Nothing here depends on who runs it, or when: a task that is retried gives the same pixels.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch

from vitray import storage
from vitray.augment.decode import UndecodableImage, decode_image
from vitray.augment.draws import generator
from vitray.augment.sample import augment_image, crop_centre
from vitray.config.augmentation import Augment, CentreCrop
from vitray.shards.manifest import Columns, Dataset

# A block is what moves through the object store at once; a task never holds more decoded pixels than this.
BLOCK_BYTES = 16 * 2**20


class Rows(NamedTuple):
    """Where the rows of a split lie: row group `i` holds rows `starts[i]` to `starts[i + 1]`."""

    addresses: list[str]
    shard_of_group: np.ndarray
    group_in_shard: np.ndarray
    starts: np.ndarray
    columns: Columns

    @property
    def groups(self) -> np.ndarray:
        """The number of rows in each row group."""
        return np.diff(self.starts)


class View(NamedTuple):
    """What becomes of an image: an evaluation's crop, or a training view drawn from (seed, epoch, image, copy)."""

    size: tuple[int, int]
    crop: Augment | CentreCrop
    seed: int
    epoch: int


class Order(NamedTuple):
    """The rows of an epoch by position, and which copy of its image each is."""

    rows: np.ndarray
    copies: np.ndarray


# Columns of decoded images: image (BHWC), label, row of the split, position in the epoch, and the row that was corrupt.
Block = dict[str, np.ndarray]


def empty_block(size: tuple[int, int], count: int = 0) -> Block:
    """A block to be filled."""
    numbers = {name: np.empty(count, np.int64) for name in ("label", "row", "position", "corrupt")}
    return {"image": np.empty((count, *size, 3), np.uint8), **numbers}


def rows_of(dataset: Dataset, split: str) -> Rows:
    """Where the rows of a split lie."""
    shards = dataset.splits[split].shards
    counts = [len(shard.row_groups) for shard in shards]
    sizes = np.array([rows for shard in shards for rows in shard.row_groups], np.int64)
    return Rows(
        [dataset.address(shard) for shard in shards],
        np.repeat(np.arange(len(shards)), counts),
        np.concatenate([np.arange(count) for count in counts]),
        np.concatenate([[0], np.cumsum(sizes)]),
        dataset.columns,
    )


def decode_rows(positions: np.ndarray, rows: Rows, order: Order, view: View) -> Iterator[Block]:
    """Blocks of decoded images for some positions, in order, with label, row and position.

    An image that cannot be decoded is replaced by the next one of the order; `corrupt` is then its row, else -1.
    """
    # Tasks share the cores with each other and with training.
    torch.set_num_threads(1)
    encoded = read_rows(order.rows[positions], rows)
    per_block = max(1, BLOCK_BYTES // (view.size[0] * view.size[1] * 3))
    for start in range(0, len(positions), per_block):
        chunk = positions[start : start + per_block]
        block = empty_block(view.size, len(chunk)) | {"position": chunk, "corrupt": np.full(len(chunk), -1)}
        for index, position in enumerate(chunk):
            row, block["image"][index], block["label"][index] = _next_good(int(position), encoded, rows, order, view)
            block["row"][index] = row
            if row != order.rows[position]:
                block["corrupt"][index] = order.rows[position]
        yield block


def _next_good(position: int, encoded: "Encoded", rows: Rows, order: Order, view: View) -> tuple[int, np.ndarray, int]:
    """Row, pixels and label of the image at a position, or of the first one after it that can be decoded."""
    images = len(order.rows)
    for at in range(position, position + images):
        row = int(order.rows[at % images])
        content, label, key = encoded.get(row) or read_rows(order.rows[[at % images]], rows)[row]
        try:
            return row, _view(decode_image(content), view, key, int(order.copies[position])), label
        except UndecodableImage:
            continue
    raise UndecodableImage(f"not one of {images} images can be decoded")


def _view(image_HWC: np.ndarray, view: View, key: str, copy: int) -> np.ndarray:
    if isinstance(view.crop, CentreCrop):
        return crop_centre(image_HWC, view.crop, view.size)
    return augment_image(image_HWC, view.crop, view.size, generator(view.seed, view.epoch, key, copy))


# {row: (encoded image, label, key)}
Encoded = dict[int, tuple[bytes, int, str]]


def read_rows(wanted: np.ndarray, rows: Rows) -> Encoded:
    """Some rows of a split, each row group read once."""
    found: Encoded = {}
    groups = np.searchsorted(rows.starts, wanted, side="right") - 1
    names = rows.columns
    columns = [names.image, names.label, *([names.key] if names.key else [])]
    for group in np.unique(groups):
        shard = int(rows.shard_of_group[group])
        mine = np.unique(wanted[groups == group])
        table = open_shard(rows.addresses[shard]).read_row_group(int(rows.group_in_shard[group]), columns=columns)
        # A column inside a struct, as Hugging Face writes images, is called by its path once flattened.
        table = table.take(mine - rows.starts[group]).flatten()
        images = table.column(names.image)
        labels = table.column(names.label).to_pylist()
        keys = table.column(names.key).to_pylist() if names.key else [f"{shard}:{row}" for row in mine]
        for row, image, label, key in zip(mine.tolist(), images, labels, keys, strict=True):
            found[row] = image.as_buffer().to_pybytes(), label, key
    return found


@lru_cache(maxsize=16)
def open_shard(url: str) -> pq.ParquetFile:
    """A shard, opened once a process: its footer is not read again for every task."""
    files, path = storage.filesystem(url)
    if storage.is_remote(url):
        return pq.ParquetFile(files.open_input_file(path), pre_buffer=True)
    return pq.ParquetFile(path, memory_map=True)
