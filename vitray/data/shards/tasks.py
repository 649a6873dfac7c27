"""Many calls of one function at a time, with a progress line: tasks of Ray on a cluster, else processes of this one."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from vitray.cluster import session
from vitray.errors import ConfigError
from vitray.system.child import Child

# Begins a call of a function.
Place = Callable[[Callable[..., Any], tuple[Any, ...]], Future[Any]]


class Tasks:
    """Calls of functions, one at a time in each place."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places

    def run(
        self,
        function: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        on_done: Callable[[int], None] = lambda _: None,
    ) -> list[Any]:
        """Return the results of `function(*call)` for each call, in order; `on_done(index)` is called as each ends."""
        results: list[Any] = [None] * len(calls)
        free, waiting = list(reversed(self._places)), iter(enumerate(calls))
        running: dict[Future[Any], tuple[int, Place]] = {}
        while True:
            while free and (following := next(waiting, None)):
                (index, call), place = following, free.pop()
                running[place(function, call)] = index, place
            if not running:
                return results
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                index, place = running.pop(future)
                free.append(place)
                try:
                    results[index] = future.result()
                except Exception as error:
                    if isinstance(cause := getattr(error, "cause", None), ConfigError):
                        raise cause from None  # without Ray's traceback
                    raise
                on_done(index)


@contextmanager
def open_tasks(workers: int | None) -> Iterator[Tasks]:
    """Yield tasks of the caller's Ray or that at RAY_ADDRESS, else processes: `workers` at a time, or one per CPU."""
    with ExitStack() as ending:
        if session.starts_local_ray():
            yield Tasks([_process(ending) for _ in range(workers or session.local_cpus())])
            return
        ending.enter_context(session.ray_session())
        import ray

        # Once for a function: Ray would send it with each.
        remote: Any = cache(ray.remote(num_cpus=1, scheduling_strategy="SPREAD"))
        number = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        yield Tasks([lambda function, call: remote(function).remote(*call).future()] * number)


def _process(ending: ExitStack) -> Place:
    """Return a place in a process of this machine, which starts with its first call and ends with the stack."""

    @cache
    def child() -> Child:
        started = Child(_caller, "works on images")
        ending.callback(started.close)
        return started

    return lambda function, call: child().submit(function, call)


def _caller() -> Callable[..., Any]:
    return lambda function, call: function(*call)


def run_with_progress(
    tasks: Tasks, function: Callable[..., None], calls: Sequence[tuple[Any, ...]], images: Sequence[int], doing: str
) -> None:
    """Run tasks and print the number of images done; `images` is the number of images of each call."""
    if calls:
        progress = ProgressLine(doing, sum(images))
        tasks.run(function, calls, lambda index: progress.add(images[index]))
        progress.end()


class ProgressLine:
    """One line on stderr: rewritten on a terminal, otherwise printed every ten seconds."""

    def __init__(self, doing: str, total: int, what: str = "images") -> None:
        self.doing, self.total, self.what, self.done = doing, total, what, 0
        self.began = self.printed = time.monotonic()
        self.is_live = sys.stderr.isatty()

    def add(self, count: int) -> None:
        """Count images, or what else is counted, as done."""
        self.done += count
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
        line = f"{self.doing} {self.done:,}/{self.total:,} {self.what}, {rate:,.0f} {self.what}/s, {clock} left"
        start, end = ("\r", "") if self.is_live else ("", "\n")
        print(f"{start}{line:<72}", end=end, file=sys.stderr, flush=True)
