"""What a process of `LocalReader` does: it decodes positions of streams, and remembers row groups it has read."""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np

from vitray.data.stream.decoding import EncodedRows, Images, SplitRows, ViewSettings, decode_positions, read_rows
from vitray.data.stream.epoch_order import EpochOrder

# Bytes of encoded images that a process remembers: a region of 2048 large photographs.
REMEMBERED = 512 * 2**20
# Streams that a process remembers; each evaluation is another one.
STREAMS = 8


class Source(NamedTuple):
    """What a process has to know of a stream."""

    rows: SplitRows
    order: EpochOrder
    view: ViewSettings


class DecodeThread:
    """A thread of this process in place of `DecodeProcesses`: it starts at once, and computes beside the caller."""

    def __init__(self) -> None:
        self._decoder, self._thread, self._numbers = Decoder(), ThreadPoolExecutor(1), count()

    def __len__(self) -> int:
        return 1

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def new_stream(self) -> int:
        """Return a number for a stream."""
        return next(self._numbers)

    def submit(self, place: int, number: int, source: Source, epoch: int, positions: np.ndarray) -> "Future[Images]":
        """Decode positions of an epoch."""
        assert place == 0
        return self._thread.submit(self._decoder.decode, number, source, epoch, positions)


class Decoder:
    """The streams of one process, and the row groups that it has read last."""

    def __init__(self) -> None:
        self._sources: OrderedDict[int, Source] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], EncodedRows] = OrderedDict()
        self._bytes = 0

    def decode(self, number: int, source: Source | None, epoch: int, positions: np.ndarray) -> Images:
        """Return the images at some positions of a stream, which comes with its first call."""
        if source is not None:
            self._sources[number] = source
        self._sources.move_to_end(number)
        if len(self._sources) > STREAMS:
            self._sources.popitem(last=False)
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
