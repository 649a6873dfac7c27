"""What a process of `LocalReader` does: it decodes positions of streams, and remembers row groups it has read.

With `data.cache: decoded` it remembers pixels in place of files.
"""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np

from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.stream.decoding import (
    Images,
    Label,
    SplitRows,
    StoredRows,
    ViewSettings,
    decode_positions,
    read_rows,
)
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
    pixel_memory: int = 0
    """Bytes that a process may remember if it keeps pixels; 0: it keeps files."""


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
        # By the file of a row group, its number there, and its first row in the split: streams of a split share them.
        self._groups: OrderedDict[tuple[str, int, int], dict[int, tuple[bytes | np.ndarray, Label, str]]]
        self._groups = OrderedDict()
        self._bytes = 0

    def decode(self, number: int, source: Source | None, epoch: int, positions: np.ndarray) -> Images:
        """Return the images at some positions of a stream, which comes with its first call."""
        if source is not None:
            self._sources[number] = source
        self._sources.move_to_end(number)
        if len(self._sources) > STREAMS:
            self._sources.popitem(last=False)
        source = self._sources[number]
        if source.order.shuffle is not None and source.order.shuffle[2] != epoch:
            source = source._replace(order=replace(source.order, shuffle=(*source.order.shuffle[:2], epoch)))
            self._sources[number] = source

        def fetch(numbers: np.ndarray, rows: SplitRows) -> StoredRows:
            return self._fetch(rows, numbers, source.pixel_memory)

        view = source.view._replace(epoch=epoch)
        [images] = decode_positions([positions], source.rows, source.order, view, fetch)
        return images

    def _fetch(self, rows: SplitRows, numbers: np.ndarray, pixel_memory: int) -> StoredRows:
        """Return some rows; whole row groups are read, and remembered."""
        groups = np.searchsorted(rows.starts, numbers, side="right") - 1
        found: dict[int, tuple[bytes | np.ndarray, Label, str]] = {}
        for group in np.unique(groups).tolist():
            start, stop = rows.starts[group : group + 2].tolist()
            address = rows.addresses[rows.shard_of_group[group]], int(rows.group_in_shard[group]), start
            if address not in self._groups:
                self._groups[address] = {**read_rows(np.arange(start, stop), rows)}
                self._bytes += _size(self._groups[address])
            self._groups.move_to_end(address)
            whole = self._groups[address]
            for row in numbers[groups == group].tolist():
                if pixel_memory and isinstance(content := whole[row][0], bytes):
                    with suppress(UndecodableImage):  # another image replaces it
                        whole[row] = (pixels := decode_image(content), *whole[row][1:])
                        self._bytes += pixels.nbytes - len(content)
                found[row] = whole[row]
        while self._bytes > (pixel_memory or REMEMBERED) and len(self._groups) > 1:
            _, oldest = self._groups.popitem(last=False)
            self._bytes -= _size(oldest)
        return found


def _size(rows: StoredRows) -> int:
    return sum(content.nbytes if isinstance(content, np.ndarray) else len(content) for content, _, _ in rows.values())
