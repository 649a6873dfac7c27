"""Progress of a sweep on stderr: a table that a terminal rewrites in place, or a line at times in a file."""

import time
from collections.abc import Mapping
from typing import TextIO

from vitray.config.sweep import Goal
from vitray.runs.console import Console, clock
from vitray.sweeps.trial_store import TrialRecord

# Seconds between two tables on a terminal, and between two lines in a file or a pipe.
TABLE_INTERVAL, LINE_INTERVAL = 0.5, 30.0
# Rows of running trials in the table.
MOST_RUNNING = 12


class SweepConsole:
    """Progress of a sweep."""

    def __init__(
        self, trials: int, goal: Goal, records: Mapping[str, TrialRecord], stream: TextIO | None = None
    ) -> None:
        self._trials, self._goal, self._console = trials, goal, Console(stream)
        self._started = self._last_end = time.monotonic()
        self._printed, self._rows = 0.0, 0
        # Trials that were over at the start do not count in the estimate of the remaining time.
        self._over = self._over_at_start = sum(record.is_over for record in records.values())

    def show(self, records: Mapping[str, TrialRecord]) -> None:
        """Print the progress, once per interval and at each end of a trial."""
        over = sum(record.is_over for record in records.values())
        interval = TABLE_INTERVAL if self._console.is_terminal else LINE_INTERVAL
        if over == self._over and time.monotonic() - self._printed < interval:
            return
        self._printed = time.monotonic()
        if over != self._over:
            self._over, self._last_end = over, self._printed
        self._clear()
        rows = self._table(records) if self._console.is_terminal else [self._sentence(records)]
        print("\n".join(rows), file=self._console.stream, flush=True)
        self._rows = len(rows) if self._console.is_terminal else 0

    def line(self, text: str) -> None:
        """Print a permanent line."""
        self._clear()
        self._console.line(text)

    def end(self, facts: Mapping[str, str]) -> None:
        """Print the end block."""
        self._clear()
        self._console.block(facts)

    def _sentence(self, records: Mapping[str, TrialRecord]) -> str:
        running = [name for name, record in records.items() if record.state == "running"]
        best = self._best(records)
        parts = [self._counts(records), *([f"running {', '.join(running)}"] if running else [])]
        parts += [f"best {best} {self._score(records[best])}"] if best else []
        return f"  {'; '.join(parts)}; {self._left()} left"

    def _table(self, records: Mapping[str, TrialRecord]) -> list[str]:
        """Return the rows of the running trials and of the best, the counts, and the remaining time."""
        best = self._best(records)
        names = [name for name, record in records.items() if record.state == "running"][:MOST_RUNNING]
        names += [best] if best and best not in names else []
        width = max([5, *map(len, names)])
        rows = [f"  {'trial':<{width}}  {self._goal.metric:>12}  {'step':>9}  state"] if names else []
        for name in names:
            record = records[name]
            step = f"{record.scores[-1][0]:,}" if record.scores else "-"
            state = record.state + (", best so far" if name == best else "")
            rows.append(f"  {name:<{width}}  {self._score(record):>12}  {step:>9}  {state}")
        return [*rows, f"  {self._counts(records)}; {self._left()} left"]

    def _counts(self, records: Mapping[str, TrialRecord]) -> str:
        over = [record for record in records.values() if record.is_over]
        states = {state: sum(record.state == state for record in over) for state in ("stopped early", "failed")}
        details = ", ".join(f"{count} {state}" for state, count in states.items() if count)
        return f"{len(over)}/{max(self._trials, len(records))} over{f' ({details})' if details else ''}"

    def _best(self, records: Mapping[str, TrialRecord]) -> str | None:
        scores = {name: record.score for name, record in records.items() if record.score is not None}
        return (max if self._goal.mode == "max" else min)(scores, key=lambda name: scores[name], default=None)

    def _score(self, record: TrialRecord) -> str:
        return "-" if record.score is None else f"{record.score:.4g}"

    def _left(self) -> str:
        """Return the remaining time, from the mean time per trial so far."""
        done = self._over - self._over_at_start
        if not done:
            return "-"
        end = self._last_end + (self._last_end - self._started) / done * (self._trials - self._over)
        return clock(max(0.0, end - time.monotonic()))

    def _clear(self) -> None:
        if self._rows:
            print(f"\x1b[{self._rows}F\x1b[J", end="", file=self._console.stream)
            self._rows = 0
