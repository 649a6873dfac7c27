"""Restarts of failed workers, with a backoff after an out-of-memory kill, and deduplication of Ray Train's logs."""

import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train import ControllerError, TrainingFailedError, WorkerGroupError
from ray.util.annotations import RayDeprecationWarning

from vitray.errors import OwnershipLost, RunError
from vitray.runs.failures import describe_failure, out_of_memory_reason
from vitray.runs.worker_mailbox import MailboxLost
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


# Ray Train resets the levels of its loggers in its processes, but not their filters.
for _name, _level in QUIET_LOGGERS.items():
    logging.getLogger(_name).addFilter(lambda record, level=_level: record.levelno >= level)
logging.getLogger(CONTROLLER).addFilter(StartupRetryFilter())
# Ray Train itself sets this option, in each run.
warnings.filterwarnings("ignore", "`ExecutionOptions.exclude_resources` is deprecated", RayDeprecationWarning)


def fit_with_restarts(fit: Callable[[], Any], mailbox: Any, restarts: int) -> Any:
    """Call `fit`, and again after each failure of the workers, `restarts` times at most; raise a RunError at last.

    A worker's OwnershipLost is raised as such: the run has not failed. Without its mailbox, training cannot start again
    here: a MailboxLost is raised.
    """
    kills = 0
    for left in reversed(range(restarts + 1)):
        try:
            return fit()
        except (TrainingFailedError, RayActorError, OutOfMemoryError) as error:
            if not ray.is_initialized():  # a second Ctrl-C ended it; the next line would start another Ray
                raise
            try:
                fatal, hang, heartbeats = ray.get(
                    [mailbox.fatal_error.remote(), mailbox.hang.remote(), mailbox.heartbeats.remote()]
                )
            except RayActorError as lost:
                raise MailboxLost from lost
            if isinstance(fatal, OwnershipLost):
                raise fatal from error
            if fatal:
                raise RunError(str(fatal)) from error
            cause, is_kill = describe_failure(error, heartbeats), out_of_memory_reason(error) is not None
            if isinstance(error, ControllerError) and not is_kill:
                raise RunError(f"the workers failed: {cause}") from error
            if hang and isinstance(error, WorkerGroupError):
                cause = hang
            if not left:
                remedy = "; give the node more memory, or run less on it: docs/faq.md#out-of-memory" if is_kill else ""
                times = "once" if not restarts else f"{restarts + 1} times, the last time"
                raise RunError(f"the workers failed {times}: {cause}{remedy}") from error
            seconds = WAITS[min(kills, len(WAITS) - 1)] if is_kill else 0
            kills += is_kill
            wait = f"start again in {seconds} s" if is_kill else "start again"
            mailbox.put.remote(Note(f"{cause}; the workers {wait}"))
            time.sleep(seconds)
            if not ray.is_initialized():
                raise
    raise AssertionError("no attempt is left")
