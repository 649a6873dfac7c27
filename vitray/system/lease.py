"""The lease of a folder: one process at a time writes to it, from any machine, on a path or on S3.

    <folder>/.owner/<id>.json   the claim of a process: host, process id and time
    <folder>/.owner/<id>.beat   a count that the owner renews

A process writes its claim, then lists all claims. It owns the folder if it is alone, else it withdraws. At its end it
removes its claim. Of two processes at the same time at least one lists both claims, so two never own the folder. This
needs listings that show every earlier write, as those of S3 and of file systems do. Conditional writes are not used:
`rclone serve s3`, for example, accepts and ignores their headers.

A claim is void if its process has provably ended on this machine, or if its beat stays the same while another process
reads it for LEASE_SECONDS. No clocks of two machines are compared.
"""

import itertools
import json
import os
import random
import socket
import sys
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from vitray.errors import ConfigError, OwnershipLost
from vitray.system import storage
from vitray.system.processes import is_alive, is_dead, process_tags

FOLDER, CLAIM, BEAT = ".owner", ".json", ".beat"
# Seconds between two beats, and without a beat until another process takes over.
RENEW_SECONDS, LEASE_SECONDS = 20.0, 120.0
# Seconds between two looks at another's claim, and most seconds between two tries of processes that start together.
POLL_SECONDS, MAX_BACKOFF = 1.0, 4.0


class Claim(NamedTuple):
    """A process that owns a folder, or tries to."""

    process: dict[str, str]
    """Its tags, as in MLflow."""
    since: str
    beat: bytes | None
    """None before it owns the folder."""

    def __str__(self) -> str:
        return f"process {self.process['vitray.pid']} on {self.process['vitray.host']}, since {self.since}"


class Ownership:
    """A folder that this process owns until `release`, and the thread that renews its lease."""

    def __init__(self, folder: str, name: str, other: str) -> None:
        self.id = ""
        """Of the claim: a new one at each try, as others may still be reading the one that was withdrawn."""
        self._folder, self._name, self._other = folder, name, other
        self._lost: OwnershipLost | None = None
        self._closing, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._renew, name="ownership", daemon=True)

    def acquire(self, patience: float) -> None:
        """Acquire the folder, once a dead owner's lease has expired; refuse an owner alive after `patience` seconds.

        Without patience the refusal is a ConfigError, otherwise an OwnershipLost: a later try may succeed.
        """
        watch, start, is_announced = Watch(self._folder), time.monotonic(), False
        for attempt in itertools.count():
            others = watch.live()
            if not others and self._claim(watch):
                self._thread.start()
                return
            owners = [each for each in others if others[each].beat is not None]
            if not owners:  # other processes start at the same moment
                time.sleep(random.uniform(0, min(MAX_BACKOFF, 0.1 * 2 ** min(attempt, 10))))
                continue
            owner = others[owners[0]]
            if time.monotonic() - start >= patience and watch.is_alive(owners[0]):
                raise (OwnershipLost if patience else ConfigError)(
                    f"{self._name}: {self._folder} is in use by {owner}; wait for it to end, stop it, or choose"
                    f" another {self._other}"
                )
            if not is_announced:
                wait = f"waiting up to {LEASE_SECONDS:.0f} s until it has ended"
                print(f"vitray: {self._name} was last used by {owner}; {wait}", file=sys.stderr, flush=True)
            is_announced = True
            time.sleep(POLL_SECONDS)

    @property
    def is_lost(self) -> bool:
        """Whether the renewal has found another owner."""
        return self._lost is not None

    def check(self) -> None:
        """Raise OwnershipLost if the renewal has found another owner."""
        if self._lost:
            raise self._lost

    def release(self) -> None:
        """Leave the folder to the next process."""
        self._closing.set()
        # A beat that a slow storage writes later would stay.
        with self._writing, suppress(ConfigError):  # the lease ends by itself
            if not self._lost:
                _remove(self._folder, self.id)
                if not storage.is_remote(self._folder):
                    with suppress(OSError):  # another process has a claim there
                        os.rmdir(storage.filesystem(storage.join(self._folder, FOLDER))[1])

    def _claim(self, watch: "Watch") -> bool:
        """Write a claim, and return whether it is the only live one; else withdraw it."""
        self.id = uuid.uuid4().hex
        content = {"process": process_tags(), "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())}
        for attempt in range(2):
            try:
                storage.write_bytes(_file(self._folder, self.id, CLAIM), json.dumps(content).encode())
                break
            except ConfigError:  # the owner before may have removed the empty folder of claims at this moment
                if attempt:
                    raise
        try:
            if watch.live().keys() == {self.id}:
                storage.write_bytes(_file(self._folder, self.id, BEAT), b"0")
                if self.id in _claims(_names(self._folder)):  # not removed by another owner after a long pause
                    for void in watch.void:
                        _remove(self._folder, void)
                    return True
        except BaseException:
            with suppress(ConfigError):
                _remove(self._folder, self.id)
            raise
        _remove(self._folder, self.id)
        return False

    def _renew(self) -> None:
        """Renew the lease until the end; an unreachable storage is tried again."""
        for count in itertools.count(1):
            if self._closing.wait(RENEW_SECONDS):
                return
            with suppress(ConfigError):
                try:
                    check_owner(self._folder, self.id)
                except OwnershipLost as error:
                    self._lost = error
                    return
                # Without a claim the folder is away: a beat would make another one in its place.
                if self.id in _claims(_names(self._folder)):
                    with self._writing:
                        if not self._closing.is_set():
                            storage.write_bytes(_file(self._folder, self.id, BEAT), str(count).encode())


class Watch:
    """The claims of a folder, observed by one process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._looked = 0.0
        # {id: the claim and when its beat was first read, on the monotonic clock}
        self._seen: dict[str, tuple[Claim, float]] = {}
        # {id: when its beat last changed}, on the same clock
        self._changed: dict[str, float] = {}
        self.void: set[str] = set()
        """Ids of the void claims: of a dead process, or without a new beat for LEASE_SECONDS."""

    def live(self) -> dict[str, Claim]:
        """Read the folder and return {id: claim} of the claims that are not void."""
        began = time.monotonic()
        claims = _read_claims(self._folder)
        if began - self._looked > RENEW_SECONDS:  # unread meanwhile, as when the storage was away
            self._seen = {}
        self._looked, seen = time.monotonic(), self._seen
        changed = [each for each in claims if each in seen and seen[each][0].beat != claims[each].beat]
        self._changed |= dict.fromkeys(changed, self._looked)
        self._seen = {
            each: seen[each] if each in seen and seen[each][0].beat == claim.beat else (claim, self._looked)
            for each, claim in claims.items()
        }
        live = {
            each: claim
            for each, claim in claims.items()
            if not is_dead(claim.process) and began - self._seen[each][1] < LEASE_SECONDS
        }
        self.void = claims.keys() - live.keys()
        return live

    def is_alive(self, claim: str) -> bool:
        """Whether the process of a claim lives on this machine, or has just renewed its lease."""
        is_renewed = claim in self._changed and time.monotonic() - self._changed[claim] < 2 * RENEW_SECONDS
        return is_renewed or is_alive(self._seen[claim][0].process) is True


@contextmanager
def own_folder(folder: str, name: str, patience: float = 0.0, other: str = "--name") -> Iterator[Ownership]:
    """Own a folder for the length of the block; refuse one whose owner is alive after `patience` seconds.

    `other` says in that message which choice would lead to another folder.
    """
    ownership = Ownership(folder, name, other)
    ownership.acquire(patience)
    try:
        yield ownership
    finally:
        ownership.release()


def check_owner(folder: str, owner: str) -> None:
    """Raise OwnershipLost if another process has taken over the folder; it may have finished and left since.

    "" is no owner, of a folder that nobody claims.
    """
    if owner in (ids := _claims(_names(folder))) or not (ids or owner):
        return
    if not ids and not storage.is_remote(folder) and not os.path.isdir(storage.filesystem(folder)[1]):
        return  # a network disk is away, and with it all claims
    latest = max(_read_claims(folder).values(), key=lambda claim: claim.since, default=None)
    raise OwnershipLost(
        f"{folder}: taken over by {latest or 'another process'}, as this process did not renew its lease for"
        f" {LEASE_SECONDS:.0f} s; this process ends and writes nothing more"
    )


def check_visible(folder: str, owner: str | None) -> None:
    """Refuse a folder in which this node does not see its owner's claim; None or "" is no owner."""
    # By its name, which is new: a network file system may repeat an earlier listing for a minute.
    if owner and not storage.is_remote(folder) and not storage.exists(_file(folder, owner, CLAIM)):
        raise ConfigError(
            f"--out: {folder} of the driver is not visible on node {socket.gethostname()}; expected s3://bucket/key, or"
            " a path that all nodes share"
        )


def _names(folder: str) -> list[str]:
    return storage.list_files(storage.join(folder, FOLDER))


def _claims(names: Collection[str]) -> set[str]:
    """Return the ids of the claims among the names of files."""
    return {name.removesuffix(CLAIM) for name in names if name.endswith(CLAIM)}


def _read_claims(folder: str) -> dict[str, Claim]:
    """Return {id: claim}, without those that are withdrawn meanwhile."""
    claims, names = {}, _names(folder)
    for each in _claims(names):
        beat = _read(_file(folder, each, BEAT)) if f"{each}{BEAT}" in names else None
        if content := _read(_file(folder, each, CLAIM)):
            claims[each] = Claim(**json.loads(content), beat=beat)
    return claims


def _read(url: str) -> bytes | None:
    """Return the content of a file; None without one."""
    try:
        return storage.read_bytes(url)
    except ConfigError:
        if storage.exists(url):
            raise
        return None


def _remove(folder: str, claim: str) -> None:
    storage.remove(_file(folder, claim, CLAIM))
    storage.remove(_file(folder, claim, BEAT))


def _file(folder: str, claim: str, suffix: str) -> str:
    return storage.join(folder, FOLDER, f"{claim}{suffix}")
