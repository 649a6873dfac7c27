"""What Ray Tune asks the driver: which trial is next, and whether all are to end."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.tune.search import Searcher

from vitray import storage
from vitray.sweep.driver import Planned
from vitray.sweep.space import Space, draw_point, name_of
from vitray.sweep.trial_store import Entry, Ledger

INTERRUPTED = "interrupted"


class Interruption:
    """Whether somebody has said that the sweep is to end now; the trials read it from a file."""

    def __init__(self, home: str) -> None:
        self.signal: int | None = None
        self._marker = storage.join(home, INTERRUPTED)
        storage.remove(self._marker)

    def tell(self) -> None:
        """Let the trials know."""
        storage.write_bytes(self._marker, b"the sweep was told to end\n")

    def close(self) -> None:
        """Forget it: the next start goes on."""
        storage.remove(self._marker)


def is_interrupted(home: str) -> bool:
    """Whether the sweep in a folder is told to end."""
    return storage.exists(storage.join(home, INTERRUPTED))


@contextmanager
def interruptible(home: str) -> Iterator[Interruption]:
    """Ctrl-C and SIGTERM end the trials, which go on when the sweep is started again; a second one ends at once."""
    interruption = Interruption(home)

    def hear(number: int, _frame: Any) -> None:
        interruption.signal = number
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    finally:
        restore()
        interruption.close()


class Handing(Searcher):
    """Hands out the trials that are not over, then what a search that learns draws."""

    def __init__(self, planned: Planned, ledger: Ledger, space: Space, retells: bool) -> None:
        """`retells`: a scheduler that starts anew hears of the trials that are over too."""
        super().__init__()
        self._planned, self._ledger, self._space = planned, ledger, space
        self._began = time.monotonic()
        waiting = [name for name, record in ledger.records().items() if retells or not record.is_over]
        if retells:
            # In the order of their values each might look best so far, and none would be stopped.
            random.Random(0).shuffle(waiting)
        # What is over is told first: whatever runs then is compared with it.
        self._waiting = sorted(waiting, key=lambda name: not ledger.record(name).is_over)

    def suggest(self, trial_id: str) -> dict[str, Any] | str:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        """The name of the next trial, or that there is none."""
        if self._waiting and (self._ledger.record(self._waiting[0]).is_over or not self.is_spent()):
            return {"name": self._waiting.pop(0)}
        if self._waiting or not self._space.learns or len(self._ledger.entries) >= self._planned.trials:
            return Searcher.FINISHED
        name = None if self.is_spent() else self._draw()
        return {"name": name} if name else Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing: what became of a trial is read from its record."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: all that it knows is in the ledger and in the records."""

    def is_spent(self) -> bool:
        """Whether no further trial is to begin: time or money is spent, or too many trials have failed."""
        budget, records = self._space.budget, self._ledger.records()
        failed = sum(record.state == "failed" for record in records.values())
        if failed > self._space.failures * self._planned.trials:
            return True
        if budget.minutes is not None and time.monotonic() - self._began > 60 * budget.minutes:
            return True
        if budget.device_hours is None:
            return False
        spent = sum(self._ledger.cost(name, "device_seconds") or 0.0 for name in records)
        return spent >= 3600 * budget.device_hours

    def _draw(self) -> str | None:
        """The name of a new point; None where no other is found."""
        from vitray.sweep.sampler import TRIES, Told, ask

        against = getattr(self._space.search, "against", None)
        told = [
            Told(entry.asked, self._ledger.record(name), against and self._ledger.cost(name, against))
            for name, entry in self._ledger.entries.items()
            if entry.asked is not None
        ]
        for attempt in range(TRIES):
            drawn = ask(self._space, told, attempt)
            point = draw_point(self._space, drawn.values)
            if point and (name := name_of(point, self._space)) not in self._ledger.entries:
                self._ledger.add(name, Entry(point, drawn.asked))
                return name
        return None
