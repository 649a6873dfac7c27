"""Upload of the spools that earlier runs left behind, and the end of runs whose driver died."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from vitray.errors import one_line
from vitray.tracking.liveness import is_dead
from vitray.tracking.mlflow_client import import_mlflow, open_client, tracking_uri
from vitray.tracking.spool import RECORDS, Spool, spool_dir
from vitray.tracking.uploader import REASON_TAG, UID_TAG, Uploader


class FlushResult(NamedTuple):
    """The result for one spool."""

    uid: str
    name: str
    state: Literal["complete", "waiting", "running"]
    message: str


def flush_all() -> list[FlushResult]:
    """Upload every spool that no driver has open, and remove the complete ones."""
    import_mlflow()
    return [_flush(folder, tracking_uri()) for folder in _spool_folders()]


def close_dead_runs(experiment: str, uri: str) -> None:
    """Flush all spools, then mark as KILLED the running runs of the experiment whose driver died on this machine."""
    for folder in _spool_folders():
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
    """Return all spools, the oldest first: a parent run has to exist before its children."""
    return sorted((path.parent for path in spool_dir().glob(f"*/{RECORDS}")), key=_begin_time)


def _begin_time(folder: Path) -> int:
    try:
        with (folder / RECORDS).open() as lines:
            return json.loads(lines.readline())["time"]
    except (OSError, ValueError, KeyError):
        return 0


def _flush(folder: Path, uri: str) -> FlushResult:
    """Upload a spool that no process has open; the run ends as KILLED if its driver is dead."""
    uid = folder.name
    try:
        spool = Spool(folder)
    except BlockingIOError:
        return FlushResult(uid, uid, "running", "its driver sends its records itself")
    try:
        begin, ended, latest = spool.state()
        if begin is None:
            spool.remove()
            return FlushResult(uid, uid, "complete", "nothing was recorded")
        if not ended and is_dead(begin["tags"]):
            reason = _death_notice(begin["tags"])
            spool.append({"kind": "end", "time": latest, "status": "KILLED", "reason": reason})
            ended = True
        uploader = Uploader(spool, uri)
        while uploader.remaining:
            uploader.send_next()
        if not ended:
            return FlushResult(uid, begin["name"], "running", "sent; its driver cannot be proved dead")
        spool.remove()
        return FlushResult(uid, begin["name"], "complete", "complete")
    except Exception as error:
        return FlushResult(uid, uid, "waiting", f"still waits: {one_line(error)}")
    finally:
        spool.close()


def _death_notice(tags: Mapping[str, str]) -> str:
    return f"its driver, process {tags['vitray.pid']} on {tags['vitray.host']}, died"
