"""Before the driver has workers begin anew: some time for memory to be given back, and less to read."""

import logging
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from ray.train import ControllerError, UserCallback

# Seconds before the first start after it, the second and those after: what took the memory may need as long.
WAITS = 15, 60, 240
# Seconds between two words on workers that still wait for room.
SAID_EVERY = 60.0
# Loggers below Ray Train's, as its release of now names them.
TRAIN = "ray.train.v2._internal"


class OneLine(logging.Filter):
    """Of a start that is tried again every few seconds one line now and then, in place of thirty each time."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is said."""
        error = record.exc_info[1] if record.exc_info else None
        if not type(error).__name__.startswith("WorkerGroupStartup"):
            return True
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + SAID_EVERY
        why = str(error).partition(". ")[0]
        record.msg, record.args, record.exc_info = f"{why}; tried again until there is room for them", None, None
        return True


# Both say themselves that they may be ignored, in thirty lines: a request for nodes that nobody answered within seconds
# and that is sent again, and a farewell to workers that are gone.
for _name in ("execution.scaling_policy.autoscaling_coordinator_client", "callbacks.backend_setup"):
    logging.getLogger(f"{TRAIN}.{_name}").setLevel(logging.ERROR)
logging.getLogger(f"{TRAIN}.execution.controller.controller").addFilter(OneLine())


class WaitForMemory(UserCallback):
    """Holds the restart back; without it Ray ends the new workers too, and all tries are spent within seconds."""

    def __init__(self, desk: Any, tries: int) -> None:
        """`tries`: how often workers begin anew, after which nothing is waited for."""
        self._desk, self._left, self._times = desk, tries, 0

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called by what leads the workers, before it decides what is next."""
        del run_context
        self._left -= 1
        if self._left >= 0 and (why := short_of_memory(worker_exceptions.values())):
            seconds = WAITS[min(self._times, len(WAITS) - 1)]
            self._times += 1
            _wait(self._desk, why, seconds)


def fit_patiently(fit: Callable[[], Any], desk: Any) -> Any:
    """What training returns. Ray Train gives up at once where a worker is ended before it has begun: that waits too."""
    for seconds in WAITS:
        try:
            return fit()
        except ControllerError as error:
            if not (why := short_of_memory([error])):
                raise
            _wait(desk, why, seconds)
    return fit()


def _wait(desk: Any, why: str, seconds: int) -> None:
    desk.put.remote({"kind": "note", "text": f"{why}; the workers wait {seconds} s for it"})
    time.sleep(seconds)


def short_of_memory(errors: Iterable[BaseException]) -> str | None:
    """Where memory ran out and how far, if that is what ended a worker."""
    for error in errors:
        if "running low on memory" in (said := str(error)):
            found = re.search(r"\(IP: (\S+), .*?was (\S+) used / (\S+) limit", said)
            node, taken = (f" {found[1]}", f", {found[2]} of {found[3]} taken") if found else ("", "")
            return f"node{node} ran out of memory{taken}"
    return None
