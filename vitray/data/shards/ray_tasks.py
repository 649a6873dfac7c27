"""Many calls of one function as Ray tasks, with a progress line."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vitray.cluster import session
from vitray.errors import ConfigError


@contextmanager
def tasks_at_a_time(workers: int | None) -> Iterator[int]:
    """Start or join Ray, and yield the number of concurrent tasks: `workers`, or one per CPU."""
    with session.ray_session(cpus=workers):
        import ray

        yield workers or max(1, int(ray.cluster_resources().get("CPU", 1)))


def run_tasks(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    at_a_time: int,
    on_done: Callable[[int], None] = lambda _: None,
) -> list[Any]:
    """Return the results of `function(*call)` for each call, in order; `on_done(index)` is called as each one ends."""
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
                    raise error.cause from None  # without Ray's traceback
                raise
            on_done(index)


def run_with_progress(
    function: Callable[..., None], calls: Sequence[tuple[Any, ...]], images: Sequence[int], doing: str, at_a_time: int
) -> None:
    """Run tasks and print the number of images done; `images` is the number of images of each call."""
    if calls:
        progress = ProgressLine(doing, sum(images))
        run_tasks(function, calls, at_a_time, lambda index: progress.add(images[index]))
        progress.end()


class ProgressLine:
    """One line on stderr: rewritten on a terminal, otherwise printed every ten seconds."""

    def __init__(self, doing: str, total: int) -> None:
        self.doing, self.total, self.done = doing, total, 0
        self.began = self.printed = time.monotonic()
        self.is_live = sys.stderr.isatty()

    def add(self, images: int) -> None:
        """Count images as done."""
        self.done += images
        now = time.monotonic()
        if now - self.printed >= (0.1 if self.is_live else 10):
            self.printed = now
            self._print()

    def end(self) -> None:
        """Print the final state."""
        self._print()
        if self.is_live:
            print(file=sys.stderr)

    def _print(self) -> None:
        rate = self.done / max(time.monotonic() - self.began, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        clock = f"{int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02}"
        line = f"{self.doing} {self.done:,}/{self.total:,} images, {rate:,.0f} images/s, {clock} left"
        start, end = ("\r", "") if self.is_live else ("", "\n")
        print(f"{start}{line:<72}", end=end, file=sys.stderr, flush=True)
