"""Graceful shutdown on Ctrl-C, SIGTERM or the sweep's request: a checkpoint first, then the end."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

from vitray.cluster import local_ray
from vitray.errors import RunError
from vitray.system.mlflow_client import in_thread

# Seconds for the workers to reach their next check and save there; a cluster job is killed ten seconds later.
SAVE_SECONDS = 20.0
# Within this time a repeated signal is the same request: `timeout` signals a process, and then its group.
REPEAT_SECONDS = 1.0


class GracefulShutdown:
    """Catches stop requests and passes them to the workers."""

    def __init__(self, requested: threading.Event | None = None, check: Callable[[], None] = lambda: None) -> None:
        """`requested` is set by a signal or by the sweep; `check` is called while training runs, and may raise."""
        self.check = check
        self._requested = requested or threading.Event()
        self._signal, self._signaled, self._is_waiting = signal.SIGTERM, float("-inf"), False

    @property
    def error(self) -> BaseException:
        """The exception that an interrupted run ends with."""
        return KeyboardInterrupt() if self._signal == signal.SIGINT else SystemExit(128 + self._signal)

    def is_requested(self) -> bool:
        """Whether training should save and stop."""
        return self._requested.is_set()

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM inside the block; a second signal ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except SystemExit:
            if self._signaled > 0:  # Ray's calls turn the handler's exception into an exit with status 1
                raise self.error from None
            raise
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: Any) -> None:
        now = time.monotonic()
        if now - self._signaled < REPEAT_SECONDS:
            return
        is_second = self._requested.is_set()
        self._signal, self._signaled = signal.Signals(number), now
        self._requested.set()
        if is_second or not self._is_waiting:
            raise self.error

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Within the block the first signal only sets the request."""
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    def wait_for(self, fit: Callable[[], Any], mailbox: Any) -> Any:
        """Run `fit` in a thread and return its result; on a stop request, ask the workers to end.

        Ray installs a signal handler in the main thread that would kill the workers at once.
        """
        result = in_thread(fit)
        deadline = float("inf")
        with self.postponed():
            while not wait([result], timeout=0.2).done:
                self.check()
                if local_ray.is_lost():
                    raise self.error if self._requested.is_set() else RunError(local_ray.LOST)
                if self._requested.is_set() and deadline == float("inf"):
                    mailbox.request_stop.remote()
                    deadline = time.monotonic() + SAVE_SECONDS
                if time.monotonic() > deadline:
                    raise self.error
        return result.result()
