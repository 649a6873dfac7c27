"""Many calls of one function as Ray tasks, and the line that says how far they are."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vitray.cluster import session
from vitray.errors import ConfigError


@contextmanager
def tasks_at_a_time(workers: int | None) -> Iterator[int]:
    """A running Ray, and how many tasks run at a time: as asked, or one for each CPU."""
    with session.running(cpus=workers, dashboard=False):
        import ray

        yield workers or max(1, int(ray.cluster_resources().get("CPU", 1)))


def run_tasks(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    at_a_time: int,
    finished: Callable[[int], None] = lambda _: None,
) -> list[Any]:
    """The results of `function(*call)` for each call, in order; `finished(index)` hears of each as it ends."""
    import ray
    from ray.exceptions import RayTaskError

    task = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(function)
    results: list[Any] = [None] * len(calls)
    running: dict[Any, int] = {}
    waiting = iter(enumerate(calls))
    while True:
        while len(running) < at_a_time and (following := next(waiting, None)):
            index, call = following
            running[task.remote(*call)] = index
        if not running:
            return results
        for done in ray.wait(list(running))[0]:
            index = running.pop(done)
            try:
                results[index] = ray.get(done)
            except RayTaskError as error:
                if isinstance(error.cause, ConfigError):
                    raise error.cause from None  # the trace through Ray says nothing to the user
                raise
            finished(index)


class Progress:
    """One line on stderr: rewritten on a terminal, else printed anew every ten seconds."""

    def __init__(self, doing: str, total: int) -> None:
        self.doing, self.total, self.done = doing, total, 0
        self.began = self.printed = time.monotonic()
        self.live = sys.stderr.isatty()

    def add(self, images: int) -> None:
        """Count images as done."""
        self.done += images
        now = time.monotonic()
        if now - self.printed >= (0.1 if self.live else 10):
            self.printed = now
            self._print("\r" if self.live else "")

    def end(self) -> None:
        """Print the last state for good."""
        self._print("\r" if self.live else "")
        if self.live:
            print(file=sys.stderr)

    def _print(self, start: str) -> None:
        rate = self.done / max(time.monotonic() - self.began, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        clock = f"{int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02}"
        line = f"{self.doing} {self.done:,}/{self.total:,} images, {rate:,.0f} images/s, {clock} left"
        print(f"{start}{line:<72}", end="" if self.live else "\n", file=sys.stderr, flush=True)
