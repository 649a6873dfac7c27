"""Workers that Ray ended since a node ran out of memory: some time for it to be given back, before they begin anew."""

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from ray.train import ControllerError, UserCallback

# Seconds before the first start after it, the second and those after: what took the memory may need as long.
WAITS = 15, 60, 240


class WaitForMemory(UserCallback):
    """Holds the restart back; without it Ray ends the new workers too, and all tries are spent within seconds."""

    def __init__(self, desk: Any) -> None:
        self._desk, self._times = desk, 0

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called by Ray Train's controller, before it decides what is next."""
        del run_context
        if why := short_of_memory(worker_exceptions.values()):
            seconds = WAITS[min(self._times, len(WAITS) - 1)]
            self._times += 1
            _say(self._desk, why, seconds)
            time.sleep(seconds)


def fit_patiently(fit: Callable[[], Any], desk: Any) -> Any:
    """What training returns. Ray Train gives up at once where a worker is ended before it has begun: that waits too."""
    for seconds in WAITS:
        try:
            return fit()
        except ControllerError as error:
            if not (why := short_of_memory([error])):
                raise
            _say(desk, why, seconds)
            time.sleep(seconds)
    return fit()


def _say(desk: Any, why: str, seconds: int) -> None:
    desk.put.remote({"kind": "note", "text": f"{why}; the workers wait {seconds} s for it"})


def short_of_memory(errors: Iterable[BaseException]) -> str | None:
    """Where memory ran out and how far, if that is what ended a worker."""
    for error in errors:
        if "running low on memory" in (said := str(error)):
            found = re.search(r"\(IP: (\S+), .*?was (\S+) used / (\S+) limit", said)
            node, taken = (f" {found[1]}", f", {found[2]} of {found[3]} taken") if found else ("", "")
            return f"node{node} ran out of memory{taken}"
    return None
