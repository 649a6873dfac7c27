"""The start of a run in this process, before torch is imported: its place among others, and who decodes for it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from vitray.cluster import session
from vitray.data.decode_processes import DecodeProcesses
from vitray.errors import ConfigError


class Place(NamedTuple):
    """What torchrun, and other starters of processes, tell each of them; without one it is alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @staticmethod
    def told() -> "Place":
        """Return the place in the environment of this process."""
        told = {name: os.environ.get(name.upper(), str(alone)) for name, alone in Place()._asdict().items()}
        for name, text in told.items():
            if not text.isdecimal():
                raise ConfigError(f"{name.upper()}: got {text!r}, expected a number, as torchrun sets it")
        return Place(**{name: int(text) for name, text in told.items()})


_kept: DecodeProcesses | None = None  # by a trial for the next one, and until this process ends


@contextmanager
def decode_processes(place: Place, own_cpus: int | None) -> Iterator[DecodeProcesses]:
    """Start the processes that decode, one for each CPU beside that of the worker."""
    global _kept
    number = max(1, (own_cpus or session.local_cpus() // place.local_world_size) - 1)
    if own_cpus is None:
        with DecodeProcesses(number) as processes:
            yield processes
        return
    if _kept is None or len(_kept) != number or not _kept.are_alive():
        if _kept is not None:
            _kept.close()
        _kept = DecodeProcesses(number)
    yield _kept
