"""What is known of a trial, in its run's folder: enough to tell a scheduler again what it was told before."""

import json
from typing import Any, Literal, NamedTuple

from vitray import storage

RECORD = "trial.json"
State = Literal["waiting", "running", "finished", "stopped early", "failed"]


class Record(NamedTuple):
    """The scores of a trial so far, and how it ended."""

    state: State = "waiting"
    scores: tuple[tuple[int, float], ...] = ()
    """The goal's metric, by step."""
    reason: str | None = None
    """Of a failure."""
    began: float | None = None
    """When it was begun, the last time, in seconds since 1970."""
    ended: float | None = None

    def best(self, mode: Literal["max", "min"]) -> float | None:
        """The best score so far."""
        return (max if mode == "max" else min)((value for _, value in self.scores), default=None)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to run."""
        return self.state in ("finished", "stopped early", "failed")


def read_record(home: str) -> Record:
    """The record of the trial in a folder; of one that was not begun, an empty one."""
    if not storage.exists(storage.join(home, RECORD)):
        return Record()
    content = json.loads(storage.read_bytes(storage.join(home, RECORD)))
    scores = tuple((step, value) for step, value in content["scores"])
    return Record(content["state"], scores, content["reason"], content.get("began"), content.get("ended"))


def write_record(home: str, record: Record) -> None:
    """Replace the record of the trial in a folder."""
    storage.write_bytes(storage.join(home, RECORD), json.dumps(record._asdict()).encode())


def ended(home: str) -> dict[str, Any] | None:
    """What the run itself left when it was over."""
    where = storage.join(home, "outcome.json")
    return json.loads(storage.read_bytes(where)) if storage.exists(where) else None
