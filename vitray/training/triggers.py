"""Triggers: the steps at which a run records, evaluates or saves."""

import time

from vitray.config import Run
from vitray.config.training import parse_duration
from vitray.training.schedule import in_steps


class Triggers:
    """The steps, counted as steps done, that need more than training."""

    def __init__(self, run: Run, steps_per_epoch: int, total: int) -> None:
        def regular(every: str) -> set[int]:
            steps = in_steps(every, steps_per_epoch)
            return {*range(steps, total + 1, steps), total}

        self.records, self.evaluations = regular(run.tracking.every), regular(run.evaluate.every)
        count, unit = parse_duration(run.checkpoint.every)
        self._minutes = count if unit == "minutes" else None
        self._checkpoints = {total} if unit == "minutes" else regular(run.checkpoint.every)
        self._saved = time.monotonic()

    def __contains__(self, step: int) -> bool:
        return step in self.records or step in self.evaluations or step in self._checkpoints

    def saves(self, step: int) -> bool:
        """Return whether to save a checkpoint; one that is due by the clock waits for the next record."""
        is_late = self._minutes is not None and time.monotonic() - self._saved >= self._minutes * 60
        if step in self._checkpoints or is_late:
            self._saved = time.monotonic()
            return True
        return False
