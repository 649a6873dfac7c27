"""The order of images as a function of (dataset, seed, epoch), and its division among workers. Arithmetic only.

An epoch's order: the row groups of the split are permuted; their rows, one group after another, are cut into regions of
2048; a region is cut into 16 lanes of neighbouring rows; each lane is shuffled; the lanes are dealt out two images at a
time. So an image's neighbours come from 16 or more groups far apart, while neighbouring lanes share row groups.

A position counts the images of an epoch. Step k of a global batch of B takes positions k * B to (k + 1) * B, and each
worker takes every n-th pair of them: pairs stay together because mixup and cutmix pair neighbours. Where the number of
workers does not divide the pairs, as in elastic training, some workers take one pair more than others.
"""

from dataclasses import dataclass

import numpy as np

from vitray.data.augment.keyed_random import raw_draws

REGION, LANES, PAIR = 2048, 16, 2
# Bit-reversed: the lanes of every second, fourth or eighth pair are neighbours, which share row groups.
DEAL = [int(f"{lane:04b}"[::-1], 2) for lane in range(LANES)]


@dataclass
class EpochOrder:
    """The images of one epoch by position; computed a region at a time, so that a task pays only for its own part."""

    groups: np.ndarray
    """The number of used rows in each row group of the split."""
    used: np.ndarray | None
    """The used rows of the split in their stored order; None for all of them."""
    shuffle: tuple[str, int, int] | None
    """Identity of the dataset, seed and epoch; None for the stored order."""
    copies: int = 1
    """Views of each image per epoch (repeated augmentation)."""

    def __post_init__(self) -> None:
        self._last = -1, np.empty(0, np.int64)

    @property
    def images(self) -> int:
        """The length of the epoch."""
        return int(self.groups.sum())

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows at some positions, and their copy numbers.

        With copies, the epoch keeps its length and holds its first pairs `copies` times each. Pairs are repeated, not
        images: neighbours are mixed with each other, and an image must not be mixed with itself.
        """
        pairs, place = np.divmod(positions, PAIR)
        places = np.minimum(pairs // self.copies * PAIR + place, self.images - 1)
        rows = places
        if self.shuffle is not None:
            rows = np.empty_like(places)
            regions = places // REGION
            for region in np.unique(regions):
                at = regions == region
                rows[at] = self._region(int(region))[places[at] - region * REGION]
        return rows if self.used is None else self.used[rows], pairs % self.copies

    def _region(self, region: int) -> np.ndarray:
        if self._last[0] != region:
            assert self.shuffle is not None
            self._last = region, shuffled_region(self.groups, *self.shuffle, region)
        return self._last[1]


def shuffled_region(groups: np.ndarray, identity: str, seed: int, epoch: int, region: int) -> np.ndarray:
    """Return the rows of one region of an epoch; `groups` are the sizes of the row groups."""
    key = f"{identity} {seed} {epoch}"
    # A stable sort of raw draws: numpy keeps the bits of a generator stable across versions, but not its permutations.
    permuted = np.argsort(raw_draws(f"groups {key}", len(groups)), kind="stable")
    ends = np.cumsum(groups[permuted])
    places = np.arange(region * REGION, min((region + 1) * REGION, int(ends[-1])))
    group = np.searchsorted(ends, places, side="right")
    rows = places - ends[group] + np.cumsum(groups)[permuted[group]]
    draws = raw_draws(f"rows {key}", len(places), skip=region * REGION)
    if len(places) < REGION:
        return rows[np.argsort(draws, kind="stable")]
    lanes = np.take_along_axis(rows.reshape(LANES, -1), np.argsort(draws.reshape(LANES, -1), kind="stable"), axis=1)
    return lanes[DEAL].reshape(LANES, -1, PAIR).swapaxes(0, 1).ravel()


def positions_of(step: int, batch: int, rank: int, workers: int) -> np.ndarray:
    """Return the ascending positions that a worker takes of a step; the workers together take the whole batch."""
    positions = np.arange(step * batch, (step + 1) * batch)
    return positions[ranks_of(positions, batch, workers) == rank]


def ranks_of(positions: np.ndarray, batch: int, workers: int) -> np.ndarray:
    """Return the rank of the worker that takes each position: pairs are dealt in turn.

    Single images where equal shares are odd, or where there are fewer pairs than workers.
    """
    return positions % batch // dealt_unit(batch, workers) % workers


def dealt_unit(batch: int, workers: int) -> int:
    """Return the number of neighbouring images that go to the same worker."""
    if batch < workers:
        raise ValueError(f"got a global batch of {batch}, wanted at least an image for each of {workers} workers")
    is_odd = batch % workers == 0 and batch // workers % PAIR
    return 1 if is_odd or batch // PAIR < workers else PAIR
