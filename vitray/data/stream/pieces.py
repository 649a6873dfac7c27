"""The division of a stream into pieces, one for each Ray Data task, which read few row groups. Arithmetic only.

A piece is a range of positions, restricted to neighboring lanes of the order; it contains the rows of few row groups,
whatever the number of workers. Where that number allows it, the workers form teams that own disjoint lanes: a piece
then serves one team. It yields one block for each member of its team, an empty one included, so that pieces in their
order deal one block to every worker in turn.
"""

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

import numpy as np

from vitray.data.shares import PAIR, dealt_unit
from vitray.data.stream.epoch_order import DEAL, LANES, REGION, ranks_of

# About a second of decoding: long beside the start of a task, short enough to balance.
ROWS = 1024
PIECE_BYTES = 208 * 2**20
# Rows of a block for each worker: at 2,000 images/s a worker, 125 blocks/s.
BLOCK_ROWS = 16
# Tasks whose blocks memory holds at a time, for each worker: about three run, others wait for their turn.
TASKS_PER_WORKER = 8


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

    @staticmethod
    def fitting(size: tuple[int, int], memory: int, batch: int, workers: int, repeats: int = 1) -> "Cut":
        """Return how to cut images of a size so that an object store of this memory holds several pieces."""
        image = size[0] * size[1] * 3
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
        """Return the place of a worker in the order in which pieces deal their blocks."""
        return DEAL[rank % self.teams] * self.teams // LANES * self.members + rank // self.teams

    def pieces(self, epoch: int, start: int, end: int) -> Iterator[Piece]:
        """Yield the pieces of positions `start` to `end` of an epoch, in order."""
        if self.is_narrow:
            for at in range(start, end, self.rows):
                yield Piece(epoch, at, min(at + self.rows, end), 0, LANES, 0)
            return
        region = REGION * self.repeats
        rows = region // self.teams  # of a team in a region
        parts = 1
        while rows // parts > self.rows and self.teams * parts < LANES:
            parts *= 2
        span = region * max(1, min(self.rows * parts // rows, self.held // region))
        lanes = LANES // self.teams // parts
        team_of = {DEAL[team] * self.teams // LANES: team for team in range(self.teams)}
        for at in range(start // span * span, end, span):
            for part in range(parts):
                for place in range(self.teams):
                    first = (place * parts + part) * lanes
                    yield Piece(epoch, max(at, start), min(at + span, end), first, first + lanes, team_of[place])

    def shares(self, piece: Piece) -> list[np.ndarray]:
        """Return the ascending positions of a piece for each member of its team, in the order of their places."""
        positions = np.arange(piece.start, piece.end)
        lanes = np.array(DEAL)[positions // PAIR // self.repeats % LANES]
        positions = positions[(lanes >= piece.first) & (lanes < piece.last)]
        ranks = ranks_of(positions, self.batch, self.workers)
        return [positions[ranks == member * self.teams + piece.team] for member in range(self.members)]
