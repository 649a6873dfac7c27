"""Hangs: the workers that the others waited for until a collective operation timed out."""

import re
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, get_args

import ray
from ray.train import UserCallback

import vitray.runs.oom_backoff  # noqa: F401 (its filters of Ray Train's loggers, in the process of the controller)
from vitray.training.messages import Activity, Heartbeat

# Seconds that a worker waits for the others in a collective operation. Rank 0 may wait 17 minutes for a storage that is
# away before it gives up: six tries to write a checkpoint, of 140 seconds each, and the pauses between them.
COLLECTIVE_SECONDS = 1800
# Seconds after the first worker's time-out in which the others report theirs.
SETTLE_SECONDS = 3.0
# Seconds without a heartbeat after which a worker counts as silent: several heartbeats are missing.
SILENT_SECONDS = 30.0
# Workers that a message names.
NAMED = 3


class HangReport(UserCallback):
    """Names the workers behind a time-out, for the driver."""

    def __init__(self, mailbox: Any, timeout: float) -> None:
        self._mailbox, self._timeout = mailbox, timeout

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Record a hang before Ray Train ends the workers, or that there is none."""
        del run_context
        hang = self._describe(worker_exceptions) if is_timeout(worker_exceptions.values()) else None
        if hang is not None:
            time.sleep(SETTLE_SECONDS)
            hang = self._describe(worker_exceptions) or hang
        ray.get(self._mailbox.record_hang.remote(hang))

    def _describe(self, worker_exceptions: dict[int, Exception]) -> str | None:
        return describe_hang(ray.get(self._mailbox.heartbeats.remote()), worker_exceptions, self._timeout)


def is_timeout(errors: Iterable[BaseException]) -> bool:
    """Return whether an error may be a collective operation's time-out, on which NCCL ends the process."""
    return any(re.search(r"timed? ?out|died", str(error), re.IGNORECASE) for error in errors)


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
    names = [_name(beat, age) for beat, age in behind[:NAMED]]
    names += [f"and {len(behind) - NAMED} more workers"] if len(behind) > NAMED else []
    return f"{', '.join(names)}; the others waited at the {_place(first)}"


def _progress(beat: Heartbeat) -> tuple[int, int]:
    return beat.step, get_args(Activity).index(beat.activity)


def _place(beat: Heartbeat) -> str:
    return f"{beat.activity} of step {beat.step:,}"


def _name(beat: Heartbeat, age: float) -> str:
    worker = f"worker {beat.rank} (node {beat.node})"
    if age > SILENT_SECONDS:
        return f"{worker} has been silent for {age:.0f} s, last at the {_place(beat)}"
    return f"{worker} has been at the {_place(beat)} for {beat.seconds + age:.0f} s"
