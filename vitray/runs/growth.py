"""Growth of an elastic run: when nodes join, its workers save, and start again in a larger number.

Ray Train itself would end the workers for it, and the steps since their last checkpoint would be lost.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray

from vitray.config import Run
from vitray.runs.placement import Placement, alive_nodes, room_for_workers

# Seconds between two looks at the nodes, and in which no further node joins before the workers start again.
LOOK_SECONDS, SETTLE_SECONDS = 5.0, 15.0
# For Ray Train's own looks, in place of a minute.
NEVER = 1e9


class Growth:
    """Watches the nodes beside one attempt of a run."""

    def __init__(self, run: Run, placement: Placement, mailbox: Any) -> None:
        self._run, self._placement, self._mailbox = run, placement, mailbox
        self._ended = threading.Event()
        self.is_requested = False
        """Whether the workers were asked to save and end, so that more can start."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the nodes during a block."""
        lowest, highest = self._placement.workers
        if lowest == highest:
            yield
            return
        thread = threading.Thread(target=self._watch, args=[highest], name="growth", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
        thread.join(5)

    def _watch(self, highest: int) -> None:
        known, joined, since = set(alive_nodes()), set[str](), 0.0
        while not self._ended.wait(LOOK_SECONDS):
            with suppress(Exception):  # the head may be away for a while
                new = set(alive_nodes()) - known
                if new != joined:
                    joined, since = new, time.monotonic()
                elif new and time.monotonic() - since >= SETTLE_SECONDS and self._has_room(highest):
                    self.is_requested = True
                    self._mailbox.request_stop.remote()
                    return

    def _has_room(self, highest: int) -> bool:
        beats = ray.get(self._mailbox.heartbeats.remote())
        if not beats:  # the workers start
            return False
        workers = min(beats, key=lambda beat: beat[1])[0].workers
        free = ray.available_resources()
        gpus = self._run.compute.gpus if self._placement.use_gpu else 0.0
        is_free = free.get("CPU", 0.0) >= self._placement.cpus and free.get("GPU", 0.0) >= gpus
        return is_free and min(highest, room_for_workers(self._run, self._placement, alive_nodes())) > workers
