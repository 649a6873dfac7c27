"""The raylet that this process has started: seconds after its end Ray ends this process, too."""

import psutil

RAYLET = "raylet"  # the name of the process
LOST = (
    "Ray's raylet on this machine was killed, perhaps for lack of memory, or has crashed; the same --name, or --resume,"
    " continues from the last checkpoint"
)

_raylets: list[psutil.Process] = []


def watch() -> None:
    """Remember the raylets among the child processes."""
    _raylets[:] = [child for child in psutil.Process().children() if child.name() == RAYLET]


def forget() -> None:
    """Watch no raylet any more."""
    _raylets.clear()


def is_lost() -> bool:
    """Whether the raylets that this process has started have ended."""
    return bool(_raylets) and all(
        not raylet.is_running() or raylet.status() == psutil.STATUS_ZOMBIE for raylet in _raylets
    )
