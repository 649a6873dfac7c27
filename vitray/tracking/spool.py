"""What a run has to tell, on the driver's disk: written before it is sent, so that neither server nor kill loses it."""

import fcntl
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vitray.errors import redact
from vitray.tracking.mlflow_client import user_folder

RECORDS = "records.jsonl"
LOCK = "lock"
MARK = "mark"
ARTIFACTS = "artifacts"


class Mark(NamedTuple):
    """How many bytes of the records have reached which MLflow run."""

    run_id: str
    sent: int


class Entry(NamedTuple):
    """One record, and where in the file the next one starts."""

    end: int
    body: dict[str, Any]


class Last(NamedTuple):
    """The latest `begin` (None: there is none), whether an `end` follows it, and when the latest record was made."""

    begin: dict[str, Any] | None
    ended: bool
    time: int


def spool() -> Path:
    """The folder of all journals of this user."""
    return user_folder() / "spool"


def now() -> int:
    """Milliseconds since 1970, as MLflow counts."""
    return int(time.time() * 1000)


class Journal:
    """The records of one run, in order; one process at a time has them open, and a process that dies lets go.

    BlockingIOError says that another one has them, still after `patience` seconds.
    """

    def __init__(self, folder: Path, patience: float = 0.0) -> None:
        self.folder = folder
        self._lock = _locked(folder, patience)
        self._writing = threading.Lock()
        (folder / RECORDS).touch(mode=0o600)
        self._file = (folder / RECORDS).open("r+b", buffering=0)
        # A line that a kill tore has no end; what comes next begins where it began.
        self.size = (folder / RECORDS).read_bytes().rfind(b"\n") + 1
        os.ftruncate(self._file.fileno(), self.size)

    def append(self, body: dict[str, Any]) -> None:
        """Add a record, less the credentials of addresses in it."""
        line = redact(json.dumps(body, separators=(",", ":"))).encode() + b"\n"
        with self._writing:
            # At a place rather than at the end: after a write that a full disk cut short, the next one covers it.
            written = 0
            while written < len(line):
                written += os.pwrite(self._file.fileno(), line[written:], self.size + written)
            self.size += len(line)

    def store(self, name: str, content: bytes) -> str:
        """Keep a file that is to be sent under this name, and return where it lies in the folder."""
        place = Path(ARTIFACTS) / uuid.uuid4().hex / name
        (self.folder / place).parent.mkdir(parents=True)
        (self.folder / place).write_bytes(content)
        return str(place)

    def read(self, start: int, most: int = 1 << 20) -> list[Entry]:
        """The records from byte `start` on, about `most` bytes of them; a line that is no record counts as empty."""
        block = os.pread(self._file.fileno(), min(most, self.size - start), start)
        if b"\n" not in block and len(block) < self.size - start:
            return self.read(start, 4 * most)
        entries, end = [], start
        for line in block.splitlines(keepends=True):
            if line.endswith(b"\n"):
                end += len(line)
                entries.append(Entry(end, _parsed(line)))
        return entries

    def every(self) -> Iterator[Entry]:
        """All records."""
        end = 0
        while entries := self.read(end):
            yield from entries
            end = entries[-1].end

    def last(self, until: int | None = None) -> Last:
        """How the records stand, up to a byte."""
        begin, ended, latest = None, False, 0
        for end, body in self.every():
            if until is not None and end > until:
                break
            latest = body.get("time", latest)
            if body.get("kind") == "begin":
                begin, ended = body, False
            ended = ended or body.get("kind") == "end"
        return Last(begin, ended, latest)

    @property
    def mark(self) -> Mark | None:
        """How far the records were sent; None before the first."""
        try:
            return Mark(**json.loads((self.folder / MARK).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def set_mark(self, mark: Mark) -> None:
        """Note how far the records were sent."""
        aside = self.folder / f"{MARK}.aside"
        aside.write_text(json.dumps(mark._asdict()))
        aside.replace(self.folder / MARK)

    def close(self) -> None:
        """Let go of the records."""
        if not self._file.closed:
            self._file.close()
            os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder, and let go of it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()


def _locked(folder: Path, patience: float) -> int:
    """A descriptor that holds the folder's lock, which the system frees when the process ends, however it ends."""
    until = time.monotonic() + patience
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        # Readable by the owner alone: parameters and paths are nobody else's business.
        folder.chmod(0o700)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
            continue
        # Whoever had it may have removed the folder in the meantime, and with it the file that is locked now.
        if (folder / LOCK).exists() and os.fstat(lock).st_ino == (folder / LOCK).stat().st_ino:
            return lock
        os.close(lock)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        body = json.loads(line)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
