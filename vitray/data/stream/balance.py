"""Rare classes: which images an epoch draws, and how often, as a function of (dataset, seed, epoch).

The images of a class stand in a circle, in an order that is drawn once. Each epoch takes the next of them, as many as
the class's share of an epoch: of a rare class every image several times, of a frequent one some, and all of a class
equally often over the epochs. An epoch keeps its number of images. Shapes: K classes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitray.config.training import Balance
from vitray.data.augment.keyed_random import raw_draws
from vitray.data.shards.manifest import Labels
from vitray.errors import ConfigError, nearest

# Shares of an epoch are whole numbers of these parts of an image, so that sums are exact.
PARTS = 2**20
GOLDEN = 648_055  # of PARTS: multiples of the golden ratio spread most evenly


class ClassDraw(NamedTuple):
    """One class in one epoch."""

    images: int
    shown: int
    """Times that an image of it is shown."""

    @property
    def left_out(self) -> int:
        """The images that are not shown."""
        return max(0, self.images - self.shown)

    @property
    def repeated(self) -> int:
        """The images that are shown more than once."""
        return min(self.images, max(0, self.shown - self.images))


class ClassBalance:
    """The draws of the epochs of a run."""

    def __init__(
        self, labels: np.ndarray, used: np.ndarray, starts: np.ndarray, weights_K: np.ndarray, key: str
    ) -> None:
        """`labels`: of each row of the split; `used`: the rows in use; `starts`: the first row of each row group, and
        the end; `weights_K`: of an image of each class, relative to the others."""
        self._rows, self._starts = len(labels), starts
        order = used[np.argsort(raw_draws(f"balance {key}", self._rows)[used], kind="stable")]
        order = order[np.argsort(labels[order], kind="stable")]
        self._counts_K = np.bincount(labels[used], minlength=len(weights_K))
        self._circles = np.split(order, np.cumsum(self._counts_K)[:-1])
        shares_K = self._counts_K * weights_K
        ends_K = np.round(np.cumsum(shares_K) / shares_K.sum() * len(used) * PARTS).astype(np.int64)
        ends_K[-1] = len(used) * PARTS  # together they are the images of an epoch
        self._ends = np.concatenate([[0], ends_K])

    def of_classes(self, epoch: int) -> list[ClassDraw]:
        """Return how often the images of each class are shown in an epoch."""
        shown_K = self._shown(epoch, 1)[0].tolist()
        return [ClassDraw(*each) for each in zip(self._counts_K.tolist(), shown_K, strict=True)]

    def of_rows(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the number of images of each row group that an epoch shows, their rows, ascending, and how often each
        of these is among those before it."""
        times = np.zeros(self._rows, np.int64)
        begins_K = self._shown(0, epoch).sum(axis=0)
        for circle, begin, number in zip(self._circles, begins_K, self._shown(epoch, 1)[0], strict=True):
            if len(circle):
                rounds, rest = divmod(int(number), len(circle))
                times[circle] = rounds
                times[circle[(begin + np.arange(rest)) % len(circle)]] += 1
        ends, rows = np.concatenate([[0], np.cumsum(times)]), np.repeat(np.arange(self._rows), times)
        return np.diff(ends[self._starts]), rows, np.arange(len(rows)) - np.repeat(ends[:-1], times)

    def _shown(self, first: int, epochs: int) -> np.ndarray:
        """How many images of each class each of some epochs shows: the class's share, rounded up or down.

        Which of both, a sequence decides that spreads evenly, so that the mean over epochs is the share.
        """
        offsets = np.arange(first, first + epochs, dtype=np.int64) * GOLDEN % PARTS
        return np.diff((self._ends + offsets[:, np.newaxis]) // PARTS, axis=1)


def class_weights(
    balance: Balance, counts_K: np.ndarray, classes: Sequence[str], setting: str = "data.balance"
) -> np.ndarray:
    """Return the weight of an image of each class, relative to the others."""
    present_K = np.maximum(1.0, counts_K)
    if isinstance(balance, str):
        return {"none": np.ones(len(classes)), "square_root": present_K**-0.5, "equal": 1 / present_K}[balance]
    for name in balance:
        if name not in classes:
            raise ConfigError(f"{setting}: got {name}, which is no class of the dataset{nearest(name, classes)}")
    return np.array([balance.get(name, 1.0) for name in classes])


def loss_weights(
    balance: Balance, counts_K: np.ndarray, absent_K: np.ndarray, classes: Sequence[str], labels: Labels
) -> np.ndarray:
    """Return the weight of each class in the loss, from the numbers of images that have it, and that lack it.

    Of one label an image, the mean over the images is 1. Of several, it is that of a present class against an absent
    one.
    """
    weights_K = class_weights(balance, counts_K, classes, "task.class_weights")
    if isinstance(balance, dict):
        return weights_K
    if labels == "one":
        return weights_K * counts_K.sum() / (weights_K * counts_K).sum()
    power = {"none": 0.0, "square_root": 0.5, "equal": 1.0}[balance]
    return (np.maximum(1, absent_K) / np.maximum(1, counts_K)) ** power
