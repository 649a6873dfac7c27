"""What a Ray Data task does: read some rows of a split from its shards, decode them, augment them, in the plan's order.

Nothing here depends on who runs it, or when: a task that is retried gives the same pixels.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch

from vitray import storage
from vitray.config.augmentation import Augment, CentreCrop
from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.augment.image import augment_image, crop_centre
from vitray.data.augment.keyed_random import generator
from vitray.data.shards.manifest import Columns, Dataset

# A block is what moves through the object store at once; a task never holds more decoded pixels than this.
BLOCK_BYTES = 16 * 2**20
# Row groups of an object store that a task fetches side by side: one after another, 16 of them at 50 ms a request took
# longer than their images to decode.
READS_AT_ONCE = 8


class Decoded(NamedTuple):
    """A split that is decoded already: rows `starts[i]` to `starts[i + 1]` are in an object of Ray."""

    starts: np.ndarray
    blocks: list[ray.ObjectRef]
    """Of (images, labels, keys); an image without pixels is corrupt."""


class Rows(NamedTuple):
    """Where the rows of a split lie: row group `i` holds rows `starts[i]` to `starts[i + 1]`."""

    addresses: list[str]
    shard_of_group: np.ndarray
    group_in_shard: np.ndarray
    starts: np.ndarray
    columns: Columns
    decoded: Decoded | None = None

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
    found = _find_rows(order.rows[positions], rows)
    per_block = max(1, BLOCK_BYTES // (view.size[0] * view.size[1] * 3))
    for start in range(0, len(positions), per_block):
        chunk = positions[start : start + per_block]
        block = empty_block(view.size, len(chunk)) | {"position": chunk, "corrupt": np.full(len(chunk), -1)}
        for index, position in enumerate(chunk):
            row, block["image"][index], block["label"][index] = _next_good(int(position), found, rows, order, view)
            block["row"][index] = row
            if row != order.rows[position]:
                block["corrupt"][index] = order.rows[position]
        yield block


def _next_good(position: int, found: "Found", rows: Rows, order: Order, view: View) -> tuple[int, np.ndarray, int]:
    """Row, pixels and label of the image at a position, or of the first one after it that can be decoded."""
    images = len(order.rows)
    for at in range(position, position + images):
        row = int(order.rows[at % images])
        content, label, key = found.get(row) or _find_rows(order.rows[[at % images]], rows)[row]
        try:
            image = content if isinstance(content, np.ndarray) else decode_image(content)
            return row, _view(image, view, key, int(order.copies[position])), label
        except UndecodableImage:
            continue
    raise UndecodableImage(f"not one of {images} images can be decoded")


def _view(image_HWC: np.ndarray, view: View, key: str, copy: int) -> np.ndarray:
    if isinstance(view.crop, CentreCrop):
        return crop_centre(image_HWC, view.crop, view.size)
    return augment_image(image_HWC, view.crop, view.size, generator(view.seed, view.epoch, key, copy))


# {row: (encoded image, label, key)}, and the same where some images are decoded already
Encoded = dict[int, tuple[bytes, int, str]]
Found = Mapping[int, tuple[bytes | np.ndarray, int, str]]


def _find_rows(wanted: np.ndarray, rows: Rows) -> Found:
    if rows.decoded is None:
        return read_rows(wanted, rows)
    found: dict[int, tuple[bytes | np.ndarray, int, str]] = {}
    places = np.searchsorted(rows.decoded.starts, wanted, side="right") - 1
    for place in np.unique(places).tolist():
        images, labels, keys = ray.get(rows.decoded.blocks[place])
        for row in wanted[places == place].tolist():
            at = row - int(rows.decoded.starts[place])
            # No bytes, as a corrupt image has none that can be decoded.
            found[row] = images[at] if images[at].size else b"", labels[at], keys[at]
    return found


def read_rows(wanted: np.ndarray, rows: Rows) -> Encoded:
    """Some rows of a split, each row group read once."""
    groups = np.searchsorted(rows.starts, wanted, side="right") - 1
    parts = [(int(group), np.unique(wanted[groups == group])) for group in np.unique(groups)]
    found: Encoded = {}
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        # Threads only where a read waits for a network.
        far = any(storage.is_remote(rows.addresses[rows.shard_of_group[group]]) for group, _ in parts)
        for read in (pool.map if far else map)(partial(_read_group, rows), parts):
            found |= read
    return found


def _read_group(rows: Rows, part: tuple[int, np.ndarray]) -> Encoded:
    group, wanted = part
    shard = int(rows.shard_of_group[group])
    names = rows.columns
    columns = [names.image, names.label, *([names.key] if names.key else [])]
    table = _reader(rows.addresses[shard]).read_row_group(int(rows.group_in_shard[group]), columns=columns)
    # A column inside a struct, as Hugging Face writes images, is called by its path once flattened.
    table = table.take(wanted - rows.starts[group]).flatten()
    images = [image.as_buffer().to_pybytes() for image in table.column(names.image)]
    labels = table.column(names.label).to_pylist()
    keys = table.column(names.key).to_pylist() if names.key else [f"{shard}:{row}" for row in wanted]
    return dict(zip(wanted.tolist(), zip(images, labels, keys, strict=True), strict=True))


def _reader(url: str) -> pq.ParquetFile:
    """A shard that one thread may read: an opened file is read by many at once, its Parquet reader is not."""
    if storage.is_remote(url):
        return pq.ParquetFile(_remote_file(url), metadata=open_shard(url).metadata, pre_buffer=True)
    return open_shard(url)


@lru_cache(maxsize=16)
def open_shard(url: str) -> pq.ParquetFile:
    """A shard, opened once a process: its footer is not read again for every task."""
    if storage.is_remote(url):
        return pq.ParquetFile(_remote_file(url), pre_buffer=True)
    # Mapped, it has no use for a buffer of what comes next, which threads that read at once would spoil for each other.
    return pq.ParquetFile(storage.filesystem(url)[1], memory_map=True, pre_buffer=False)


@lru_cache(maxsize=16)
def _remote_file(url: str) -> pa.NativeFile:
    files, path = storage.filesystem(url)
    return files.open_input_file(path)
