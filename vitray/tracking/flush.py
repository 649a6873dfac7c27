"""Upload of the spools that earlier runs left behind, and the end of runs whose driver died."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from vitray.errors import one_line
from vitray.system.mlflow_client import import_mlflow, open_client, store_address, tracking_uri
from vitray.system.processes import is_dead
from vitray.tracking.model_registry import UID_TAG
from vitray.tracking.spool import RECORDS, Spool, spool_dir
from vitray.tracking.uploader import REASON_TAG, Uploader


class FlushResult(NamedTuple):
    """The result for one spool."""

    uid: str
    name: str
    state: Literal["complete", "waiting", "running"]
    message: str
    store: str | None
    """The address of its store."""


def flush_all(to: str | None = None) -> list[FlushResult]:
    """Upload every spool that no driver has open, to its own store or to the one at `to`; remove the complete ones."""
    import_mlflow()
    return [_flush(folder, to or _address(_store_of(folder))) for folder in _spool_folders()]


def close_dead_runs(experiment: str, uri: str) -> None:
    """Flush the spools of a store, then mark as KILLED its running runs whose driver died on this machine."""
    for folder in _spool_folders():
        if _store_of(folder) == store_address(uri):
            _flush(folder, uri)
    client = open_client(uri)
    entity = client.get_experiment_by_name(experiment)
    for run in client.search_runs([entity.experiment_id], "attributes.status = 'RUNNING'") if entity else []:
        tags = run.data.tags
        # A run that still has a spool here was flushed above, or has just been resumed.
        if UID_TAG in tags and not (spool_dir() / tags[UID_TAG]).exists() and is_dead(tags):
            client.set_tag(run.info.run_id, REASON_TAG, _death_notice(tags))
            client.set_terminated(run.info.run_id, "KILLED")


def _spool_folders() -> list[Path]:
    """Return all spools, parents first, as a parent run has to exist before its children, then the oldest first."""
    return sorted((path.parent for path in spool_dir().glob(f"*/{RECORDS}")), key=_order)


def _order(folder: Path) -> tuple[bool, int]:
    try:
        with (folder / RECORDS).open() as lines:
            begin = json.loads(lines.readline())
            return begin["parent"] is not None, begin["time"]
    except (OSError, ValueError, KeyError):
        return False, 0


def _store_of(folder: Path) -> str | None:
    """Return the store of the run, which its latest start has recorded; None if none is recorded."""
    try:
        with (folder / RECORDS).open("rb") as lines:
            begins = [line for line in lines if line.startswith(b'{"kind":"begin"')]
        return json.loads(begins[-1]).get("store")
    except (OSError, ValueError, IndexError):
        return None


def _address(store: str | None) -> str | None:
    """Return the address of a store, with the credentials of this environment if they are for it."""
    return tracking_uri() if store == store_address(tracking_uri()) else store


def _flush(folder: Path, uri: str | None) -> FlushResult:
    """Upload a spool that no process has open; the run ends as KILLED if its driver is dead."""
    uid, store = folder.name, store_address(uri) if uri else None
    try:
        spool = Spool(folder)
    except BlockingIOError:
        return FlushResult(uid, uid, "running", "its driver sends its records itself", store)
    try:
        begin, ended, latest = spool.state()
        if begin is None:
            spool.remove()
            return FlushResult(uid, uid, "complete", "nothing was recorded", store)
        if uri is None:
            reason = "waits: its store is not recorded; `vitray sync --to ADDRESS` sends it there"
            return FlushResult(uid, begin["name"], "waiting", reason, None)
        if not ended and is_dead(begin["tags"]):
            reason = _death_notice(begin["tags"])
            spool.append({"kind": "end", "time": latest, "status": "KILLED", "reason": reason})
            ended = True
        uploader = Uploader(spool, uri)
        while uploader.remaining:
            uploader.send_next()
        if not ended:
            return FlushResult(uid, begin["name"], "running", "sent; stays RUNNING, as its driver may be alive", store)
        spool.remove()
        return FlushResult(uid, begin["name"], "complete", "complete", store)
    except Exception as error:
        return FlushResult(uid, uid, "waiting", f"still waits: {one_line(error)}", store)
    finally:
        spool.close()


def _death_notice(tags: Mapping[str, str]) -> str:
    return f"its driver, process {tags['vitray.pid']} on {tags['vitray.host']}, died"
