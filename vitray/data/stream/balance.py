"""Rare classes: which images an epoch draws, and how often, as a function of (dataset, seed, epoch).

The images of a class stand in a circle, in an order that is drawn once. Each epoch takes the next of them, as many as
the class's share of an epoch: of a rare class every image several times, of a frequent one some, and all of a class
equally often over the epochs. An epoch keeps its number of images.

Of several labels an image, it stands with the one of most weight: in the circle of its rarest class, as the repeat
factors of LVIS do (Gupta et al., 2019). Images without any have a circle of the least weight.

Shapes: N images, K classes, G circles.
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
    repeated: int
    """The images that are shown more than once."""
    left_out: int
    """The images that are not shown."""


class ClassBalance:
    """The draws of the epochs of a run."""

    def __init__(
        self, labels: np.ndarray, used: np.ndarray, starts: np.ndarray, weights_K: np.ndarray, key: str
    ) -> None:
        """`labels`: of each row of the split, or states (NxK); `used`: the rows in use; `starts`: the first row of each
        row group, and the end; `weights_K`: of an image of each class, relative to the others."""
        self._rows, self._starts = len(labels), starts
        circle_N, weights_G = circles_of(labels, weights_K)
        order = used[np.argsort(raw_draws(f"balance {key}", self._rows)[used], kind="stable")]
        order = order[np.argsort(circle_N[order], kind="stable")]
        counts_G = np.bincount(circle_N[used], minlength=len(weights_G))
        self._circles = np.split(order, np.cumsum(counts_G)[:-1])
        shares_G = counts_G * weights_G
        ends_G = np.round(np.cumsum(shares_G) / shares_G.sum() * len(used) * PARTS).astype(np.int64)
        ends_G[-1] = len(used) * PARTS  # together they are the images of an epoch
        self._ends = np.concatenate([[0], ends_G])

    def of_rows(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the number of images of each row group that an epoch shows, their rows, ascending, and how often each
        of these is among those before it."""
        times = self.times(epoch)
        ends, rows = np.concatenate([[0], np.cumsum(times)]), np.repeat(np.arange(self._rows), times)
        return np.diff(ends[self._starts]), rows, np.arange(len(rows)) - np.repeat(ends[:-1], times)

    def times(self, epoch: int) -> np.ndarray:
        """Return how often an epoch shows each row of the split."""
        times = np.zeros(self._rows, np.int64)
        begins_G = self._shown(0, epoch).sum(axis=0)
        for circle, begin, number in zip(self._circles, begins_G, self._shown(epoch, 1)[0], strict=True):
            if len(circle):
                rounds, rest = divmod(int(number), len(circle))
                times[circle] = rounds
                times[circle[(begin + np.arange(rest)) % len(circle)]] += 1
        return times

    def _shown(self, first: int, epochs: int) -> np.ndarray:
        """How many images of each circle each of some epochs shows: the circle's share, rounded up or down.

        Which of both, a sequence decides that spreads evenly, so that the mean over epochs is the share.
        """
        offsets = np.arange(first, first + epochs, dtype=np.int64) * GOLDEN % PARTS
        return np.diff((self._ends + offsets[:, np.newaxis]) // PARTS, axis=1)


def circles_of(labels: np.ndarray, weights_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the circle of each image (N) and the weight of each circle (G); the last one is of images without a class.

    Of classes of equal weight, the first counts.
    """
    if labels.ndim == 1:
        return labels, weights_K
    circle_N, most_N = np.full(len(labels), len(weights_K)), np.zeros(len(labels))
    for label, weight in enumerate(weights_K):
        is_more_N = (labels[:, label] == 1) & (weight > most_N)
        circle_N[is_more_N], most_N[is_more_N] = label, weight
    return circle_N, np.append(weights_K, weights_K.min())


def class_draws(labels: np.ndarray, used: np.ndarray, times: np.ndarray, num_classes: int) -> list[ClassDraw]:
    """Return how often an epoch shows the images of each class, from how often it shows each image."""
    ones = np.ones(len(used), np.int64)
    images, shown, repeated, left_out = (
        sums_by_class(labels[used], weight_N, num_classes)
        for weight_N in (ones, times[used], times[used] > 1, times[used] == 0)
    )
    return [ClassDraw(*map(int, each)) for each in zip(images, shown, repeated, left_out, strict=True)]


def sums_by_class(labels: np.ndarray, weight_N: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the sum of the weights of the images that have each class (K)."""
    if labels.ndim == 1:
        return np.bincount(labels, weight_N, num_classes)
    return np.array([weight_N[labels[:, label] == 1].sum() for label in range(num_classes)], float)


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
