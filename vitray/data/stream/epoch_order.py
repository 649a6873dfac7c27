"""The order of images as a function of (dataset, seed, epoch), and its division among workers. Arithmetic only.

An epoch's order: the row groups of the split are permuted; their rows, one group after another, are cut into regions of
2048; a region is cut into 16 lanes of neighbouring rows; each lane is shuffled; the lanes are dealt out two images at a
time. So an image's neighbours come from 16 or more groups far apart, while neighbouring lanes share row groups.

A position counts the images of an epoch. Step k of a global batch of B takes positions k * B to (k + 1) * B, and each
worker takes every n-th pair of them: pairs stay together because mixup and cutmix pair neighbours. Where the number of
workers does not divide the pairs, as in elastic training, some workers take one pair more than others.
"""

from dataclasses import dataclass
from functools import cached_property

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
            self._last = region, self._shuffle_region(region)
        return self._last[1]

    def _shuffle_region(self, region: int) -> np.ndarray:
        ends, shifts = self._permuted_groups
        places = np.arange(region * REGION, min((region + 1) * REGION, self.images))
        rows = places + shifts[np.searchsorted(ends, places, side="right")]
        draws = raw_draws(f"rows {self._key}", len(places), skip=region * REGION)
        if len(places) < REGION:
            return rows[np.argsort(draws, kind="stable")]
        draws = draws.reshape(LANES, -1)
        lanes = np.take_along_axis(rows.reshape(LANES, -1), np.argsort(draws, kind="stable"), axis=1)
        return lanes[DEAL].reshape(LANES, -1, PAIR).swapaxes(0, 1).ravel()

    @cached_property
    def _permuted_groups(self) -> tuple[np.ndarray, np.ndarray]:
        """The end of each row group in the permuted order, and the distance of its rows from their stored places."""
        # A stable sort of raw draws: numpy keeps the bits of a generator across versions, but not its permutations.
        permuted = np.argsort(raw_draws(f"groups {self._key}", len(self.groups)), kind="stable")
        ends = np.cumsum(self.groups[permuted])
        return ends, np.cumsum(self.groups)[permuted] - ends

    @property
    def _key(self) -> str:
        assert self.shuffle is not None
        identity, seed, epoch = self.shuffle
        return f"{identity} {seed} {epoch}"


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
