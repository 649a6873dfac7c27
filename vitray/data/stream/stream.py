"""The door to Ray Data: an epoch or an evaluation as one worker's batches, in the plan's order.

Each worker runs its own Ray Data pipeline over its own part of the plan: from_items(pieces of the plan) ->
map_batches(read, decode, augment). Nothing is split by Ray, so nothing is dropped, and no worker waits for another's.
"""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import ray
import ray.data
from ray.data import ExecutionResources

from vitray.config.augmentation import Augment, CentreCrop
from vitray.data.shards.manifest import Dataset
from vitray.data.stream.cache import decoded_split
from vitray.data.stream.decoding import BLOCK_BYTES, Block, Order, View, decode_rows, empty_block, rows_of
from vitray.data.stream.epoch_order import Cursor, epoch_order, evaluation_positions, positions_of, repeated
from vitray.errors import ConfigError, nearest

# A line for each epoch of each worker, which DataContext cannot turn off.
logging.getLogger("ray.data._internal.execution.streaming_executor").setLevel(logging.WARNING)
logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
# Two streams at once, as an evaluation beside training is, log to one file only.
logging.getLogger("ray.data._internal.logging").setLevel(logging.ERROR)

# About a second of decoding: enough to hide what starting a task costs, little enough to share out. A power of two:
# a task that begins and ends within the plan's regions reads fewer row groups twice.
ROWS_PER_TASK = 1024
TASK_BYTES = 160 * 2**20


class Share(NamedTuple):
    """This worker among all."""

    rank: int
    workers: int


class HostBatch(NamedTuple):
    """One worker's part of one step, on the host."""

    images: np.ndarray
    """uint8, BHWC."""
    labels: np.ndarray
    positions: np.ndarray
    """Within the epoch, or in the stored order; step * global batch is the first of the step."""
    rows: np.ndarray
    """Of the split, in the stored order."""
    weights: np.ndarray
    """1 for an image that counts, 0 for one that only fills an evaluation's last step."""


class Stream:
    """One split of a dataset, as batches."""

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        *,
        batch: int,
        size: tuple[int, int],
        crop: Augment | CentreCrop,
        seed: int = 0,
        copies: int = 1,
        max_corrupt: float = 0.001,
        memory: int | None = None,
        cache: Literal["none", "decoded"] = "none",
        only: np.ndarray | None = None,
    ) -> None:
        """`batch` is the global one; `memory` bounds the object store that this worker's blocks may fill, in bytes.

        `only` says of each row of the split whether it takes part; the others are neither read nor counted.
        `cache="decoded"` takes pixels that are decoded once for the whole cluster; it changes no image.
        """
        if split not in dataset.splits:
            known = ", ".join(dataset.splits)
            raise ConfigError(
                f"{dataset.url}: no split {split!r}, wanted one of {known}{nearest(split, dataset.splits)}"
            )
        self.dataset, self.split, self.rows, self.cache = dataset, split, rows_of(dataset, split), cache
        self.batch, self.size, self.crop = batch, size, crop
        self.seed, self.copies, self.max_corrupt, self.memory = seed, copies, max_corrupt, memory
        self.only = only
        self.corrupt: dict[str, int] = {}
        """`shard:row` of each image that could not be decoded, and how often the next of the order took its place."""

    @property
    def images(self) -> int:
        """Images that take part."""
        return int(self.rows.starts[-1] if self.only is None else self.only.sum())

    @property
    def steps(self) -> int:
        """Whole global batches in an epoch; what is left over is other images in every epoch."""
        return self.images // self.batch

    def order(self, epoch: int) -> Order:
        """The rows of an epoch by position, and which copy of its image each is, without reading an image."""
        rows = epoch_order(self.rows.groups, self.seed, epoch, self.dataset.identity)
        if self.only is not None:
            rows = rows[self.only[rows]]
        return Order(*repeated(rows, self.copies))

    def train(self, cursor: Cursor, share: Share) -> Iterator[HostBatch]:
        """A worker's batches from the cursor to the end of its epoch."""
        if not self.steps:
            raise ConfigError(
                f"{self.dataset.url}: got a global batch of {self.batch}, wanted at most the {self.images} images"
            )
        steps = range(cursor.step, self.steps)
        positions = [positions_of(step, self.batch, *share) for step in steps]
        if positions:
            yield from self._batches(np.stack(positions), self.order(cursor.epoch), cursor.epoch)

    def evaluate(self, share: Share) -> Iterator[HostBatch]:
        """A worker's batches of every image once, in the stored order; all workers get the same number of them."""
        everything = np.arange(self.images) if self.only is None else np.flatnonzero(self.only)
        positions = evaluation_positions(self.images, self.batch, *share)
        yield from self._batches(positions, Order(everything, np.zeros_like(everything)), 0)

    def _batches(self, positions: np.ndarray, order: Order, epoch: int) -> Iterator[HostBatch]:
        """The images at some positions, a row of them a step, as batches; -1 is a place to fill."""
        real = positions >= 0
        view = View(self.size, self.crop, self.seed, epoch)
        blocks = self._decoded(positions[real], order, view) if real.any() else iter(())
        for step, part in zip(positions, _rechunk(blocks, real.sum(axis=1), empty_block(self.size)), strict=True):
            # The law of order, asserted and not hoped: these are the planned images, none missing, none twice.
            assert np.array_equal(part["position"], step[step >= 0]), f"got {part['position']}, planned {step}"
            self._count(part["corrupt"])
            yield _filled(part, len(step))

    def _decoded(self, positions: np.ndarray, order: Order, view: View) -> Iterator[Block]:
        """Blocks of decoded images from Ray Data, in order."""
        rows = self._rows_per_task()
        pieces = [positions[at : at + rows] for at in range(0, len(positions), rows)]
        source = self.rows
        if self.cache == "decoded":
            source = source._replace(decoded=decoded_split(self.dataset, self.split))
        plan = ray.put((source, order, view))  # once, not with every task
        items = ray.data.from_items(
            [{"positions": piece.tobytes()} for piece in pieces], override_num_blocks=len(pieces)
        )
        images = items.map_batches(partial(_decode_item, plan=plan), batch_size=1)  # pyright: ignore[reportArgumentType]
        images.context.execution_options.preserve_order = True
        # A block leaves its task when it is full; Ray would gather 128 MiB, a second or two of waiting for the first.
        images.context.target_max_block_size = BLOCK_BYTES
        # Ray pauses a task that is two unread blocks ahead, and a paused task keeps its CPU: while a worker waits in an
        # all-reduce, its paused task would keep the CPU that another needs to get there. So any task may end unread.
        images.context._max_num_blocks_in_streaming_gen_buffer = 2 + 2 * rows * self._image_bytes // BLOCK_BYTES
        if self.memory is not None:
            images.context.execution_options.resource_limits = ExecutionResources(object_store_memory=self.memory)
        images.context.enable_progress_bars = False
        images.context.print_on_execution_start = False
        return iter(images.iter_batches(batch_size=None, batch_format="numpy"))  # pyright: ignore[reportReturnType]

    @property
    def _image_bytes(self) -> int:
        return self.size[0] * self.size[1] * 3

    def _rows_per_task(self) -> int:
        """As many as fit the object store several times over, since a task may have to leave all its pixels there."""
        # Of the object store Ray Data takes half.
        memory = self.memory or int(ray.cluster_resources()["object_store_memory"]) // 2
        rows = ROWS_PER_TASK
        while rows > 1 and rows * self._image_bytes > min(TASK_BYTES, memory // 4):
            rows //= 2
        return rows

    def _count(self, corrupt: np.ndarray) -> None:
        for row in corrupt[corrupt >= 0]:
            group = int(np.searchsorted(self.rows.starts, row, side="right")) - 1
            shard = self.rows.shard_of_group[group]
            first = self.rows.starts[np.searchsorted(self.rows.shard_of_group, shard)]
            name = f"{self.rows.addresses[shard]}:{row - first}"
            self.corrupt[name] = self.corrupt.get(name, 0) + 1
        if len(self.corrupt) > self.max_corrupt * self.images:
            few = ", ".join(list(self.corrupt)[:5])
            raise ConfigError(
                f"{self.dataset.url}: {len(self.corrupt)} of {self.images} images cannot be decoded, more than"
                f" max_corrupt {self.max_corrupt:g}: {few}"
            )


def _decode_item(item: dict[str, np.ndarray], plan: ray.ObjectRef) -> Iterator[Block]:
    yield from decode_rows(np.frombuffer(item["positions"][0], np.int64), *ray.get(plan))


def _rechunk(blocks: Iterator[Block], counts: np.ndarray, empty: Block) -> Iterator[Block]:
    """The rows of some blocks, regrouped to these counts; copied only where a count spans two blocks."""
    block, at = empty, 0
    for count in counts:
        parts, missing = [], int(count)
        while missing:
            if at == len(block["position"]):
                block, at = next(blocks), 0
            taken = min(missing, len(block["position"]) - at)
            parts.append({name: column[at : at + taken] for name, column in block.items()})
            at, missing = at + taken, missing - taken
        yield (
            parts[0]
            if len(parts) == 1
            else {name: np.concatenate([p[name] for p in parts or [empty]]) for name in empty}
        )


def _filled(part: Block, count: int) -> HostBatch:
    """A batch of `count` images, black ones without weight after the real ones."""
    missing = count - len(part["label"])
    if missing:
        part = {
            name: np.concatenate([column, np.zeros((missing, *column.shape[1:]), column.dtype)])
            for name, column in part.items()
        }
    weights = (np.arange(count) < count - missing).astype(np.float32)
    return HostBatch(part["image"], part["label"], part["position"], part["row"], weights)
