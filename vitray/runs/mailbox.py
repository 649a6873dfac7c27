"""Where workers leave what they have to tell; a module of its own, so that its process loads nothing heavy."""

from typing import Any

import ray


@ray.remote(num_cpus=0)
class Desk:
    """Takes what workers tell until the driver fetches it, so that no worker waits for the driver unless it asks."""

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []
        self._decided: dict[int, bool] = {}
        self._ends = False
        self._given_up: str | None = None

    def put(self, record: dict[str, Any]) -> None:
        """Add a record."""
        self._records.append(record)

    def take(self) -> list[dict[str, Any]]:
        """All records since the last call."""
        records, self._records = self._records, []
        return records

    def decide(self, step: int, stop: bool) -> None:
        """The driver's answer to the scores of a step: whether training is to end there."""
        self._decided[step] = stop

    def end(self) -> None:
        """The driver's wish: a checkpoint, and then the end."""
        self._ends = True

    def ends(self) -> bool:
        """Whether the driver wishes it to end."""
        return self._ends

    def decision(self, step: int) -> bool | None:
        """The answer to the scores of a step; None until there is one."""
        return self._decided.get(step)

    def give_up(self, reason: str) -> None:
        """A worker's word that no other start would do better."""
        self._given_up = reason

    def given_up(self) -> str | None:
        """That word."""
        return self._given_up
