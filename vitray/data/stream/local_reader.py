"""Processes of this machine as the reader of streams, without Ray.

Some steps at a time form a window. Its images are dealt to the processes by lanes of the order, so that each process
reads few row groups, which it remembers.
"""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future

import numpy as np
import psutil

from vitray.data.decode_processes import DecodeProcesses
from vitray.data.stream.batches import Share
from vitray.data.stream.decoder import DecodeThread, Source
from vitray.data.stream.decoding import Images, decoded_bytes, joined, pixels_error
from vitray.data.stream.epoch_order import LANES, lanes_of, positions_of
from vitray.data.stream.stream import Stream

# Images of a window: about a tenth of a second of decoding, long beside a message and short beside a first batch.
WINDOW = 256
# Windows in work ahead of the one that is taken.
AHEAD = 2
# The largest share of the free memory for the pixels of a split.
SHARE_OF_MEMORY = 0.5


class LocalReader:
    """One stream read by processes of this machine; `stream.Reader` says what its methods do."""

    def __init__(self, stream: Stream, processes: DecodeProcesses | DecodeThread, workers: int = 1) -> None:
        """Each of some workers has processes, which keep the pixels of all images in time if they keep any."""
        self._stream, self._processes = stream, processes
        self._pixel_memory = 0
        if stream.spec.cache == "decoded":
            size, free = workers * decoded_bytes(stream.rows), psutil.virtual_memory().available
            if size > SHARE_OF_MEMORY * free:
                most = f"{SHARE_OF_MEMORY:g} of this machine's free memory"
                raise pixels_error(stream.dataset, stream.spec.split, size, most, free)
            self._pixel_memory = int(SHARE_OF_MEMORY * free)

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

        source = Source(stream.rows, stream.order(0), stream.view(0), self._pixel_memory)
        yield from self._decoded(windows(), source, by_lanes=True)

    def evaluate(self, share: Share) -> Generator[Images, None, None]:
        stream, batch = self._stream, self._stream.spec.batch
        steps, at_once = -(-stream.images // batch), max(1, WINDOW // max(1, batch // share.workers))

        def windows() -> Iterator[tuple[int, list[np.ndarray]]]:
            for first in range(0, steps, at_once):
                planned = range(first, min(first + at_once, steps))
                positions = [positions_of(step, batch, share.rank, share.workers) for step in planned]
                yield 0, [each[each < stream.images] for each in positions]

        source = Source(stream.rows, stream.order(None), stream.view(0), self._pixel_memory)
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
        images = joined([future.result() for future in futures] or [self._stream.no_images])
        if not np.array_equal(images["position"], np.concatenate(steps)):
            raise RuntimeError(f"got positions {images['position']}, planned {np.concatenate(steps)}")
        at = 0
        for positions in steps:
            yield {name: column[at : at + len(positions)] for name, column in images.items()}
            at += len(positions)
