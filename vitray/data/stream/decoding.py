"""The work of a Ray Data task: read rows of a split from its shards, decode and augment them, in order.

The result depends on neither process nor time: a task that is retried gives the same pixels. With `data.augment.on:
device` it gives crops, and the draws of the rest as further columns. torch takes seconds and hundreds of MB, so only
functions that need it import it: Ray Data's coordinator loads this module and decodes nothing.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vitray.config.augmentation import Augment, CenterCrop
from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.augment.draws import draw_columns, write_draws
from vitray.data.augment.keyed_random import generator
from vitray.data.augment.views import ViewKind
from vitray.data.shards.checking import check_shard
from vitray.data.shards.label_lists import label_states
from vitray.data.shards.manifest import Columns, Dataset, shard_errors
from vitray.data.shards.tables import check_layout
from vitray.data.stream.epoch_order import EpochOrder
from vitray.errors import ConfigError, nearest
from vitray.system import storage

if TYPE_CHECKING:
    import ray

# Concurrent reads from an object store: one by one, 16 row groups at 50 ms a request take longer than their decoding.
READS_AT_ONCE = 8
# Remote shards whose size and footer (13 KB) a process remembers; 525 shards of 256 MiB hold ImageNet.
REMOTE_SHARDS = 2048
# Seconds in which one call checks shards that this machine has not checked; later calls go on. Ray Data ends an
# execution without a block for five minutes, and a slow disk may need longer for all shards of a task.
CHECK_SECONDS = 60.0

# Rows decoded for an estimate, where the shards do not record the size of their images.
SAMPLE = 64

# Columns of decoded images: image (BHWC), label (the states of all classes, BK, in a split with several labels an
# image), row of the split, position in the epoch, and the row that was corrupt;
# with `data.augment.on: device` also the draws (flip, operation, amount). Of several views, image and draws have a
# second axis; those of the second kind are image1, flip1, operation1 and amount1.
Images = dict[str, np.ndarray]
# A class, or the states of all classes (K, int8).
Label = int | np.ndarray
# {row: (encoded image, label, key)}, and the same where some images are decoded already.
EncodedRows = dict[int, tuple[bytes, Label, str]]
StoredRows = Mapping[int, tuple[bytes | np.ndarray, Label, str]]

Part = TypeVar("Part")


class DecodedBlock(NamedTuple):
    """Decoded rows in one buffer: with an array for each image, loading a block of small ones takes most of a task."""

    pixels: np.ndarray
    """Of all images, one after another."""
    shapes: np.ndarray
    """(rows, 2): height and width; zeros of a corrupt image."""
    labels: np.ndarray
    keys: list[str]

    def rows(self, numbers: np.ndarray) -> Iterator[tuple[np.ndarray | bytes, Label, str]]:
        """Yield the image, the label and the key of some rows, counted from the first of the block."""
        ends = 3 * np.cumsum(self.shapes.prod(axis=1))
        for at in numbers.tolist():
            height, width = self.shapes[at].tolist()
            image = self.pixels[ends[at] - 3 * height * width : ends[at]].reshape(height, width, 3)
            # Empty bytes stand for a corrupt image: they fail to decode as it did.
            yield image if image.size else b"", self.labels[at], self.keys[at]


class DecodedRows(NamedTuple):
    """A decoded split: rows `starts[i]` to `starts[i + 1]` are in one object of Ray."""

    starts: np.ndarray
    blocks: "list[ray.ObjectRef]"
    """References to decoded blocks."""


class SplitRows(NamedTuple):
    """The location of the rows of a split: row group `i` holds rows `starts[i]` to `starts[i + 1]`."""

    addresses: list[str]
    sizes: np.ndarray
    """Bytes of each shard, as dataset.json has them."""
    sha256: list[str]
    shard_of_group: np.ndarray
    group_in_shard: np.ndarray
    starts: np.ndarray
    columns: Columns
    classes: int
    has_lists: bool = False
    """Whether an image has several labels."""
    decoded: DecodedRows | None = None

    @property
    def groups(self) -> np.ndarray:
        """The number of rows in each row group."""
        return np.diff(self.starts)

    @property
    def no_labels(self) -> np.ndarray:
        """The labels of no image."""
        return np.empty((0, self.classes), np.int8) if self.has_lists else np.empty(0, np.int64)


class ViewSettings(NamedTuple):
    """How an image becomes its views: an evaluation's crop, or augmentations keyed by (seed, epoch, image, copy)."""

    kinds: tuple[ViewKind, ...]
    seed: int
    epoch: int


def sent_draws(kind: ViewKind) -> Augment | None:
    """Return the augmentation whose draws the worker gets beside crops; None if it gets finished views."""
    return kind.crop if isinstance(kind.crop, Augment) and kind.crop.on == "device" else None


def columns_of(images: Images, kind: int) -> Images:
    """Return the image and the draws of a kind of views, by their names without its number."""
    names = ("image", "flip", "operation", "amount")
    return {name: images[f"{name}{kind or ''}"] for name in names if f"{name}{kind or ''}" in images}


def empty_images(kinds: Sequence[ViewKind], no_labels: np.ndarray, count: int = 0) -> Images:
    """Return columns whose images are uninitialized, and whose draws are none."""
    images = {name: np.empty(count, np.int64) for name in ("row", "position", "corrupt")}
    images["label"] = np.empty((count, *no_labels.shape[1:]), no_labels.dtype)
    for number, kind in enumerate(kinds):
        shape = (count,) if kind.number is None else (count, kind.number)
        columns = {"image": np.empty((*shape, *kind.size, 3), np.uint8)}
        if sent := sent_draws(kind):
            columns |= draw_columns(sent, shape)
        images |= {f"{name}{number or ''}": column for name, column in columns.items()}
    return images


def locate_rows(dataset: Dataset, split: str) -> SplitRows:
    """Return the location of the rows of a split."""
    if split not in dataset.splits:
        known = f"{', '.join(dataset.splits)}{nearest(split, dataset.splits)}"
        raise ConfigError(f"{dataset.url}: no split {split!r}, expected one of {known}")
    shards = dataset.splits[split].shards
    counts = [len(shard.row_groups) for shard in shards]
    sizes = np.array([rows for shard in shards for rows in shard.row_groups], np.int64)
    return SplitRows(
        [dataset.address(shard) for shard in shards],
        np.array([shard.bytes for shard in shards], np.int64),
        [shard.sha256 for shard in shards],
        np.repeat(np.arange(len(shards)), counts),
        np.concatenate([np.arange(count) for count in counts]),
        np.concatenate([[0], np.cumsum(sizes)]),
        dataset.columns,
        len(dataset.classes),
        dataset.labels == "several",
    )


def decode_positions(
    parts: list[np.ndarray],
    rows: SplitRows,
    order: EpochOrder,
    view: ViewSettings,
    fetch: "Callable[[np.ndarray, SplitRows], StoredRows] | None" = None,
) -> Iterator[Images]:
    """Yield the decoded images of each part, which is a list of positions, in order; read row groups once for all.

    The next image of the order replaces one that cannot be decoded; `corrupt` is then the row of the latter, else -1.
    `fetch` returns rows of the split in place of reading them.
    """
    import torch

    torch.set_num_threads(1)  # tasks share the cores with each other and with training
    ends = np.cumsum([len(positions) for positions in parts])[:-1]
    planned, copies = order.at(np.concatenate(parts))
    fetch = fetch or _fetch_rows
    stored = fetch(planned, rows)
    for positions, wanted, numbers in zip(parts, np.split(planned, ends), np.split(copies, ends), strict=True):
        images = empty_images(view.kinds, rows.no_labels, len(positions)) | {"position": positions}
        columns = [columns_of(images, number) for number in range(len(view.kinds))]
        for index, position in enumerate(positions.tolist()):
            copy = int(numbers[index])
            for row in _candidates(int(wanted[index]), position, order):
                content, label, key = stored.get(row) or fetch(np.array([row]), rows)[row]
                with suppress(UndecodableImage):
                    _write_views(columns, index, content, key, view, copy)
                    images["row"][index], images["label"][index] = row, label
                    break
            else:
                raise UndecodableImage(f"none of {order.images} images can be decoded")
        images["corrupt"] = np.where(images["row"] == wanted, -1, wanted)
        yield images


def joined(parts: list[Images]) -> Images:
    """Return the images of all parts by ascending position; copies only if there are several parts."""
    if len(parts) == 1:
        return parts[0]
    positions = np.concatenate([part["position"] for part in parts])
    places = np.argsort(np.argsort(positions))
    joined = {name: np.empty((len(places), *column.shape[1:]), column.dtype) for name, column in parts[0].items()}
    at = 0
    for part in parts:
        count = len(part["position"])
        for name, column in part.items():
            joined[name][places[at : at + count]] = column
        at += count
    return joined


def _candidates(row: int, position: int, order: EpochOrder) -> Iterator[int]:
    """Yield the row at a position, then those after it in the order."""
    yield row
    for at in range(position + 1, position + order.images):
        yield int(order.at(np.array([at % order.images]))[0][0])


def _write_views(
    columns: Sequence[Images], index: int, content: np.ndarray | bytes, key: str, view: ViewSettings, copy: int
) -> None:
    """Write the views of an image, which is decoded once, and any draws that the worker applies.

    `columns` are those of each kind of views.
    """
    from vitray.data.augment.crops import augment_image, crop_and_draw, crop_center, decode_for_views

    # Each view of several has draws of its own, which do not change with the number of views.
    places = [(number, at) for number, kind in enumerate(view.kinds) for at in range(kind.views)]

    def random_of(kind: int, at: int) -> np.random.Generator:
        name = "" if view.kinds[kind].number is None else f":{kind}.{at}"
        return generator(view.seed, view.epoch, key, copy, name)

    whole = None
    if isinstance(content, np.ndarray):
        image_HWC = content
    elif isinstance(view.kinds[0].crop, Augment) and view.kinds[0].crop.decode == "scaled":
        shown = ((view.kinds[kind].crop, view.kinds[kind].size, random_of(kind, at)) for kind, at in places)
        image_HWC, whole = decode_for_views(content, shown)
    else:
        image_HWC = decode_image(content)
    for kind, at in places:
        size, crop, number = view.kinds[kind]
        own, place = columns[kind], (index,) if number is None else (index, at)
        if isinstance(crop, CenterCrop):
            own["image"][place] = crop_center(image_HWC, crop, size)
        elif crop.on == "device":
            crop_HWC, is_flipped, operations = crop_and_draw(image_HWC, crop, size, random_of(kind, at), whole, at)
            own["image"][place] = crop_HWC
            write_draws(own, place, is_flipped, operations)
        else:
            own["image"][place] = augment_image(image_HWC, crop, size, random_of(kind, at), whole, at)


def _fetch_rows(numbers: np.ndarray, rows: SplitRows) -> StoredRows:
    """Return some rows, decoded where the split is cached."""
    if rows.decoded is None:
        return read_rows(numbers, rows)
    import ray

    stored: dict[int, tuple[bytes | np.ndarray, Label, str]] = {}
    blocks = np.searchsorted(rows.decoded.starts, numbers, side="right") - 1
    for index in np.unique(blocks).tolist():
        wanted = numbers[blocks == index]
        block: Any = ray.get(rows.decoded.blocks[index])
        stored.update(zip(wanted.tolist(), block.rows(wanted - rows.decoded.starts[index]), strict=True))
    return stored


def read_rows(numbers: np.ndarray, rows: SplitRows) -> EncodedRows:
    """Return some rows of a split; reads each row group once."""
    stored: EncodedRows = {}
    for part in _map_groups(_read_group, numbers, rows):
        stored |= part
    return stored


def read_labels(numbers: np.ndarray, rows: SplitRows) -> np.ndarray:
    """Return the labels of some rows of a split, in the order of the split; reads no images."""
    return np.concatenate([rows.no_labels, *_map_groups(_read_group_labels, numbers, rows)])


def _map_groups(read: Callable[[SplitRows, int, np.ndarray], Part], numbers: np.ndarray, rows: SplitRows) -> list[Part]:
    """Return the result of `read` for each row group that holds some of these rows."""
    groups = np.searchsorted(rows.starts, numbers, side="right") - 1
    wanted = np.unique(groups).tolist()
    parts = [np.unique(numbers[groups == group]) for group in wanted]
    deadline = time.monotonic() + CHECK_SECONDS
    for shard in dict.fromkeys(rows.shard_of_group[wanted].tolist()):
        if time.monotonic() < deadline:
            check_shard(rows.addresses[shard], int(rows.sizes[shard]), rows.sha256[shard])
    # Threads only help where reads wait for a network.
    is_remote = any(storage.is_remote(rows.addresses[rows.shard_of_group[group]]) for group in wanted)
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        return list((pool.map if is_remote else map)(partial(read, rows), wanted, parts))


def _read_group(rows: SplitRows, group: int, numbers: np.ndarray) -> EncodedRows:
    shard = int(rows.shard_of_group[group])
    names = rows.columns
    with shard_errors(rows.addresses[shard]):
        columns = [names.image, *label_columns(names), *([names.key] if names.key else [])]
        table = _read_columns(rows, group, numbers, columns)
        # A row without bytes is a corrupt image.
        images = [image.as_buffer().to_pybytes() if image.is_valid else b"" for image in table.column(names.image)]
        keys = table.column(names.key).to_pylist() if names.key else [f"{shard}:{row}" for row in numbers]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError(f"column {names.key}: expected text in each row")
        states = _check_labels(rows, table)
        labels = list(states) if rows.has_lists else states.tolist()
    return dict(zip(numbers.tolist(), zip(images, labels, keys, strict=True), strict=True))


def _read_group_labels(rows: SplitRows, group: int, numbers: np.ndarray) -> np.ndarray:
    with shard_errors(rows.addresses[int(rows.shard_of_group[group])]):
        return _check_labels(rows, _read_columns(rows, group, numbers, label_columns(rows.columns)))


def _read_columns(rows: SplitRows, group: int, numbers: np.ndarray, columns: list[str]) -> pa.Table:
    shard = open_shard(rows, int(rows.shard_of_group[group]))
    table = shard.read_row_group(int(rows.group_in_shard[group]), columns=columns)
    # `flatten` names a column inside a struct, as Hugging Face writes images, by its dotted path.
    return table.take(numbers - rows.starts[group]).flatten()


def label_columns(columns: Columns) -> list[str]:
    """Return the names of the columns that hold labels."""
    return [columns.label, *([columns.unknown] if columns.unknown else [])]


def _check_labels(rows: SplitRows, table: pa.Table) -> np.ndarray:
    """Return the class of each image, or the states of all classes."""
    columns = {name: table.column(name).to_pylist() for name in label_columns(rows.columns)}
    for name, values in columns.items():
        lists = values if rows.has_lists else [values]
        if name == rows.columns.unknown:  # null: all classes that are not among the labels
            lists = [each for each in values if each is not None]
        if not all(
            isinstance(each, list) and all(isinstance(label, int) and 0 <= label < rows.classes for label in each)
            for each in lists
        ):
            kind = "numbers" if rows.has_lists else "a number"
            raise ValueError(f"column {name}: expected {kind} from 0 to {rows.classes - 1} in each row")
    [labels, *unknown] = columns.values()
    if not rows.has_lists:
        return np.array(labels, np.int64)
    return label_states(zip(labels, unknown[0] if unknown else [()] * len(labels), strict=True), rows.classes)


def decoded_bytes(rows: SplitRows) -> int:
    """Return the bytes of a split's pixels, estimated from a sample where files were indexed in place."""
    pixels = [_pixels(open_shard(rows, shard)) for shard in range(len(rows.addresses))]
    if None not in pixels:
        return 3 * sum(int(count) for count in pixels if count) or 1
    images = int(rows.starts[-1])
    sample = np.unique(np.linspace(0, images - 1, min(SAMPLE, images)).astype(np.int64))
    total = 0
    for content, _, _ in read_rows(sample, rows).values():
        with suppress(UndecodableImage):
            total += decode_image(content).size
    return total * images // len(sample) or 1


def _pixels(shard: pq.ParquetFile) -> int | None:
    names = ["width", "height"]
    if not {*names} <= {*shard.schema_arrow.names}:
        return None
    table = shard.read(columns=names)
    width, height = (table.column(name).to_numpy().astype(np.int64) for name in names)
    return int((width * height).sum())


def pixels_error(dataset: Dataset, split: str, size: int, most: str, memory: int, remedy: str = "") -> ConfigError:
    """Return the refusal of `data.cache: decoded` for pixels that do not fit."""
    needed, there = (f"{each / 2**20:,.0f} MiB" for each in (size, memory))
    return ConfigError(
        f"{dataset.url}: cache: decoded: split {split!r} decodes to {needed}, expected at most {most} of {there}; set"
        f" data.cache=none{remedy}"
    )


def open_shard(rows: SplitRows, shard: int) -> pq.ParquetFile:
    """Return a reader of a shard for one thread: threads may share a remote file, but not its Parquet reader."""
    url = rows.addresses[shard]
    if storage.is_remote(url):
        first, last = np.searchsorted(rows.shard_of_group, (shard, shard + 1))
        groups = tuple(np.diff(rows.starts[first : last + 1]).tolist())
        footer = _remote_footer(url, int(rows.sizes[shard]), groups)
        return pq.ParquetFile(_remote_file(url), metadata=footer, pre_buffer=True)
    return _local_shard(url)


@lru_cache(maxsize=16)  # each keeps a file open
def _local_shard(url: str) -> pq.ParquetFile:
    files, path = storage.filesystem(url)
    # A mapped file needs no read-ahead buffer, and concurrent threads would corrupt one.
    shard = pq.ParquetFile(path, memory_map=True, pre_buffer=False)
    check_layout(shard.metadata, url, files.get_file_info(path).size)
    return shard


# A task reads a row group of many shards: each request for a file's size or footer would be repeated by every task.
@lru_cache(maxsize=REMOTE_SHARDS)
def _remote_footer(url: str, size: int, row_groups: tuple[int, ...]) -> pq.FileMetaData:
    """Return the footer; refuse a file of another size or layout than in dataset.json."""
    file = _remote_file(url)
    if file.size() != size:
        raise ConfigError(f"{url}: has {file.size()} bytes, expected {size} bytes as in dataset.json")
    footer = pq.ParquetFile(file).metadata
    found = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
    if found != row_groups:
        raise ConfigError(f"{url}: its row groups are not those of dataset.json: another command has changed it")
    check_layout(footer, url, size)
    return footer


@lru_cache(maxsize=REMOTE_SHARDS)
def _remote_file(url: str) -> pa.NativeFile:
    files, path = storage.filesystem(url)
    return files.open_input_file(path)
