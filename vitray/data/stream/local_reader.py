"""Processes of this machine as the reader of streams, without Ray.

Some steps at a time form a window. Its images are dealt to the processes by lanes of the order, so that each process
reads few row groups, which it remembers.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import NamedTuple, Self

import numpy as np

from vitray.data.stream.batches import Share
from vitray.data.stream.decoding import (
    EncodedRows,
    Images,
    SplitRows,
    ViewSettings,
    decode_positions,
    empty_images,
    joined,
    read_rows,
)
from vitray.data.stream.epoch_order import LANES, EpochOrder, lanes_of, positions_of
from vitray.data.stream.stream import Stream
from vitray.system.child import Child

# Images of a window: about a tenth of a second of decoding, long beside a message and short beside a first batch.
WINDOW = 256
# Windows in work ahead of the one that is taken.
AHEAD = 2
# Bytes of encoded images that a process remembers: a region of 2048 large photographs.
REMEMBERED = 512 * 2**20


class Source(NamedTuple):
    """What a process has to know of a stream."""

    rows: SplitRows
    order: EpochOrder
    view: ViewSettings


# ---- in a decoding process -------------------------------------------------------------------------------------------


class Decoder:
    """The streams of one process, and the row groups that it has read last."""

    def __init__(self) -> None:
        self._sources: dict[int, Source] = {}
        self._groups: OrderedDict[tuple[int, int], EncodedRows] = OrderedDict()
        self._bytes = 0

    def decode(self, number: int, source: Source | None, epoch: int, positions: np.ndarray) -> Images:
        """Return the images at some positions of a stream, which comes with its first call."""
        if source is not None:
            self._sources[number] = source
        rows, order, view = self._sources[number]
        if order.shuffle is not None and order.shuffle[2] != epoch:
            order = replace(order, shuffle=(*order.shuffle[:2], epoch))
            self._sources[number] = Source(rows, order, view)

        def fetch(numbers: np.ndarray, _: SplitRows) -> EncodedRows:
            return self._fetch(number, rows, numbers)

        [images] = decode_positions([positions], rows, order, view._replace(epoch=epoch), fetch)
        return images

    def _fetch(self, number: int, rows: SplitRows, numbers: np.ndarray) -> EncodedRows:
        """Return some rows; whole row groups are read, and remembered."""
        groups = np.searchsorted(rows.starts, numbers, side="right") - 1
        found: EncodedRows = {}
        for group in np.unique(groups).tolist():
            if (number, group) in self._groups:
                self._groups.move_to_end((number, group))
            else:
                start, stop = rows.starts[group : group + 2].tolist()
                whole = read_rows(np.arange(start, stop), rows)
                self._groups[number, group] = whole
                self._bytes += sum(len(content) for content, _, _ in whole.values())
            whole = self._groups[number, group]
            found |= {row: whole[row] for row in numbers[groups == group].tolist()}
        while self._bytes > REMEMBERED and len(self._groups) > 1:
            _, oldest = self._groups.popitem(last=False)
            self._bytes -= sum(len(content) for content, _, _ in oldest.values())
        return found


# ---- in the process that trains --------------------------------------------------------------------------------------


class DecodeProcesses:
    """Processes that decode for the streams of one worker; they start at once."""

    def __init__(self, number: int) -> None:
        self._children = [Child(_decoder, "decodes images") for _ in range(number)]
        # Requests of several streams take turns.
        self._numbers, self._known = count(), [set[int]() for _ in self._children]

    def __len__(self) -> int:
        return len(self._children)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.close()

    def new_stream(self) -> int:
        """Return a number for a stream."""
        return next(self._numbers)

    def submit(self, place: int, number: int, source: Source, epoch: int, positions: np.ndarray) -> Future[Images]:
        """Let one process decode positions of an epoch."""
        is_known = number in self._known[place]
        self._known[place].add(number)
        return self._children[place].submit(number, None if is_known else source, epoch, positions)


def _decoder() -> Callable[..., Images]:
    import vitray.data.augment.crops  # noqa: F401 (torch takes seconds, which pass before the first images are wanted)

    return Decoder().decode


class LocalReader:
    """One stream read by processes of this machine; `stream.Reader` says what its methods do."""

    def __init__(self, stream: Stream, processes: DecodeProcesses) -> None:
        self._stream, self._processes = stream, processes

    def train(self, steps: range, share: Share) -> Generator[Images, None, None]:
        stream, batch = self._stream, self._stream.spec.batch
        own = max(1, -(-batch // share.workers))

        def windows() -> Iterator[tuple[int, list[np.ndarray]]]:
            at, length = steps.start, 1  # the first window is short, as the first step waits for it
            while at < steps.stop:
                epoch, within = divmod(at, stream.steps)
                number = min(length, steps.stop - at, stream.steps - within)
                each = (positions_of(within + step, batch, share.rank, share.workers) for step in range(number))
                yield epoch, list(each)
                at, length = at + number, max(1, min(2 * length, WINDOW // own))

        source = Source(stream.rows, stream.order(0), stream.view(0))
        yield from self._decoded(windows(), source, by_lanes=True)

    def evaluate(self, share: Share) -> Generator[Images, None, None]:
        stream, batch = self._stream, self._stream.spec.batch
        steps, at_once = -(-stream.images // batch), max(1, WINDOW // max(1, batch // share.workers))

        def windows() -> Iterator[tuple[int, list[np.ndarray]]]:
            for first in range(0, steps, at_once):
                planned = range(first, min(first + at_once, steps))
                positions = [positions_of(step, batch, share.rank, share.workers) for step in planned]
                yield 0, [each[each < stream.images] for each in positions]

        source = Source(stream.rows, stream.order(None), stream.view(0))
        yield from self._decoded(windows(), source, by_lanes=False)

    def _decoded(
        self, windows: Iterator[tuple[int, list[np.ndarray]]], source: Source, *, by_lanes: bool
    ) -> Generator[Images, None, None]:
        """Yield the images of each step of some windows, each of which is an epoch with the positions of its steps."""
        number, processes = self._processes.new_stream(), len(self._processes)

        def submit(epoch: int, steps: list[np.ndarray]) -> list[Future[Images]]:
            positions = np.concatenate(steps)
            if by_lanes:
                places = lanes_of(positions, source.order.repeats) * min(processes, LANES) // LANES
            else:
                places = np.arange(len(positions)) * processes // max(1, len(positions))
            return [
                self._processes.submit(place, number, source, epoch, positions[places == place])
                for place in np.unique(places).tolist()
            ]

        waiting: deque[tuple[list[np.ndarray], list[Future[Images]]]] = deque()
        try:
            for epoch, steps in windows:
                waiting.append((steps, submit(epoch, steps)))
                if len(waiting) > AHEAD:
                    yield from self._taken(*waiting.popleft())
            while waiting:
                yield from self._taken(*waiting.popleft())
        finally:
            for _, futures in waiting:
                for future in futures:
                    future.cancel()

    def _taken(self, steps: list[np.ndarray], futures: list[Future[Images]]) -> Iterator[Images]:
        images = joined([future.result() for future in futures] or [empty_images(self._stream.spec.size)])
        if not np.array_equal(images["position"], np.concatenate(steps)):
            raise RuntimeError(f"got positions {images['position']}, planned {np.concatenate(steps)}")
        at = 0
        for positions in steps:
            yield {name: column[at : at + len(positions)] for name, column in images.items()}
            at += len(positions)
