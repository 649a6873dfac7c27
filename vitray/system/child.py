"""A process of this machine that answers calls one after another, and ends with this one, however this one ends."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from vitray.errors import RunError


def serve(connection: Connection) -> None:
    """Answer calls until the process that has started this one closes the connection, or ends."""
    # A stop is that process's to handle: it may still need answers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        answer = _made(connection.recv())
        while True:
            request = connection.recv()
            try:
                reply: Any = answer(*request)
            except Exception as error:
                error.add_note("".join(traceback.format_exception(error)))  # a pickled error loses its traceback
                reply = error
            connection.send(reply)


def _made(make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return the function that answers, or one that raises the error of making it."""
    try:
        return make()
    except Exception as error:
        reason = error

    def fail(*_: Any) -> Any:
        raise reason

    return fail


class Child:
    """A process that starts at once, and the thread that waits for it."""

    def __init__(self, make: Callable[[], Callable[..., Any]], task: str) -> None:
        """`make` returns the function that answers, in that process; both are pickled. `task` says what it does."""
        self._task = task
        self._connection, other = Pipe()
        code = f"from vitray.system import child; child.serve(child.Connection({other.fileno()}))"
        with other:
            # One compute thread, as a task of Ray with one CPU.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[other.fileno()], env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="child")
        self._asker.submit(self._connection.send, make)  # it may be larger than what the pipe holds

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Return whether it runs."""
        return self._process.poll() is None

    def submit(self, *request: Any) -> Future[Any]:
        """Ask for an answer to some arguments, after those of earlier calls."""
        return self._asker.submit(self._ask, request)

    def close(self) -> None:
        """End the process; calls that it has not answered fail."""
        self._process.kill()
        self._process.wait()
        self._asker.shutdown(cancel_futures=True)
        self._connection.close()

    def _ask(self, request: tuple[Any, ...]) -> Any:
        try:
            self._connection.send(request)
            reply = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            status = self._process.wait()
            raise RunError(f"a process that {self._task} ended with status {status}; see the lines above") from None
        if isinstance(reply, Exception):
            raise reply
        return reply
