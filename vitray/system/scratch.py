"""Temporary folders that are removed even after a kill: by the next process that needs one."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

PREFIX, LOCK = "vitray-", ".lock"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a temporary folder for the length of the block; a lock in it ends with this process."""
    _remove_abandoned()
    # Processes of Ray that end at the same moment may still write to it.
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        lock = os.open(folder / f"{LOCK}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with suppress(OSError):  # a file system without locks: after a kill the folder stays
                fcntl.flock(lock, fcntl.LOCK_EX)
                (folder / f"{LOCK}.new").rename(folder / LOCK)  # a file of this name has always been locked
            yield folder
        finally:
            os.close(lock)


@cache
def _remove_abandoned() -> None:
    """Remove this user's temporary folders whose process has ended, once in a process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, in use, or without a lock
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)
