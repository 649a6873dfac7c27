"""The order of images as a function of (dataset, seed, epoch), and its division among workers. Arithmetic only.

An epoch's order: the row groups of the split are permuted; their rows, one group after another, are cut into regions of
2048; a region is cut into 16 lanes of neighbouring rows; each lane is shuffled; the lanes are dealt out two images at a
time. So an image's neighbours come from 16 or more groups far apart, while a worker that takes every n-th pair reads
only the groups of its own lanes.

A position counts the images of an epoch. Step k of a global batch of B takes positions k * B to (k + 1) * B, and each
worker takes every n-th pair of them: pairs stay together because mixup and cutmix pair neighbours. Where the number of
workers does not divide the pairs, as in elastic training, some workers take one pair more than others.
"""

from typing import NamedTuple

import numpy as np

from vitray.data.augment.keyed_random import raw_draws

REGION, LANES, PAIR = 2048, 16, 2
# Bit-reversed: the lanes of worker r of 2, 4, 8 or 16 are neighbours, which share row groups.
DEAL = [int(f"{lane:04b}"[::-1], 2) for lane in range(LANES)]


class Cursor(NamedTuple):
    """The next step of a stream."""

    epoch: int
    step: int


def shuffle_rows(groups: np.ndarray, seed: int, epoch: int, identity: str = "") -> np.ndarray:
    """Return the rows of a split in the order of one epoch; `groups` are the sizes of its row groups."""
    total = int(groups.sum())
    key = f"{identity} {seed} {epoch}"
    # A stable sort of raw draws: numpy keeps the bits of a generator stable across versions, but not its permutations.
    permuted = np.argsort(raw_draws(f"groups {key}", len(groups)), kind="stable")
    sizes, starts = groups[permuted], (np.cumsum(groups) - groups)[permuted]
    rows = np.arange(total) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    draws = raw_draws(f"rows {key}", total)
    whole = total - total % REGION
    lanes_shape = (-1, LANES, REGION // LANES)
    shuffled = np.argsort(draws[:whole].reshape(lanes_shape), axis=2, kind="stable")
    lanes = np.take_along_axis(rows[:whole].reshape(lanes_shape), shuffled, axis=2)
    dealt = lanes[:, DEAL].reshape(-1, LANES, REGION // LANES // PAIR, PAIR).swapaxes(1, 2)
    return np.concatenate([dealt.ravel(), rows[whole:][np.argsort(draws[whole:], kind="stable")]])


def repeated(order: np.ndarray, copies: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of an epoch of repeated augmentation and their copy numbers.

    The epoch keeps its length and holds its first pairs `copies` times each. Pairs are repeated, not images: neighbours
    are mixed with each other, and an image must not be mixed with itself.
    """
    pair, place = np.divmod(np.arange(len(order)), PAIR)
    return order[np.minimum(pair // copies * PAIR + place, len(order) - 1)], pair % copies


def positions_of(step: int, batch: int, rank: int, workers: int) -> np.ndarray:
    """Return the ascending positions that a worker takes of a step; the workers together take the whole batch.

    Pairs are dealt; single images where equal shares are odd, or where there are fewer pairs than workers.
    """
    _check_batch(batch, workers)
    is_odd = batch % workers == 0 and batch // workers % PAIR
    unit = 1 if is_odd or batch // PAIR < workers else PAIR
    within = np.arange(batch)
    return step * batch + within[within // unit % workers == rank]


def evaluation_positions(images: int, batch: int, rank: int, workers: int) -> np.ndarray:
    """Return a worker's positions in the stored order, one row per evaluation step; -1 pads the last step."""
    _check_batch(batch, workers)
    padded = np.full(-(-images // batch) * batch, -1)
    padded[:images] = np.arange(images)
    return padded.reshape(-1, batch)[:, rank * batch // workers : (rank + 1) * batch // workers]


def _check_batch(batch: int, workers: int) -> None:
    if batch < workers:
        raise ValueError(f"got a global batch of {batch}, wanted at least an image for each of {workers} workers")
