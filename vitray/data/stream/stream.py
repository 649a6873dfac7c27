"""The door to Ray Data: an epoch or an evaluation as one worker's batches, in a reproducible order.

Each worker runs its own Ray Data pipeline over its own positions: from_items(positions) -> map_batches(read, decode,
augment). Ray splits nothing, so it drops no image, and no worker waits for another's pipeline.
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
from vitray.data.stream.decoding import (
    BLOCK_BYTES,
    Block,
    EpochOrder,
    ViewSettings,
    decode_rows,
    empty_block,
    locate_rows,
)
from vitray.data.stream.epoch_order import Cursor, evaluation_positions, positions_of, repeated, shuffle_rows
from vitray.errors import ConfigError

# Ray Data logs a line per epoch and worker, which DataContext cannot turn off.
logging.getLogger("ray.data._internal.execution.streaming_executor").setLevel(logging.WARNING)
logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
# It also warns that two concurrent streams, such as training and evaluation, log to one file.
logging.getLogger("ray.data._internal.logging").setLevel(logging.ERROR)

# About a second of decoding: long beside the start of a task, short enough to balance. A power of two aligns tasks with
# the regions of the order, so that fewer row groups are read twice.
ROWS_PER_TASK = 1024
TASK_BYTES = 160 * 2**20


class Share(NamedTuple):
    """The part of one worker: its rank among all workers."""

    rank: int
    workers: int


class HostBatch(NamedTuple):
    """One worker's part of one step, on the host."""

    images: np.ndarray
    """uint8, BHWC."""
    labels: np.ndarray
    positions: np.ndarray
    """In the epoch, or in the stored order of an evaluation; a step starts at step * global batch."""
    rows: np.ndarray
    """Row numbers in the stored order of the split."""
    weights: np.ndarray
    """1 for an image, 0 for padding in an evaluation's last step."""


class StreamSpec(NamedTuple):
    """The settings of one stream."""

    split: str
    batch: int
    """Images of a global batch, over all workers."""
    size: tuple[int, int]
    crop: Augment | CentreCrop
    seed: int = 0
    copies: int = 1
    """Views of each image per epoch (repeated augmentation)."""
    max_corrupt: float = 0.001
    memory: int | None = None
    """Limit of this worker's blocks in the object store, in bytes."""
    cache: Literal["none", "decoded"] = "none"
    """`decoded` reads pixels that the cluster decodes once; it changes no image."""
    row_mask: np.ndarray | None = None
    """True for each row of the split to use; the other rows are neither read nor counted."""


class Stream:
    """One split of a dataset as batches."""

    def __init__(self, dataset: Dataset, spec: StreamSpec) -> None:
        self.dataset, self.spec, self.rows = dataset, spec, locate_rows(dataset, spec.split)
        self.corrupt: dict[str, int] = {}
        """{shard:row of a corrupt image: number of times that it was replaced}."""

    @property
    def images(self) -> int:
        """The number of images to use."""
        mask = self.spec.row_mask
        return int(self.rows.starts[-1] if mask is None else mask.sum())

    @property
    def steps(self) -> int:
        """Whole global batches in an epoch; each epoch leaves out different images."""
        return self.images // self.spec.batch

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch without reading an image."""
        rows = shuffle_rows(self.rows.groups, self.spec.seed, epoch, self.dataset.identity)
        if self.spec.row_mask is not None:
            rows = rows[self.spec.row_mask[rows]]
        return EpochOrder(*repeated(rows, self.spec.copies))

    def view(self, epoch: int) -> ViewSettings:
        """Return the settings of the views of an epoch."""
        return ViewSettings(self.spec.size, self.spec.crop, self.spec.seed, epoch)

    def train(self, cursor: Cursor, share: Share) -> Iterator[HostBatch]:
        """Yield a worker's batches from the cursor to the end of its epoch."""
        if not self.steps:
            raise ConfigError(
                f"{self.dataset.url}: got a global batch of {self.spec.batch}, wanted at most the {self.images} images"
            )
        steps = range(cursor.step, self.steps)
        positions = [positions_of(step, self.spec.batch, *share) for step in steps]
        if positions:
            yield from self._batches(np.stack(positions), self.order(cursor.epoch), cursor.epoch)

    def evaluate(self, share: Share) -> Iterator[HostBatch]:
        """Yield a worker's batches of every image once, in the stored order; every worker gets the same number."""
        mask = self.spec.row_mask
        rows = np.arange(self.images) if mask is None else np.flatnonzero(mask)
        positions = evaluation_positions(self.images, self.spec.batch, *share)
        yield from self._batches(positions, EpochOrder(rows, np.zeros_like(rows)), 0)

    def _batches(self, positions: np.ndarray, order: EpochOrder, epoch: int) -> Iterator[HostBatch]:
        """Yield the batches of some positions, one row per step; -1 stands for padding."""
        real = positions >= 0
        blocks = self._decode(positions[real], order, self.view(epoch)) if real.any() else iter(())
        parts = _rechunk(blocks, real.sum(axis=1), empty_block(self.spec.size))
        for step, part in zip(positions, parts, strict=True):
            # Exactly the planned images, in order.
            assert np.array_equal(part["position"], step[step >= 0]), f"got {part['position']}, planned {step}"
            self._count_corrupt(part["corrupt"])
            yield _padded(part, len(step))

    def _decode(self, positions: np.ndarray, order: EpochOrder, view: ViewSettings) -> Iterator[Block]:
        """Return blocks of decoded images from Ray Data, in order."""
        rows = self._rows_per_task()
        pieces = [positions[at : at + rows] for at in range(0, len(positions), rows)]
        source = self.rows
        if self.spec.cache == "decoded":
            source = source._replace(decoded=decoded_split(self.dataset, self.spec.split))
        shared = ray.put((source, order, view))  # once, not with every task
        items = ray.data.from_items(
            [{"positions": piece.tobytes()} for piece in pieces], override_num_blocks=len(pieces)
        )
        images = items.map_batches(partial(_decode_item, shared=shared), batch_size=1)  # pyright: ignore[reportArgumentType]
        images.context.execution_options.preserve_order = True
        # Ray's default of 128 MiB would delay the first batch by a second or two.
        images.context.target_max_block_size = BLOCK_BYTES
        # Ray pauses a task that is two unread blocks ahead, and a paused task keeps its CPU. A worker that waits in an
        # all-reduce would then block the others (a deadlock), so the buffer holds all blocks of a task.
        images.context._max_num_blocks_in_streaming_gen_buffer = 2 + 2 * rows * self._image_bytes // BLOCK_BYTES
        if self.spec.memory is not None:
            images.context.execution_options.resource_limits = ExecutionResources(object_store_memory=self.spec.memory)
        images.context.enable_progress_bars = False
        images.context.print_on_execution_start = False
        return iter(images.iter_batches(batch_size=None, batch_format="numpy"))  # pyright: ignore[reportReturnType]

    @property
    def _image_bytes(self) -> int:
        return self.spec.size[0] * self.spec.size[1] * 3

    def _rows_per_task(self) -> int:
        """Return a number of rows whose pixels fit the object store several times: a task may leave them all there."""
        # Ray Data uses half of the object store.
        memory = self.spec.memory or int(ray.cluster_resources()["object_store_memory"]) // 2
        rows = ROWS_PER_TASK
        while rows > 1 and rows * self._image_bytes > min(TASK_BYTES, memory // 4):
            rows //= 2
        return rows

    def _count_corrupt(self, corrupt: np.ndarray) -> None:
        for row in corrupt[corrupt >= 0]:
            group = int(np.searchsorted(self.rows.starts, row, side="right")) - 1
            shard = self.rows.shard_of_group[group]
            first = self.rows.starts[np.searchsorted(self.rows.shard_of_group, shard)]
            name = f"{self.rows.addresses[shard]}:{row - first}"
            self.corrupt[name] = self.corrupt.get(name, 0) + 1
        if len(self.corrupt) > self.spec.max_corrupt * self.images:
            few = ", ".join(list(self.corrupt)[:5])
            raise ConfigError(
                f"{self.dataset.url}: {len(self.corrupt)} of {self.images} images cannot be decoded, more than"
                f" max_corrupt {self.spec.max_corrupt:g}: {few}"
            )


def _decode_item(item: dict[str, np.ndarray], shared: ray.ObjectRef) -> Iterator[Block]:
    yield from decode_rows(np.frombuffer(item["positions"][0], np.int64), *ray.get(shared))


def _rechunk(blocks: Iterator[Block], counts: np.ndarray, empty: Block) -> Iterator[Block]:
    """Regroup the rows of blocks to these counts; copies only where a count spans two blocks."""
    block, at = empty, 0
    for count in counts:
        parts, missing = [], int(count)
        while missing:
            if at == len(block["position"]):
                block, at = next(blocks), 0
            taken = min(missing, len(block["position"]) - at)
            parts.append({name: column[at : at + taken] for name, column in block.items()})
            at, missing = at + taken, missing - taken
        if len(parts) == 1:
            yield parts[0]
        else:
            yield {name: np.concatenate([part[name] for part in parts or [empty]]) for name in empty}


def _padded(part: Block, count: int) -> HostBatch:
    """Return a batch of `count` images, padded with black ones of weight 0."""
    missing = count - len(part["label"])
    if missing:
        part = {
            name: np.concatenate([column, np.zeros((missing, *column.shape[1:]), column.dtype)])
            for name, column in part.items()
        }
    weights = (np.arange(count) < count - missing).astype(np.float32)
    return HostBatch(part["image"], part["label"], part["position"], part["row"], weights)
