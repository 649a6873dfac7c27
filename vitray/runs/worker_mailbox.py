"""The mailbox between workers and driver, in this process or as an actor; a light module, which an actor imports."""

import time
from collections import deque

from vitray.errors import ConfigError, OwnershipLost
from vitray.training.messages import Heartbeat, Message

# Its loss, for the user.
LOST = "the process that passes the workers' messages on was killed on the driver's node, perhaps for lack of memory"


class MailboxLost(Exception):  # noqa: N818 (as OwnershipLost)
    """Training failed, and the mailbox had died."""


class Mailbox:
    """Holds the workers' messages until the driver fetches them, and the driver's answers."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()  # without Ray, several threads use it
        self._decisions: dict[int, bool] = {}
        self._is_stop_requested = False
        self._fatal_error: ConfigError | OwnershipLost | None = None
        self._heartbeats: dict[int, tuple[Heartbeat, float]] = {}
        self._hang: str | None = None

    def put(self, message: Message) -> None:
        """Add a message."""
        self._messages.append(message)

    def take(self) -> list[Message]:
        """Return all messages since the last call."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def decide(self, step: int, stop: bool) -> None:
        """Record whether training stops early after the evaluation of a step."""
        self._decisions[step] = stop

    def decision(self, step: int) -> bool | None:
        """Return that decision; None until there is one."""
        return self._decisions.get(step)

    def request_stop(self) -> None:
        """Ask the workers to save a checkpoint and end."""
        self._is_stop_requested = True

    def forget_stop(self) -> None:
        """Take back the request, once the workers have ended."""
        self._is_stop_requested = False

    def is_stop_requested(self) -> bool:
        """Return whether the workers should end."""
        return self._is_stop_requested

    def record_fatal_error(self, error: ConfigError | OwnershipLost) -> None:
        """Record an error that a restart cannot fix."""
        self._fatal_error = error

    def fatal_error(self) -> ConfigError | OwnershipLost | None:
        """Return that error, or None."""
        return self._fatal_error

    def beat(self, heartbeat: Heartbeat) -> None:
        """Keep a worker's heartbeat in place of its last one."""
        self._heartbeats[heartbeat.rank] = heartbeat, time.monotonic()

    def heartbeats(self) -> list[tuple[Heartbeat, float]]:
        """Return the last heartbeat of each worker and its age in seconds."""
        return [(heartbeat, time.monotonic() - at) for heartbeat, at in self._heartbeats.values()]

    def record_hang(self, reason: str | None) -> None:
        """Record whether the last failure was a hang."""
        self._hang = reason

    def hang(self) -> str | None:
        """Return that hang, or None."""
        return self._hang
