"""Processes of this machine that decode for streams. A light module: they start while this one imports torch."""

from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import TYPE_CHECKING, Self

from vitray.system.child import Child

if TYPE_CHECKING:
    import numpy as np

    from vitray.data.stream.decoder import Source
    from vitray.data.stream.decoding import Images


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
        self.close()

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()

    def are_alive(self) -> bool:
        """Return whether all of them run."""
        return all(child.is_alive() for child in self._children)

    def new_stream(self) -> int:
        """Return a number for a stream."""
        return next(self._numbers)

    def submit(
        self, place: int, number: int, source: "Source", epoch: int, positions: "np.ndarray"
    ) -> "Future[Images]":
        """Let one process decode positions of an epoch."""
        is_known = number in self._known[place]
        self._known[place].add(number)
        return self._children[place].submit(number, None if is_known else source, epoch, positions)


def _decoder() -> "Callable[..., Images]":
    import vitray.data.augment.crops  # noqa: F401 (torch takes seconds, which pass before the first images are wanted)
    from vitray.data.stream.decoder import Decoder

    return Decoder().decode
