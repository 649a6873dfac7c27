"""Backoff after an out-of-memory kill, and deduplication of Ray Train's retry logs."""

import logging
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from ray.train import ControllerError, UserCallback

from vitray.training.messages import Note

# Seconds before the first restart, the second, and each later one.
WAITS = 15, 60, 240
# Seconds between two log lines about workers that wait for room.
LOG_INTERVAL = 60.0
# Parent of Ray Train's loggers.
RAY_TRAIN = "ray.train.v2._internal"
# Loggers of harmless warnings, thirty lines each: a repeated autoscaling request, and cleanup on dead workers.
QUIET_LOGGERS = {
    f"{RAY_TRAIN}.execution.scaling_policy.autoscaling_coordinator_client": logging.ERROR,
    f"{RAY_TRAIN}.callbacks.backend_setup": logging.ERROR,
}
# The logger of each failed attempt to start the workers, and how the names of its errors begin.
CONTROLLER, START_ERRORS = f"{RAY_TRAIN}.execution.controller.controller", "WorkerGroupStartup"
# Part of the raylet's message about a worker that it has killed for memory, and the node and the usage in it.
LOW_MEMORY = "running low on memory"
MEMORY_USAGE = re.compile(r"\(IP: (\S+), .*?was (\S+) (?:used )?/ (\S+) (?:limit|\()")


class StartupRetryFilter(logging.Filter):
    """Shortens the log of repeated start attempts: one line per interval instead of thirty per attempt."""

    _next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        error = record.exc_info[1] if record.exc_info else None
        if not type(error).__name__.startswith(START_ERRORS):
            return True
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + LOG_INTERVAL
        reason = str(error).partition(". ")[0]
        record.msg, record.args, record.exc_info = f"{reason}; tried again until there is room for them", None, None
        return True


for _name, _level in QUIET_LOGGERS.items():
    logging.getLogger(_name).setLevel(_level)
logging.getLogger(CONTROLLER).addFilter(StartupRetryFilter())


class OomBackoff(UserCallback):
    """Delays a restart after an out-of-memory kill, which would otherwise repeat until all restarts are used up."""

    def __init__(self, mailbox: Any, restarts: int) -> None:
        self._mailbox, self._restarts_left, self._kills = mailbox, restarts, 0

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Wait before Ray Train decides about a restart."""
        del run_context
        self._restarts_left -= 1
        if self._restarts_left >= 0 and (reason := out_of_memory_reason(worker_exceptions.values())):
            seconds = WAITS[min(self._kills, len(WAITS) - 1)]
            self._kills += 1
            _wait(self._mailbox, reason, seconds)


def fit_with_backoff(fit: Callable[[], Any], mailbox: Any) -> Any:
    """Call `fit`, again after a worker was killed during its start, which Ray Train itself does not retry."""
    for seconds in WAITS:
        try:
            return fit()
        except ControllerError as error:
            if not (reason := out_of_memory_reason([error])):
                raise
            _wait(mailbox, reason, seconds)
    return fit()


def _wait(mailbox: Any, reason: str, seconds: int) -> None:
    mailbox.put.remote(Note(f"{reason}; the workers wait {seconds} s for it"))
    time.sleep(seconds)


def out_of_memory_reason(errors: Iterable[BaseException]) -> str | None:
    """Return the node that ran out of memory and its usage; None if no worker was killed for memory."""
    for error in errors:
        if LOW_MEMORY in (text := str(error)):
            usage = MEMORY_USAGE.search(text)
            node, amount = (f" {usage[1]}", f", {usage[2]} of {usage[3]} taken") if usage else ("", "")
            return f"node{node} ran out of memory{amount}"
    return None
