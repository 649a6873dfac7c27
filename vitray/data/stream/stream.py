"""A split as each worker's batches, in a reproducible order; a reader decodes them, wherever it does.

Ray Data is one reader (ray_reader.py), processes of this machine are the other (local_reader.py).
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import Protocol

import numpy as np

from vitray.config.training import Balance
from vitray.data.augment.draws import read_draws
from vitray.data.shards.manifest import Dataset
from vitray.data.stream.balance import ClassBalance, class_weights, sums_by_class
from vitray.data.stream.batches import HostBatch, Share, StreamSpec
from vitray.data.stream.decoding import (
    Images,
    SplitRows,
    ViewSettings,
    columns_of,
    empty_images,
    locate_rows,
    read_labels,
    sent_draws,
)
from vitray.data.stream.epoch_order import EpochOrder, positions_of
from vitray.errors import ConfigError

# Images whose labels are in memory together.
LABELS_AT_ONCE = 2**16


class Reader(Protocol):
    """Decodes the images of a stream for one worker, step by step: exactly the planned ones, in order."""

    def train(self, steps: range, share: Share) -> Generator[Images, None, None]:
        """Yield a worker's images of some steps of the run, across epochs."""
        ...

    def evaluate(self, share: Share) -> Generator[Images, None, None]:
        """Yield a worker's images of each step of an evaluation, in the stored order; the last steps may have fewer."""
        ...


class Stream:
    """One split of a dataset as batches."""

    def __init__(self, dataset: Dataset, spec: StreamSpec, open_reader: "Callable[[Stream], Reader]") -> None:
        """`open_reader` is RayReader, or returns a LocalReader."""
        self.dataset, self.spec, self.rows = dataset, spec, locate_rows(dataset, spec.split)
        self.corrupt: dict[str, int] = {}
        """{shard:row of a corrupt image: number of times that this worker replaced it, 0 of those of other workers}."""
        self._merged: set[str] = set()
        groups, mask = self.rows.groups, spec.row_mask
        if mask is None:
            self._used = None, groups
        else:
            self._used = np.flatnonzero(mask), np.add.reduceat(mask.astype(np.int64), self.rows.starts[:-1])
        self._balance = None
        if spec.balance != "none":
            labels, used = read_labels(all_rows := np.arange(self.rows.starts[-1]), self.rows), self._used[0]
            used = all_rows if used is None else used
            self._balance = class_balance(dataset, self.rows, labels, used, spec.balance, spec.seed)
        self._reader: Reader = open_reader(self)

    @property
    def images(self) -> int:
        """The number of images to use."""
        return int(self._used[1].sum())

    @property
    def no_images(self) -> Images:
        """The columns of decoded images, of none."""
        return empty_images(self.spec.kinds, self.rows.no_labels)

    @property
    def steps(self) -> int:
        """Whole global batches in an epoch; each epoch leaves out different images."""
        return self.images // self.spec.batch

    def order(self, epoch: int | None) -> EpochOrder:
        """Return the order of an epoch, or the stored order; reads no image."""
        used, groups = self._used
        if epoch is None:
            return EpochOrder(groups, used, None)
        shuffle = self.dataset.identity, self.spec.seed, epoch
        return EpochOrder(groups, used, shuffle, self.spec.repeats, self._balance)

    def view(self, epoch: int) -> ViewSettings:
        """Return the settings of the views of an epoch; an evaluation has those of epoch 0."""
        return ViewSettings(self.spec.kinds, self.spec.seed, epoch)

    def train(self, start: int, end: int, share: Share) -> Iterator[HostBatch]:
        """Yield a worker's batches from one step of the run to another, across epochs."""
        if not self.steps:
            raise ConfigError(
                f"{self.dataset.url}: got a global batch of {self.spec.batch}, expected at most the"
                f" {self.images} images"
            )
        steps = range(start, end)
        images = self._reader.train(steps, share)
        try:
            for step, columns in zip(steps, images, strict=True):
                yield self._batch(columns, len(columns["position"]), step // self.steps)
        except GeneratorExit:  # after an error of its own, a worker waits for no other one
            images.close()
            raise

    def evaluate(self, share: Share) -> Iterator[HostBatch]:
        """Yield a worker's batches of every image once, in the stored order; every worker gets the same number.

        Corrupt images are left out.
        """
        for step, columns in enumerate(self._reader.evaluate(share)):
            is_real = columns["corrupt"] < 0  # the neighbor that replaced a corrupt image must not count twice
            self._count_corrupt(columns["corrupt"])
            count = len(positions_of(step, self.spec.batch, share.rank, share.workers))
            yield self._batch({name: column[is_real] for name, column in columns.items()}, count, 0)

    def _batch(self, images: Images, count: int, epoch: int) -> HostBatch:
        """Return a batch of `count` images, padded at its end with black ones."""
        self._count_corrupt(images["corrupt"])
        missing = count - len(images["label"])
        if missing:
            images = {
                name: np.concatenate([column, np.zeros((missing, *column.shape[1:]), column.dtype)])
                for name, column in images.items()
                if name != "row"
            } | {"row": images["row"]}
        columns = images["image"], images["label"], images["position"], images["row"]
        sent = [(number, sent_draws(kind)) for number, kind in enumerate(self.spec.kinds)]
        draws = tuple(read_draws(columns_of(images, number), augment) for number, augment in sent if augment)
        return HostBatch(*columns, epoch, draws, views=images.get("image1"))

    def _count_corrupt(self, corrupt: np.ndarray) -> None:
        for row in corrupt[corrupt >= 0]:
            group = int(np.searchsorted(self.rows.starts, row, side="right")) - 1
            shard = self.rows.shard_of_group[group]
            first = self.rows.starts[np.searchsorted(self.rows.shard_of_group, shard)]
            name = f"{self.rows.addresses[shard]}:{row - first}"
            self.corrupt[name] = self.corrupt.get(name, 0) + 1
        self.check_corrupt(self.corrupt)

    def new_corrupt(self) -> list[str]:
        """Return this worker's corrupt images that `merge_corrupt` has not seen."""
        return [name for name in list(self.corrupt) if name not in self._merged]

    def merge_corrupt(self, names: Iterable[str]) -> None:
        """Add the new corrupt images of all workers; refuse a larger share than max_corrupt."""
        for name in names:
            self.corrupt.setdefault(name, 0)
            self._merged.add(name)
        self.check_corrupt(self.corrupt)

    def check_corrupt(self, names: Collection[str]) -> None:
        """Refuse a larger share of corrupt images than max_corrupt."""
        if len(names) > self.spec.max_corrupt * self.images:
            few = ", ".join(list(names)[:5])
            raise ConfigError(
                f"{self.dataset.url}: {len(names)} of {self.images} images cannot be decoded, more than"
                f" max_corrupt {self.spec.max_corrupt:g}: {few}"
            )


def class_counts(rows: SplitRows, used: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the images that have each class, and those that are known not to have it; reads all labels."""
    present_K, absent_K = np.zeros(rows.classes, np.int64), np.zeros(rows.classes, np.int64)
    used = np.arange(rows.starts[-1]) if used is None else used
    for start in range(0, len(used), LABELS_AT_ONCE):
        labels = read_labels(used[start : start + LABELS_AT_ONCE], rows)
        present_K += sums_by_class(labels, np.ones(len(labels)), rows.classes).astype(np.int64)
        if labels.ndim > 1:
            absent_K += (labels == 0).sum(0)
    return present_K, absent_K if rows.has_lists else len(used) - present_K


def class_balance(
    dataset: Dataset, rows: SplitRows, labels: np.ndarray, used: np.ndarray, balance: Balance, seed: int
) -> ClassBalance:
    """Return how often the epochs of a run show the images of each class; `labels` are those of all rows."""
    counts_K = sums_by_class(labels[used], np.ones(len(used)), rows.classes)
    weights_K = class_weights(balance, counts_K, dataset.classes)
    return ClassBalance(labels, used, rows.starts, weights_K, f"{dataset.identity} {seed}")
