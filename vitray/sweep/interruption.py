"""Interruption of a sweep: signals to the driver, passed on to the trials through a file."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vitray import storage
from vitray.errors import OwnershipLost
from vitray.runs.shutdown import REPEAT_SECONDS

INTERRUPTED = "interrupted"


class Interruption:
    """The signal that interrupted a sweep, and the marker file that the trials read."""

    def __init__(self, sweep_dir: str) -> None:
        self.signal: int | None = None
        self.signaled = float("-inf")
        self.marker = storage.join(sweep_dir, INTERRUPTED)
        self._is_marked = False

    @property
    def error(self) -> BaseException:
        """The exception that the interrupted sweep ends with."""
        return KeyboardInterrupt() if self.signal == signal.SIGINT else SystemExit(128 + (self.signal or 0))

    def mark(self) -> None:
        """Write the marker, once."""
        if not self._is_marked:
            storage.write_bytes(self.marker, b"the sweep was interrupted\n")
        self._is_marked = True


def is_interrupted(sweep_dir: str) -> bool:
    """Whether the sweep in a folder is being interrupted."""
    return storage.exists(storage.join(sweep_dir, INTERRUPTED))


@contextmanager
def interruptible(sweep_dir: str) -> Iterator[Interruption]:
    """Let the first Ctrl-C or SIGTERM end the trials resumably; a second one ends the driver at once.

    After an OwnershipLost the marker stays: it may be the new owner's.
    """
    interruption = Interruption(sweep_dir)
    storage.remove(interruption.marker)

    def on_signal(number: int, _frame: Any) -> None:
        now = time.monotonic()
        if now - interruption.signaled < REPEAT_SECONDS:
            return
        if interruption.signal is not None:
            restore()
            raise interruption.error
        interruption.signal, interruption.signaled = number, now

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    is_lost = False
    try:
        yield interruption
    except OwnershipLost:
        is_lost = True
        raise
    finally:
        restore()
        if not is_lost:
            storage.remove(interruption.marker)
