"""The order of images as a function of (dataset, seed, epoch), and who takes which of them. Arithmetic alone.

An epoch's order: the row groups of the split are permuted; their rows, one group after another, are cut into regions of
2048; a region is cut into 16 lanes of neighbouring rows; each lane is shuffled; the lanes are dealt out two images at a
time. So an image's neighbours come from 16 or more groups far apart, while a worker that takes every n-th pair reads
only the groups of its own lanes.

A position counts the images of an epoch. Step k of a global batch of B takes positions k * B to (k + 1) * B, and each
worker takes every n-th pair of them: pairs stay together because mixup and cutmix pair neighbours. Where the workers do
not divide the pairs, as in elastic training, some take a pair more than others.
"""

from typing import NamedTuple

import numpy as np

from vitray.data.augment.keyed_random import raw_draws

REGION, LANES, PAIR = 2048, 16, 2
# Bit-reversed, so that the lanes of worker r of 2, 4, 8 or 16 are neighbours: they share row groups, others do not.
DEAL = [int(f"{lane:04b}"[::-1], 2) for lane in range(LANES)]


class Cursor(NamedTuple):
    """Where a stream stands: the next step it would give."""

    epoch: int
    step: int


def epoch_order(groups: np.ndarray, seed: int, epoch: int, identity: str = "") -> np.ndarray:
    """The rows of a split in the order of one epoch, from the numbers of rows in its row groups."""
    total = int(groups.sum())
    key = f"{identity} {seed} {epoch}"
    # A stable sort of raw draws: numpy promises the draws of a generator for ever, its permutations not.
    permuted = np.argsort(raw_draws(f"groups {key}", len(groups)), kind="stable")
    sizes, starts = groups[permuted], (np.cumsum(groups) - groups)[permuted]
    rows = np.arange(total) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    draws = raw_draws(f"rows {key}", total)
    whole = total - total % REGION
    lanes = np.take_along_axis(*_lanes(rows[:whole], draws[:whole]), axis=2)
    dealt = lanes[:, DEAL].reshape(-1, LANES, REGION // LANES // PAIR, PAIR).swapaxes(1, 2)
    return np.concatenate([dealt.ravel(), rows[whole:][np.argsort(draws[whole:], kind="stable")]])


def _lanes(rows: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shape = (-1, LANES, REGION // LANES)
    return rows.reshape(shape), np.argsort(draws.reshape(shape), axis=2, kind="stable")


def repeated(order: np.ndarray, copies: int) -> tuple[np.ndarray, np.ndarray]:
    """An epoch of repeated augmentation, as long as any other: its first pairs `copies` times each, and which copy.

    Pairs, not images, are repeated: neighbours are mixed with each other, and an image must not meet itself.
    """
    pair, place = np.divmod(np.arange(len(order)), PAIR)
    return order[np.minimum(pair // copies * PAIR + place, len(order) - 1)], pair % copies


def positions_of(step: int, batch: int, rank: int, workers: int) -> np.ndarray:
    """The positions that a worker takes of a step, in order: as many in every step, and of all workers the whole batch.

    Pairs are dealt; single images where equal shares are odd, or where there are fewer pairs than workers.
    """
    _refuse_empty_share(batch, workers)
    odd = batch % workers == 0 and batch // workers % PAIR
    unit = 1 if odd or batch // PAIR < workers else PAIR
    within = np.arange(batch)
    return step * batch + within[within // unit % workers == rank]


def evaluation_positions(images: int, batch: int, rank: int, workers: int) -> np.ndarray:
    """The positions that a worker takes of an evaluation in the stored order, a row a step; -1 pads the last step."""
    _refuse_empty_share(batch, workers)
    padded = np.full(-(-images // batch) * batch, -1)
    padded[:images] = np.arange(images)
    return padded.reshape(-1, batch)[:, rank * batch // workers : (rank + 1) * batch // workers]


def _refuse_empty_share(batch: int, workers: int) -> None:
    if batch < workers:
        raise ValueError(f"got a global batch of {batch}, wanted at least an image for each of {workers} workers")
