"""Whether the shards on disk are those that dataset.json describes.

The sha256 of a local shard is checked once on a machine, by the first process that reads it: the user's folder keeps a
file for each checked version of a shard. Of a remote shard that would fetch every byte, and readers fetch only some row
groups: its size and the layout in its footer are checked.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from vitray.data.shards.manifest import Dataset, shard_errors
from vitray.errors import ConfigError
from vitray.system import storage
from vitray.system.mlflow_client import user_dir

CHECKED = "checked"


def check_sizes(dataset: Dataset, splits: Iterable[str]) -> None:
    """Check that each shard of dataset.json exists with its listed size."""
    sizes = storage.file_sizes(dataset.url)
    for split in splits:
        for shard in dataset.splits[split].shards:
            if dataset.address(shard) == shard.name:  # indexed in place, and opened when read
                continue
            got = sizes.get(shard.name)
            if got != shard.bytes:
                state = "is missing" if got is None else f"has {got} bytes"
                raise ConfigError(f"{dataset.address(shard)}: {state}, expected {shard.bytes} bytes as in dataset.json")


def check_dataset(dataset: Dataset) -> None:
    """Check the size of each shard, and the content of local ones that this machine has not checked."""
    check_sizes(dataset, dataset.splits)
    shards = [shard for split in dataset.splits.values() for shard in split.shards]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing a file releases the interpreter's lock
        list(pool.map(lambda shard: check_shard(dataset.address(shard), shard.bytes, shard.sha256), shards))


@lru_cache(maxsize=2**16)
def check_shard(url: str, size: int, sha256: str) -> None:
    """Refuse a local shard with other content than in dataset.json; without a read if this machine has checked it."""
    if storage.is_remote(url):
        return
    with shard_errors(url):
        path = storage.filesystem(url)[1]
        if (got := os.stat(path).st_size) != size:
            raise ConfigError(f"{url}: has {got} bytes, expected {size} bytes as in dataset.json")
        mark, file = _mark(url, sha256), None
        with suppress(OSError):  # a folder that cannot be written, or without locks: each process checks for itself
            mark.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)  # another process may be reading the same shard
        try:
            if file is not None and os.fstat(file).st_size:
                return
            with open(path, "rb") as shard:
                if hashlib.file_digest(shard, "sha256").hexdigest() != sha256:
                    raise ConfigError(
                        f"{url}: its sha256 is not that of dataset.json: the file was damaged or replaced; remove the"
                        " dataset and run `vitray shard` again"
                    )
            if file is not None:
                os.write(file, f"{url}\n".encode())
        finally:
            if file is not None:
                os.close(file)


def mark_checked(url: str, sha256: str) -> None:
    """Spare the check on this machine: the caller has just written the shard."""
    if not storage.is_remote(url):
        with suppress(OSError):
            mark = _mark(url, sha256)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(f"{url}\n")


def _mark(url: str, sha256: str) -> Path:
    """Return the file that is not empty once this version of a shard is checked."""
    path = storage.filesystem(url)[1]
    status = os.stat(path)
    # The time of the last change of the inode: a copy or an archive can keep the others, but not this one.
    version = json.dumps([path, status.st_size, status.st_ctime_ns, sha256])
    return user_dir() / CHECKED / hashlib.sha256(version.encode()).hexdigest()
