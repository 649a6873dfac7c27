"""What a person sees of a sweep: on a terminal a table that lives, elsewhere a line now and then. All on stderr."""

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from vitray.config.sweep import Goal
from vitray.runs.console import clock
from vitray.sweep.trial_record import Record

# Seconds between two pictures of the table, and between two lines where nothing can be rewritten.
LIVE, PAUSE = 0.5, 30.0
# Running trials that the table has a row for.
MOST_ROWS = 12


class Screen:
    """Prints a sweep as it goes."""

    def __init__(self, trials: int, goal: Goal, known: Mapping[str, Record], stream: TextIO | None = None) -> None:
        self._trials, self._goal, self._stream = trials, goal, stream or sys.stderr
        self._live = self._stream.isatty()
        self._began = self._latest = time.monotonic()  # the latest: when a trial came to its end
        self._printed, self._rows = 0.0, 0
        # What was over before says nothing of how long the rest takes.
        self._before = sum(record.is_over for record in known.values())
        self._over = self._before

    def show(self, records: Mapping[str, Record]) -> None:
        """How far the trials have come."""
        over = sum(record.is_over for record in records.values())
        pause = LIVE if self._live else PAUSE
        if over == self._over and time.monotonic() - self._printed < pause:
            return
        self._printed = time.monotonic()
        if over != self._over:
            self._over, self._latest = over, self._printed
        self._clear()
        rows = self.table(records) if self._live else [self.sentence(records)]
        print("\n".join(rows), file=self._stream, flush=True)
        self._rows = len(rows) if self._live else 0

    def line(self, text: str) -> None:
        """A line that stays."""
        self._clear()
        print(text, file=self._stream, flush=True)

    def end(self, facts: Mapping[str, str]) -> None:
        """The end block."""
        self.line("\n" + "\n".join(f"  {key:<10} {text}" for key, text in facts.items()) + "\n")

    def sentence(self, records: Mapping[str, Record]) -> str:
        """All of it in one line."""
        running = [name for name, record in records.items() if record.state == "running"]
        best = self._best(records)
        said = [self._counts(records), *([f"running {', '.join(running)}"] if running else [])]
        said += [f"best {best} {self._score(records[best])}"] if best else []
        return f"  {'; '.join(said)}; {self._left()} left"

    def table(self, records: Mapping[str, Record]) -> list[str]:
        """Running trials and the best so far, each with its score and step, and how long the rest will take."""
        best = self._best(records)
        shown = [name for name, record in records.items() if record.state == "running"][:MOST_ROWS]
        shown += [best] if best and best not in shown else []
        width = max([5, *map(len, shown)])
        rows = [f"  {'trial':<{width}}  {self._goal.metric:>12}  {'step':>9}  state"] if shown else []
        for name in shown:
            record = records[name]
            step = f"{record.scores[-1][0]:,}" if record.scores else "-"
            state = record.state + (", best so far" if name == best else "")
            rows.append(f"  {name:<{width}}  {self._score(record):>12}  {step:>9}  {state}")
        return [*rows, f"  {self._counts(records)}; {self._left()} left"]

    def _counts(self, records: Mapping[str, Record]) -> str:
        over = [record for record in records.values() if record.is_over]
        states = {state: sum(record.state == state for record in over) for state in ("stopped early", "failed")}
        aside = ", ".join(f"{count} {state}" for state, count in states.items() if count)
        return f"{len(over)}/{self._trials} over{f' ({aside})' if aside else ''}"

    def _best(self, records: Mapping[str, Record]) -> str | None:
        scores = {
            name: score for name, record in records.items() if (score := record.best(self._goal.mode)) is not None
        }
        return (max if self._goal.mode == "max" else min)(scores, key=lambda name: scores[name], default=None)

    def _score(self, record: Record) -> str:
        score = record.best(self._goal.mode)
        return "-" if score is None else f"{score:.4g}"

    def _left(self) -> str:
        """By what a trial took so far, from when the latest of them ended."""
        done = self._over - self._before
        if not done:
            return "-"
        end = self._latest + (self._latest - self._began) / done * (self._trials - self._over)
        return clock(max(0.0, end - time.monotonic()))

    def _clear(self) -> None:
        if self._rows:
            print(f"\x1b[{self._rows}F\x1b[J", end="", file=self._stream)
            self._rows = 0
