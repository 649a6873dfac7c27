"""The trials of a sweep by name, in the order they were thought of: on disk before one of them begins."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from vitray import storage
from vitray.config import Run
from vitray.config.training import Finetune
from vitray.errors import ConfigError
from vitray.models.sizes import Sizes, sizes_of
from vitray.runs.driver import HOME, stored_run
from vitray.sweep.space import Point, run_of
from vitray.sweep.trial_record import Record, ended, read_record

POINTS = "points.json"


class Entry(NamedTuple):
    """A trial before it is run."""

    point: Point
    """What is laid over the sweep's run."""
    asked: dict[str, Any] | None = None
    """What a sampler said of a point that it drew: its own parameters, and what it notes of them."""


def read_entries(home: str) -> dict[str, Entry]:
    """{name: trial} of the sweep in a folder."""
    where = storage.join(home, POINTS)
    found = json.loads(storage.read_bytes(where)) if storage.exists(where) else {}
    return {name: Entry(Point(**entry["point"]), entry["asked"]) for name, entry in found.items()}


class Ledger:
    """The trials of this start of a sweep, and what is known of each."""

    def __init__(self, home: str, base: Run, points: Mapping[str, Point], learns: bool) -> None:
        """A search that learns goes on with the points that it drew; any other has these points."""
        self.home, self.base = home, base
        self._runs: dict[str, Run] = {}
        self._sizes: dict[str, Sizes] = {}
        self._over: dict[str, tuple[Record, dict[str, Any]]] = {}
        known = read_entries(home)
        given = {name: Entry(Point(*json.loads(json.dumps(point)))) for name, point in points.items()}
        for name, entry in given.items():
            began, now = known.get(name, entry).point, entry.point
            if (began.settings, began.before) != (now.settings, now.before):
                raise ConfigError(
                    f"{home}: the space now gives trial {name} {now.settings}, it was begun with {began.settings};"
                    " choose another --name"
                )
        self.entries = known if learns else given
        # A point that the space has lost stays known: the space may get it back.
        self._lost = {name: entry for name, entry in known.items() if name not in self.entries}
        self._write()

    def add(self, name: str, entry: Entry) -> None:
        """One more trial."""
        self.entries[name] = entry
        self._write()

    def place(self, name: str) -> str:
        """The folder of a trial's run."""
        return storage.join(self.home, name)

    def run(self, name: str) -> Run:
        """What a trial trains."""
        if name not in self._runs:
            self._runs[name] = run_of(self.base, self.entries[name].point, self.home)
        return self._runs[name]

    def record(self, name: str) -> Record:
        """How far a trial has come."""
        return self._known(name)[0]

    def outcome(self, name: str) -> dict[str, Any]:
        """What a trial's run left when it was over."""
        return self._known(name)[1]

    def cost(self, name: str, what: str) -> float | None:
        """What a trial's network or its run takes; None where that is not known yet."""
        if what not in ("params", "gflops"):
            return self.outcome(name).get(what)
        sizes = self.sizes(name)
        return sizes and getattr(sizes, what)

    def sizes(self, name: str) -> Sizes | None:
        """Of a trial's network: a fine-tuning has that of its weights, which is known once it has begun."""
        if name not in self._sizes:
            run, place = self.run(name), self.place(name)
            if isinstance(run.task, Finetune):
                if not storage.exists(storage.join(place, HOME)):
                    return None
                run = stored_run(place)
            self._sizes[name] = sizes_of(run.model)
        return self._sizes[name]

    def records(self) -> dict[str, Record]:
        """How far each trial has come, in order."""
        return {name: self.record(name) for name in self.entries}

    def _known(self, name: str) -> tuple[Record, dict[str, Any]]:
        if name in self._over:
            return self._over[name]
        record = read_record(self.place(name))
        known = record, (ended(self.place(name)) or {}) if record.is_over else {}
        if record.is_over:
            self._over[name] = known
        return known

    def _write(self) -> None:
        entries = {
            name: {"point": entry.point._asdict(), "asked": entry.asked}
            for name, entry in (self._lost | self.entries).items()
        }
        storage.write_bytes(storage.join(self.home, POINTS), json.dumps(entries).encode())
