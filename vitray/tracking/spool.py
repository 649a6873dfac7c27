"""A run's records on the driver's disk, written before upload so that no server outage or kill loses them."""

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
from vitray.system.mlflow_client import user_dir

RECORDS, LOCK, CURSOR, ARTIFACTS = "records.jsonl", "lock", "mark", "artifacts"


class SpoolCursor(NamedTuple):
    """Upload progress: the MLflow run, and the number of bytes of the records it has received."""

    run_id: str
    sent: int


class SpoolRecord(NamedTuple):
    """One record, and the byte where the next one starts."""

    end: int
    body: dict[str, Any]


def spool_dir() -> Path:
    """Return the folder of all spools of this user."""
    return user_dir() / "spool"


def now() -> int:
    """Return the time in milliseconds since 1970, the unit of MLflow."""
    return int(time.time() * 1000)


class Spool:
    """The records of one run, in order, locked by one process at a time.

    The lock ends with the process. If another process still holds it after `timeout` seconds: BlockingIOError.
    """

    def __init__(self, folder: Path, timeout: float = 0.0) -> None:
        self.folder = folder
        self._lock = _lock_folder(folder, timeout)
        self._write_lock = threading.Lock()
        (folder / RECORDS).touch(mode=0o600)
        self._file = (folder / RECORDS).open("r+b", buffering=0)
        # Cut off a last line that a kill left incomplete.
        self.size = (folder / RECORDS).read_bytes().rfind(b"\n") + 1
        os.ftruncate(self._file.fileno(), self.size)

    def append(self, body: dict[str, Any]) -> None:
        """Add a record, without the credentials of its addresses."""
        line = redact(json.dumps(body, separators=(",", ":"))).encode() + b"\n"
        with self._write_lock:
            # At a fixed offset, so that the next record overwrites one that a full disk cut short.
            written = 0
            while written < len(line):
                written += os.pwrite(self._file.fileno(), line[written:], self.size + written)
            self.size += len(line)

    def store_file(self, name: str, content: bytes) -> str:
        """Store a file for upload under this name; return its path in the folder."""
        path = Path(ARTIFACTS) / uuid.uuid4().hex / name
        (self.folder / path).parent.mkdir(parents=True)
        (self.folder / path).write_bytes(content)
        return str(path)

    def stored(self, name: str) -> Path | None:
        """Return the path of a stored file; None for one outside the folder of stored files."""
        path = (self.folder / name).resolve()
        return path if path.is_relative_to((self.folder / ARTIFACTS).resolve()) else None

    def records(self, start: int = 0) -> Iterator[SpoolRecord]:
        """Yield the records from byte `start` on; a malformed line is an empty record."""
        size = self.size  # of the complete records: another thread may be writing the next one
        with (self.folder / RECORDS).open("rb") as file:
            file.seek(start)
            while start < size:
                line = file.readline()
                start += len(line)
                try:
                    body = json.loads(line)
                except ValueError:
                    body = None
                yield SpoolRecord(start, body if isinstance(body, dict) else {})

    @property
    def cursor(self) -> SpoolCursor | None:
        """The upload progress; None before the first upload."""
        try:
            return SpoolCursor(**json.loads((self.folder / CURSOR).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def set_cursor(self, cursor: SpoolCursor) -> None:
        """Save the upload progress."""
        temporary = self.folder / f"{CURSOR}.aside"
        temporary.write_text(json.dumps(cursor._asdict()))
        temporary.replace(self.folder / CURSOR)

    def close(self) -> None:
        """Close the records and release the lock."""
        if not self._file.closed:
            self._file.close()
            os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder and release the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()


def _lock_folder(folder: Path, timeout: float) -> int:
    """Return a file descriptor that holds the folder's lock until the process ends."""
    deadline = time.monotonic() + timeout
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # parameters and paths are private
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
            continue
        # The previous owner may have removed the folder, and with it the file that is now locked.
        if (folder / LOCK).exists() and os.fstat(lock).st_ino == (folder / LOCK).stat().st_ino:
            return lock
        os.close(lock)
