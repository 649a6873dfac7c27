"""Failures of the workers: which one came first, whom the others waited for, when they start again, and what is logged.

The process of Ray Train's controller and the workers import this module for its filters of Ray Train's loggers.
"""

import logging
import re
import sys
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, get_args

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.train import ControllerError, TrainingFailedError, UserCallback, WorkerGroupError
from ray.util.annotations import RayDeprecationWarning
from torch.distributed import DistError

from vitray.errors import ConfigError, OwnershipLost, RunError, cut_middle, one_line
from vitray.runs.worker_mailbox import MailboxLost
from vitray.training.messages import Activity, Heartbeat, Note

# ---- the first cause -------------------------------------------------------------------------------------------------

# Parts of Ray's message about a dead actor, and their meaning. Ray does not report the signal that ended a process.
DEATHS = {
    "its node has died": "its node was lost",
    "connection error code 2": (
        "its process was killed (SIGKILL, perhaps for lack of memory) or crashed (perhaps by SIGSEGV)"
    ),
}
EXIT_DETAIL = re.compile(r"Worker exit detail: (.+)")
# Part of the raylet's message about a worker that it has killed for memory, and the node and the usage in it.
LOW_MEMORY = "running low on memory"
MEMORY_USAGE = re.compile(r"\(IP: (\S+), .*?was (\S+) (?:used )?/ (\S+) (?:limit|\()")
# Workers that a message names, and characters of an error in it.
NAMED, LONGEST_ERROR = 3, 500
# Logger of the traceback of each worker's error.
TRACEBACKS = "ray.train.v2._internal.util"
# Part of gloo's errors, which have no class of their own: the path of its source.
GLOO = "gloo/"


def is_secondary(error: BaseException) -> bool:
    """Return whether an error means that another process is gone: one of Ray, or of a collective operation."""
    if isinstance(error, RayTaskError):  # an error of a task, such as decoding
        return False
    return isinstance(error, RayError | DistError) or (isinstance(error, RuntimeError) and GLOO in str(error))


def logs_traceback(record: logging.LogRecord) -> bool:
    """Return whether Ray Train logs the traceback of the current error.

    The driver's message replaces those of secondary errors, of bad input and of a lost folder.
    """
    del record
    error = sys.exc_info()[1]
    return error is None or not (is_secondary(error) or isinstance(error, ConfigError | OwnershipLost))


logging.getLogger(TRACEBACKS).addFilter(logs_traceback)


def describe_failure(error: BaseException, heartbeats: Sequence[tuple[Heartbeat, float]]) -> str:
    """Return the cause of a failed training in one line."""
    if reason := out_of_memory_reason(error):
        return reason
    failures = error.worker_failures if isinstance(error, WorkerGroupError) else {}
    if not failures:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1] if lines else type(error).__name__
    names = {beat.rank: f"worker {beat.rank} (node {beat.node})" for beat, _ in heartbeats}
    if dead := {rank: death for rank, failure in failures.items() if (death := _death(failure))}:
        texts = [f"{names.get(rank, f'worker {rank}')} died: {dead[rank]}" for rank in sorted(dead)]
        return "; ".join([*texts[:NAMED], *([f"{len(dead) - NAMED} more workers died"] if len(dead) > NAMED else [])])
    first = min(failures, key=lambda rank: (is_secondary(failures[rank]), rank))
    text = cut_middle(one_line(failures[first]), LONGEST_ERROR)
    return f"{names.get(first, f'worker {first}')} ended with {text}"


def out_of_memory_reason(error: BaseException) -> str | None:
    """Return the node that ran out of memory and its usage; None if no worker was killed for memory."""
    failures = error.worker_failures.values() if isinstance(error, WorkerGroupError) else ()
    for text in map(str, (error, *failures)):
        if LOW_MEMORY in text:
            usage = MEMORY_USAGE.search(text)
            node, amount = (f" {usage[1]}", f", {usage[2]} of {usage[3]} taken") if usage else ("", "")
            return f"node{node} ran out of memory{amount}"
    return None


def _death(failure: BaseException) -> str | None:
    """Return why a worker's process is gone; None if it is not."""
    cause = getattr(failure, "health_check_failure", None)  # in an error of Ray Train without a public class
    if not isinstance(cause, RayActorError):
        return None
    text = str(cause)
    detail = EXIT_DETAIL.search(text)
    reason = cut_middle(detail[1] if detail else one_line(cause), LONGEST_ERROR)
    return next((meaning for part, meaning in DEATHS.items() if part in text), reason)


# ---- hangs: workers that the others waited for until a collective operation timed out --------------------------------

# Seconds after the first worker's time-out in which the others report theirs.
SETTLE_SECONDS = 3.0
# Seconds without a heartbeat after which a worker counts as silent: several heartbeats are missing.
SILENT_SECONDS = 30.0


class HangReport(UserCallback):
    """Names the workers behind a time-out, for the driver."""

    def __init__(self, mailbox: Any, timeout: float) -> None:
        self._mailbox, self._timeout = mailbox, timeout

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Record a hang before Ray Train ends the workers, or that there is none."""
        del run_context
        # On a collective operation's time-out NCCL ends the process.
        may_hang = any(re.search(r"timed? ?out|died", str(error), re.I) for error in worker_exceptions.values())
        hang = self._describe(worker_exceptions) if may_hang else None
        if hang is not None:
            time.sleep(SETTLE_SECONDS)
            hang = self._describe(worker_exceptions) or hang
        ray.get(self._mailbox.record_hang.remote(hang))

    def _describe(self, worker_exceptions: dict[int, Exception]) -> str | None:
        return describe_hang(ray.get(self._mailbox.heartbeats.remote()), worker_exceptions, self._timeout)


def describe_hang(beats: Sequence[tuple[Heartbeat, float]], failed: Collection[int], timeout: float) -> str | None:
    """Return the workers that the failed ones waited for; None if no failed one waited for about `timeout` seconds.

    Each heartbeat comes with its age in seconds.
    """
    if not beats:
        return None
    latest, _ = min(beats, key=lambda beat: beat[1])
    if latest.workers == 1:
        return None
    group = [(beat, age) for beat, age in beats if beat.rank < latest.workers]  # without those of a larger group before
    has_failed = {beat.rank for beat, _ in group if beat.has_failed or beat.rank in failed}
    silent = [(beat, age) for beat, age in group if age > SILENT_SECONDS]
    waited = [(beat, age) for beat, age in group if beat.rank in has_failed and age <= SILENT_SECONDS]
    # A position may be some seconds younger than the operation. Ray itself ends a silent worker, before the time-out.
    has_waited = any(beat.seconds + age >= 0.9 * timeout for beat, age in waited)
    if not has_waited and not any(beat.rank in has_failed and age >= timeout / 4 for beat, age in silent):
        return None
    others = [(beat, age) for beat, age in group if beat.rank not in has_failed] or group
    last = min(_progress(beat) for beat, _ in others)
    behind = sorted(silent or [(beat, age) for beat, age in others if _progress(beat) == last])
    first = max((beat for beat, _ in group), key=_progress)
    names = [_worker_text(beat, age) for beat, age in behind[:NAMED]]
    names += [f"and {len(behind) - NAMED} more workers"] if len(behind) > NAMED else []
    return f"{', '.join(names)}; the others waited at the {_place(first)}"


def _progress(beat: Heartbeat) -> tuple[int, int]:
    return beat.step, get_args(Activity).index(beat.activity)


def _place(beat: Heartbeat) -> str:
    return f"{beat.activity} of step {beat.step:,}"


def _worker_text(beat: Heartbeat, age: float) -> str:
    worker = f"worker {beat.rank} (node {beat.node})"
    if age > SILENT_SECONDS:
        return f"{worker} has been silent for {age:.0f} s, last at the {_place(beat)}"
    return f"{worker} has been at the {_place(beat)} for {beat.seconds + age:.0f} s"


# ---- restarts --------------------------------------------------------------------------------------------------------

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
