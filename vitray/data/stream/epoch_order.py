"""The order of images as a function of (dataset, seed, epoch), and its division among workers and Ray Data tasks.

Arithmetic only.

An epoch's order: the row groups of the split are permuted; their rows, one group after another, are cut into regions of
2048 rows, and a region into 8 lanes. A lane has neighboring rows, in two halves of 128. A pair is a random row of each
half, and its two rows are of different row groups. The pairs of a lane are shuffled, and the lanes are dealt out one
pair at a time. So neighboring pairs come from row groups far apart, while a lane has rows of few groups.

Row groups of other writers may be larger than half a lane. Then the halves of a lane are half a region apart, so that
only a group of about a thousand rows or more has both rows of a pair; a lane has up to twice as many groups.

A position counts the images of an epoch. Step k of a global batch of B takes positions k * B to (k + 1) * B, and each
worker takes every n-th pair of them: pairs stay together because mixup and cutmix mix their two images. Where the
number of workers does not divide the pairs, as in elastic training, some workers take one pair more than others
(`vitray.data.shares`).

A task decodes a piece: a range of positions, restricted to neighboring lanes of the order. It contains the rows of few
row groups, whatever the number of workers. Where that number allows it, the workers form teams that own disjoint lanes:
a piece then serves one team. It yields one block for each member of its team, an empty one included, so that pieces in
their order deal one block to every worker in turn. Teams may be divided among executions, each with its own pieces: a
team is on one node where the number of nodes divides that of teams, and so is its execution.
Shapes: L lanes, 2 halves of a lane, P pairs of a lane.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np

from vitray.data.augment.keyed_random import raw_draws
from vitray.data.shares import PAIR, dealt_unit
from vitray.data.stream.balance import ClassBalance

REGION, LANES = 2048, 8
# Bit-reversed: the lanes of every second or fourth pair are neighbors, which share row groups.
DEAL = [int(f"{lane:03b}"[::-1], 2) for lane in range(LANES)]
# About a second of decoding: long beside the start of a task, short enough to balance.
ROWS = 1024
PIECE_BYTES = 208 * 2**20
# Rows of a block for each worker: at 2,000 images/s a worker, 125 blocks/s.
BLOCK_ROWS = 16
# Positions of the first ranges of a hurried stream. Ray Data hands out the first block once it has some more
# (BLOCKS_AHEAD of ray_reader.py), so the ranges grow slowly: each has half of the positions before it.
FIRST = 64
# Tasks whose blocks memory holds at a time, for each worker: about three run, others wait for their turn.
TASKS_PER_WORKER = 8


class Region(NamedTuple):
    """Some images of an epoch by place."""

    rows: np.ndarray
    rings: np.ndarray
    """The ring of each pair. In each copy, the pairs of a ring exchange their second images."""

    def rows_of(self, places: np.ndarray, copies: np.ndarray) -> np.ndarray:
        """Return the rows at some places of some copies; copy 0 is `rows`.

        A pair takes the second image of one of the next pairs of its ring, so that most copies of an image are in the
        same step.
        """
        places = places.copy()
        moved = np.flatnonzero((places % PAIR == 1) & (copies > 0))
        if len(moved):
            pairs = places[moved] // PAIR
            in_rings = np.argsort(self.rings, kind="stable")
            sizes = np.bincount(self.rings)
            start, size = (np.cumsum(sizes) - sizes)[self.rings[pairs]], sizes[self.rings[pairs]]
            turn = np.argsort(in_rings)[pairs] - start + copies[moved]
            places[moved] = in_rings[start + turn % size] * PAIR + 1
        return self.rows[places]


@dataclass
class EpochOrder:
    """The images of one epoch by position; computed a region at a time, so that a task pays only for its own part."""

    groups: np.ndarray
    """The number of used rows in each row group of the split."""
    used: np.ndarray | None
    """The used rows of the split in their stored order; None for all of them."""
    shuffle: tuple[str, int, int] | None
    """Identity of the dataset, seed and epoch; None for the stored order."""
    repeats: int = 1
    """Views of each image per epoch (repeated augmentation)."""
    balance: ClassBalance | None = None
    """Of an epoch whose classes are balanced: `groups` and `used` are then its own."""

    def __post_init__(self) -> None:
        self._last = -1, Region(np.empty(0, np.int64), np.empty(0, np.int64))
        self._before: np.ndarray | None = None
        if self.balance is not None and self.shuffle is not None:
            self.groups, self.used, self._before = self.balance.of_rows(self.shuffle[2])

    @property
    def images(self) -> int:
        """The length of the epoch."""
        return int(self.groups.sum())

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows at some positions, and their copy numbers.

        With repeats, the epoch keeps its length and holds its first pairs `repeats` times each, one after another. The
        copies of a pair have the same first image; its second image has another partner in each copy.
        """
        pairs, place = np.divmod(positions, PAIR)
        pairs, copies = np.divmod(pairs, self.repeats)
        places = pairs * PAIR + place
        rows = places
        if self.shuffle is not None:
            rows = np.empty_like(places)
            regions = places // REGION
            for region in np.unique(regions):
                at = np.flatnonzero(regions == region)
                rows[at] = self._region(int(region)).rows_of(places[at] - region * REGION, copies[at])
        if self._before is not None:
            copies = copies + self.repeats * self._before[rows]
        return rows if self.used is None else self.used[rows], copies

    def _region(self, region: int) -> Region:
        if self._last[0] != region:
            self._last = region, self._shuffle_region(region)
        return self._last[1]

    def _shuffle_region(self, region: int) -> Region:
        ends, shifts = self._permuted_groups
        places = np.arange(region * REGION, min((region + 1) * REGION, self.images))
        groups = np.searchsorted(ends, places, side="right")
        lanes, pairs = LANES if len(places) == REGION else 1, len(places) // PAIR
        draws = raw_draws(f"rows {self._key}", len(places) + pairs, skip=region * (REGION + REGION // PAIR))
        draws, pair_draws = np.split(draws, [len(places)])

        # Which rows of a group lie in which lane and half is random.
        shuffled = _order_by(groups, draws)
        if self._has_large_groups:
            halves_L2P = shuffled[: pairs * PAIR].reshape(PAIR, lanes, -1).swapaxes(0, 1)
        else:
            halves_L2P = shuffled[: pairs * PAIR].reshape(lanes, PAIR, -1)

        # One group at most is in both halves. Its rows are paired last in the first half and first in the second, so
        # that they do not meet. All else is random.
        middle_L11 = groups[halves_L2P][:, :1, -1:]
        is_last_L2P = (groups[halves_L2P] == middle_L11) ^ np.array([[False], [True]])
        paired_L2P = np.take_along_axis(halves_L2P, _order_by(is_last_L2P, draws[halves_L2P]), axis=-1)
        order_LP = np.argsort(pair_draws.reshape(lanes, -1), kind="stable")
        first_LP, second_LP = np.take_along_axis(paired_L2P, order_LP[:, np.newaxis], axis=-1).swapaxes(0, 1)

        dealt = shuffled  # the last row of an odd number stays alone
        dealt[: pairs * PAIR] = np.stack([first_LP, second_LP], axis=-1)[DEAL[:lanes]].swapaxes(0, 1).ravel()
        lane = np.resize(DEAL[:lanes], pairs)
        is_middle = groups[dealt[1::2]] == middle_L11.ravel()[lane]
        return Region((places + shifts[groups])[dealt], 2 * lane + is_middle)

    @cached_property
    def _has_large_groups(self) -> bool:
        return int(self.groups.max()) > REGION // LANES // PAIR

    @cached_property
    def _permuted_groups(self) -> tuple[np.ndarray, np.ndarray]:
        """The end of each row group in the permuted order, and the distance of its rows from their stored places."""
        return _permute_groups(self._key, self.groups.astype(np.int64).tobytes())

    @property
    def _key(self) -> str:
        assert self.shuffle is not None
        identity, seed, epoch = self.shuffle
        return f"{identity} {seed} {epoch}"


@lru_cache(maxsize=2)
def _permute_groups(key: str, sizes: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Permute row groups by their sizes. A process remembers two epochs, which are 24 bytes a row group each: decoding
    tasks of one epoch follow each other, and a million row groups take 0.3 s."""
    groups = np.frombuffer(sizes, np.int64)
    # A stable sort of raw draws: numpy keeps the bits of a generator across versions, but not its permutations.
    permuted = np.argsort(raw_draws(f"groups {key}", len(groups)), kind="stable")
    ends = np.cumsum(groups[permuted])
    return ends, np.cumsum(groups)[permuted] - ends


def _order_by(numbers: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return the indices that sort small numbers along the last axis, equal ones at random."""
    keys = (numbers.astype(np.uint64) << np.uint64(32)) | (draws >> np.uint64(32))
    return np.argsort(keys, axis=-1, kind="stable")  # faster than `lexsort`


def positions_of(step: int, batch: int, rank: int, workers: int) -> np.ndarray:
    """Return the ascending positions that a worker takes of a step; the workers together take the whole batch."""
    positions = np.arange(step * batch, (step + 1) * batch)
    return positions[ranks_of(positions, batch, workers) == rank]


def ranks_of(positions: np.ndarray, batch: int, workers: int) -> np.ndarray:
    """Return the rank of the worker that takes each position: pairs are dealt in turn.

    Single images are dealt instead where equal shares are odd, or where there are fewer pairs than workers.
    """
    return positions % batch // dealt_unit(batch, workers) % workers


def lanes_of(positions: np.ndarray, repeats: int) -> np.ndarray:
    """Return the lane of each position of an epoch."""
    return np.array(DEAL)[positions // PAIR // repeats % LANES]


# ---- pieces ----------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The work of one task: positions `start` to `end` of an epoch in lanes `first` to `last`, for one team."""

    epoch: int
    start: int
    end: int
    first: int
    last: int
    team: int


class Cut(NamedTuple):
    """How a stream is cut into pieces."""

    batch: int
    """Images of a global batch."""
    workers: int
    repeats: int
    rows: int
    """The most rows of a piece, and so of a block."""
    held: int
    """The most rows that all workers together may hold while they wait for a step's last block."""
    executions: int = 1
    """Among which the teams are divided, in turn: worker r reads from execution r % executions."""
    is_local: bool = False
    """Whether an execution decodes on the node of its workers."""

    @staticmethod
    def fitting(image: int, memory: int, batch: int, workers: int, repeats: int = 1) -> "Cut":
        """Return how to cut images of so many bytes so that an object store of this memory holds several pieces."""
        rows = ROWS
        while rows > 1 and rows * image > min(PIECE_BYTES, memory // 8):
            rows //= 2
        cut = Cut(batch, workers, repeats, rows, held=memory // 2 // image)
        # One process hands out the blocks of all workers, so many workers get larger ones where memory allows.
        while (
            cut.rows < BLOCK_ROWS * workers * cut.members
            and 2 * cut.rows * image * TASKS_PER_WORKER * workers <= memory
        ):
            cut = cut._replace(rows=2 * cut.rows)
        return cut

    @property
    def is_narrow(self) -> bool:
        """Whether a region does not fit into memory, so that pieces take all lanes of few positions."""
        return REGION * self.repeats > self.held

    @property
    def teams(self) -> int:
        """The number of teams; worker r is in team r % teams."""
        if self.is_narrow or self.repeats > 1 or self.batch % PAIR or dealt_unit(self.batch, self.workers) < PAIR:
            return 1
        return gcd(self.workers, self.batch // PAIR, LANES)

    @property
    def members(self) -> int:
        """The number of workers of a team."""
        return self.workers // self.teams

    def place(self, rank: int) -> int:
        """Return the place of a worker in the order in which the pieces of its execution deal their blocks."""
        team = rank % self.teams
        before = sum(DEAL[other] < DEAL[team] for other in range(team % self.executions, self.teams, self.executions))
        return before * self.members + rank // self.teams

    def pieces(self, epoch: int, start: int, end: int, *, hurried: bool = False) -> Iterator[Piece]:
        """Yield the pieces of positions `start` to `end` of an epoch, in order; if hurried, the first ones are short.

        Short pieces read row groups again that later ones read, too.
        """
        if self.is_narrow:
            for at in range(start, end, self.rows):
                yield Piece(epoch, at, min(at + self.rows, end), 0, LANES, 0)
            return
        region = REGION * self.repeats
        rows = region // self.teams  # of a team in a region
        span = region * max(1, min(self.rows * self._parts(region) // rows, self.held // region))
        team_of = {DEAL[team] * self.teams // LANES: team for team in range(self.teams)}
        at, length = start, min(FIRST, span) if hurried else span
        while at < end:
            stop, parts = min(at + length, (at // span + 1) * span, end), self._parts(length)
            lanes = LANES // self.teams // parts
            for part in range(parts):
                for place in range(self.teams):
                    first = (place * parts + part) * lanes
                    yield Piece(epoch, at, stop, first, first + lanes, team_of[place])
            at, length = stop, min(max(length, (stop - start) // (2 * FIRST) * FIRST), span)

    def _parts(self, length: int) -> int:
        """Return into how many parts a team divides its lanes, so that a piece of as many positions has few rows."""
        parts = 1
        while length // self.teams // parts > self.rows and self.teams * parts < LANES:
            parts *= 2
        return parts

    def shares(self, piece: Piece) -> list[np.ndarray]:
        """Return the ascending positions of a piece for each member of its team, in the order of their places."""
        positions = np.arange(piece.start, piece.end)
        lanes = lanes_of(positions, self.repeats)
        positions = positions[(lanes >= piece.first) & (lanes < piece.last)]
        ranks = ranks_of(positions, self.batch, self.workers)
        return [positions[ranks == member * self.teams + piece.team] for member in range(self.members)]
