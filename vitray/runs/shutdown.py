"""How a run is told to end, by Ctrl-C, SIGTERM or its sweep: a checkpoint first, where there is time for one."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

# Seconds for the workers to come to the next record and save there; a cluster's job has ten more to say goodbye.
PATIENCE = 20.0


class Ending:
    """Hears that a run is to end, and ends it."""

    def __init__(self, told: threading.Event | None = None) -> None:
        """`told` is set by whoever else may say so."""
        self._told = told or threading.Event()
        self._signal, self._waits = signal.SIGTERM, False

    @property
    def error(self) -> BaseException:
        """What a run that was told to end ends with."""
        return KeyboardInterrupt() if self._signal == signal.SIGINT else SystemExit(128 + self._signal)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM are heard for as long as the block; a second one ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _frame: Any) -> None:
        is_second = self._told.is_set()
        self._signal = signal.Signals(number)
        self._told.set()
        if is_second or not self._waits:
            raise self.error

    def wait_for(self, fit: Callable[[], Any], desk: Any) -> Any:
        """What training returns, whose workers are told by the desk when it is to end.

        In a thread of its own: in the main one Ray sets a handler that takes the workers away at once.
        """
        result: Future[Any] = Future()

        def work() -> None:
            try:
                result.set_result(fit())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=work, name="fit", daemon=True).start()
        until, self._waits = float("inf"), True
        try:
            while not wait([result], timeout=0.2).done:
                if self._told.is_set() and until == float("inf"):
                    desk.end.remote()
                    until = time.monotonic() + PATIENCE
                if time.monotonic() > until:
                    raise self.error
        finally:
            self._waits = False
        return result.result()
