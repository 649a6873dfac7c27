"""A worker's heartbeats: its position in the run, sent also while it waits for the other workers."""

import socket
import threading
import time
from typing import Any

from vitray.data.stream import Share
from vitray.training.messages import Activity, Heartbeat

# Seconds between two heartbeats.
INTERVAL = 5.0


class HeartbeatSender:
    """A thread that sends this worker's position to the mailbox."""

    def __init__(self, mailbox: Any, share: Share) -> None:
        self._mailbox, self._share, self._node = mailbox, share, socket.gethostname()
        self._position: tuple[int, Activity, float] = 0, "start", time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def at(self, step: int, activity: Activity) -> None:
        """Set the position; the next heartbeat sends it."""
        self._position = step, activity, time.monotonic()

    def send(self, *, has_failed: bool = False) -> None:
        """Send a heartbeat now."""
        step, activity, since = self._position
        seconds = time.monotonic() - since
        rank, workers, _ = self._share
        self._mailbox.beat.remote(Heartbeat(rank, workers, self._node, step, activity, seconds, has_failed))

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        self.send()  # a worker that dies soon is named with its node
        while not self._closed.wait(INTERVAL):
            self.send()
