"""Failures of the workers, as one message: the dead workers, or the first error that follows from no other."""

import logging
import re
import sys
from collections.abc import Sequence

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.train import WorkerGroupError
from torch.distributed import DistError

from vitray.errors import ConfigError, OwnershipLost, cut_middle, one_line
from vitray.training.messages import Heartbeat

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
