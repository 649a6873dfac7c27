"""The processes of the local Ray that this process has started; seconds after its raylet's end Ray ends it, too."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

LOST = (
    "Ray's raylet on this machine was killed, perhaps for lack of memory, or has crashed; the same --name, or --resume,"
    " continues from the last checkpoint"
)

_processes: list[psutil.Process] = []
_raylets: list[psutil.Process] = []
_tree: list[psutil.Process] = []
_threads: list[threading.Thread] = []
_end = threading.Event()


def start(init: Callable[[], Any]) -> None:
    """Start Ray with a function, and remember its processes."""
    others = psutil.Process().children()
    _call(init)
    _processes[:] = [child for child in psutil.Process().children() if child not in others]
    _raylets[:] = [process for process in _processes if process.name() == "raylet"]
    _end.clear()
    # It waits from now on: no thread can start while Python exits, when a kept Ray ends.
    _threads[:] = [threading.Thread(target=_kill_after_raylet, name="kill", daemon=True)]
    _threads[0].start()


def _call(init: Callable[[], Any]) -> None:
    try:
        init()
    except ValueError:  # before any process: a free port that Ray has drawn is 52365, which its agent takes
        init()


def shut_down(shutdown: Callable[[], Any]) -> None:
    """Disconnect from Ray, and end its processes if this one has started them.

    They block SIGTERM (`session.ray_session`), so Ray kills each a second later. All others are killed with the raylet,
    also its own children, which would try to report its end for a minute.
    """
    alive = [process for process in _processes if process.is_running()]
    _tree[:] = [process for each in alive for process in (each, *each.children(recursive=True))]
    _end.set()
    shutdown()
    for thread in _threads:
        thread.join()
    for each in (_processes, _raylets, _threads):
        each.clear()


def _kill_after_raylet() -> None:
    _end.wait()
    while not is_lost():
        time.sleep(0.02)
    for process in _tree:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def is_running() -> bool:
    """Whether this process has started a local Ray, and not ended it."""
    return bool(_processes)


def is_lost() -> bool:
    """Whether the raylet that this process has started has ended."""
    return bool(_raylets) and all(map(_has_ended, _raylets))


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended between the two
        return True
