"""The tracking interface of a driver: calls write to the spool and return; a thread uploads."""

import getpass
import json
import logging
import os
import re
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from vitray.errors import ConfigError, one_line, redact, redact_uri
from vitray.tracking.flush import close_dead_runs
from vitray.tracking.liveness import process_tags
from vitray.tracking.mlflow_client import tracking_uri
from vitray.tracking.spool import Spool, now, spool_dir
from vitray.tracking.upload_thread import UploadThread
from vitray.tracking.uploader import Uploader

LOG = logging.getLogger("vitray.tracking")

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

# Seconds that the end of a run waits for MLflow: at most, and if the server is offline. A process killed in the wait
# keeps its spool (`ray job stop` kills after 3 s by default). A run that has just begun still imports MLflow.
END_TIMEOUTS: dict[RunStatus, tuple[float, float]] = {"FINISHED": (600, 10), "FAILED": (30, 5), "KILLED": (8, 1)}

# Seconds to wait for another process (`vitray track flush`, or another run's start) that is uploading the same spool.
LOCK_TIMEOUT = 30.0


class TrackedRun(NamedTuple):
    """The identity of a run in MLflow; `parent` is the uid of the run it is nested under."""

    uid: str
    name: str
    experiment: str
    parent: str | None = None


class Tracker:
    """The records of one run. Only `flush` and `end` wait for MLflow, for a limited time; MLflow's errors never raise.

    As a context manager it ends the run: FINISHED, FAILED with the exception, or KILLED on Ctrl-C and SystemExit.
    """

    @classmethod
    def begin(cls, run: TrackedRun, params: Mapping[str, Any], tags: Mapping[str, str], description: str) -> Self:
        """Begin a run, or continue the MLflow run of the same uid.

        A continued run is RUNNING again; steps that a metric already has are not logged again.
        """
        tracker = cls(run)
        commit = {"mlflow.source.git.commit": tags["git.commit"]} if "git.commit" in tags else {}
        body: dict[str, Any] = {"kind": "begin", "uid": run.uid, "name": run.name, "experiment": run.experiment}
        body |= {"parent": run.parent, "time": now()}
        body["params"] = {
            _clean_key(key): value if isinstance(value, str) else json.dumps(value) for key, value in params.items()
        }
        user_tags = {_clean_key(key): str(value) for key, value in tags.items()}
        body["tags"] = {"mlflow.user": _user()} | commit | user_tags | process_tags()
        body["description"] = description
        tracker._record(body)
        uploader = Uploader(tracker._spool, tracker.uri)
        tracker._upload = UploadThread(uploader, lambda: close_dead_runs(run.experiment, tracker.uri))
        return tracker

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.uri = tracking_uri()
        self._upload: UploadThread | None = None
        self._has_warned = False
        self._ended = False
        folder = spool_dir() / run.uid
        try:
            self._spool = Spool(folder, LOCK_TIMEOUT)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another process tracks this run; wanted that it ends first") from None

    def metrics(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Record metrics of a step, at a time in seconds since 1970 (None: now)."""
        numbers = {_clean_key(key): float(value) for key, value in values.items()}
        time = now() if at is None else int(at * 1000)
        self._record({"kind": "metrics", "step": int(step), "time": time, "values": numbers})

    def figure(self, path: str, png: bytes) -> None:
        """Record an image as the artifact `path`, for example `figures/loss.png`."""
        self._record_file(path, png)

    def text(self, path: str, text: str) -> None:
        """Record a text as the artifact `path`."""
        self._record_file(path, redact(text).encode())

    def tag(self, key: str, value: str) -> None:
        """Set a tag of the run."""
        self._record({"kind": "tags", "time": now(), "tags": {_clean_key(key): str(value)}})

    def describe(self, markdown: str) -> None:
        """Replace the description at the top of the run's MLflow page."""
        self._record({"kind": "tags", "time": now(), "tags": {"mlflow.note.content": markdown}})

    def model(self, folder: str, register_as: str | None = None, top1: float | None = None) -> None:
        """Log a model folder, and register it; it becomes `champion` if `top1` is above the champion's."""
        body = {"kind": "model", "time": now(), "id": uuid.uuid4().hex, "folder": folder}
        self._record(body | {"register_as": register_as, "top1": top1})

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until MLflow has the run."""
        return self._upload.uploader.run_id if self._upload else None

    def run_url(self) -> str:
        """Return the address of the run's page, or the command that opens it."""
        store = redact_uri(self.uri).rstrip("/")
        if store.startswith("http"):
            return (self.run_id and self.url_of(self.run_id)) or store
        prefix = f"MLFLOW_TRACKING_URI={store} " if "MLFLOW_TRACKING_URI" in os.environ else ""
        return f"{prefix}vitray ui   (experiment {self.run.experiment}, run {self.run.name})"

    def url_of(self, run_id: str) -> str | None:
        """Return the address of the page of any run of the experiment; None without a server."""
        store = redact_uri(self.uri).rstrip("/")
        experiment = self._upload.uploader.experiment_id if self._upload else None
        has_page = store.startswith("http") and experiment is not None
        return f"{store}/#/experiments/{experiment}/runs/{run_id}" if has_page else None

    def kill(self, uid: str, reason: str) -> None:
        """End another run of the experiment, whose driver is gone, as KILLED."""
        self._record({"kind": "kill", "time": now(), "uid": uid, "reason": reason})

    def flush(self, timeout: float, offline_timeout: float | None = None) -> str | None:
        """Wait until MLflow has all records; return a description of the unsent rest, or None."""
        assert self._upload is not None
        return self._upload.flush(timeout, timeout if offline_timeout is None else offline_timeout)

    def end(self, status: RunStatus, reason: str | None = None) -> None:
        """End the run and wait a limited time for MLflow; unsent records wait for `vitray track flush`."""
        if self._ended or self._upload is None:
            return
        self._ended = True
        reason = None if reason is None else redact(reason)
        self._record({"kind": "end", "time": now(), "status": status, "reason": reason})
        unsent = self._upload.flush(*END_TIMEOUTS[status])
        self._upload.close(is_complete=unsent is None)
        if unsent is not None:
            LOG.warning("tracking: %s; `vitray track flush` sends them from %s", unsent, self._spool.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        match error:
            case None | SystemExit(code=None | 0):
                self.end("FINISHED")
            case KeyboardInterrupt():
                self.end("KILLED", "KeyboardInterrupt: stopped by Ctrl-C")
            case SystemExit():
                self.end("KILLED", f"SystemExit: {error}")
            case _:
                self.end("FAILED", one_line(error))

    def _record_file(self, path: str, content: bytes) -> None:
        try:
            file = self._spool.store_file(path.rpartition("/")[2], content)
        except OSError as error:
            self._warn_once(error)
        else:
            self._record({"kind": "artifact", "time": now(), "path": path, "file": file})

    def _record(self, body: dict[str, Any]) -> None:
        try:
            self._spool.append(body)
        except (OSError, ValueError) as error:
            self._warn_once(error)

    def _warn_once(self, error: Exception) -> None:
        if not self._has_warned:
            LOG.warning("tracking: records are lost: %s: %s", self._spool.folder, one_line(error))
        self._has_warned = True


def _clean_key(key: str) -> str:
    """Return a key with MLflow's legal characters: all but letters, digits and `_-. :/` become `_`."""
    return re.sub(r"[^\w\-. :/]", "_", key)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return str(os.getuid())
