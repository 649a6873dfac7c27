"""The tracking interface of a driver: calls write to the spool and return; a thread uploads."""

import getpass
import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from vitray.errors import ConfigError, one_line, redact, redact_uri
from vitray.system.host_facts import source_name
from vitray.system.mlflow_client import store_address, tracking_uri
from vitray.system.processes import process_tags
from vitray.tracking.lineage import ModelScores, TrackedDataset, clean_key, run_page
from vitray.tracking.model_registry import VersionScore
from vitray.tracking.spool import Spool, now, spool_dir
from vitray.tracking.upload import Uploader, UploadThread

LOG = logging.getLogger("vitray.tracking")

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

# Seconds that the end of a run waits for MLflow: at most, and if the server is offline. A process killed in the wait
# keeps its spool (`ray job stop` kills after 3 s by default). A run that has just begun still imports MLflow.
END_TIMEOUTS: dict[RunStatus, tuple[float, float]] = {"FINISHED": (600, 10), "FAILED": (30, 5), "KILLED": (8, 1)}

# Seconds to wait for another process (`vitray sync`, or another run's start) that is uploading the same spool.
LOCK_TIMEOUT = 30.0


class TrackedRun(NamedTuple):
    """The identity of a run in MLflow; `parent` is the uid of the run it is nested under."""

    uid: str
    name: str
    experiment: str
    parent: str | None = None
    starts: int = 1
    """How many times the run was started, this time included: the latest start decides its status and tags."""


class Tracker:
    """The records of one run. Only `flush` and `end` wait for MLflow, for a limited time; MLflow's errors never raise.

    As a context manager it ends the run: FINISHED, FAILED with the exception, or KILLED on Ctrl-C and SystemExit.
    """

    def __init__(self, run: TrackedRun, params: Mapping[str, Any], tags: Mapping[str, str], description: str) -> None:
        """Begin a run, or continue the MLflow run of the same uid.

        A continued run is RUNNING again; steps that a metric already has are not logged again.
        """
        self.run = run
        uri = tracking_uri()
        self._store = redact_uri(uri).rstrip("/")
        self._has_warned = False
        self._ended = False
        folder = spool_dir() / run.uid
        try:
            self._spool = Spool(folder, LOCK_TIMEOUT)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another process is tracking this run; wait for it to finish") from None
        except OSError as error:
            wanted = "expected VITRAY_HOME as a folder that this process may write to"
            raise ConfigError(f"{folder}: cannot keep the run's records: {one_line(error)}; {wanted}") from None
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in params.items()}
        source = {"mlflow.source.name": source_name(), "mlflow.source.type": "LOCAL"}
        source |= {f"mlflow.source.{key}": tags[key] for key in ("git.commit", "git.dirty") if key in tags}
        user_tags = {clean_key(key): str(value) for key, value in tags.items()}
        begin = {
            "params": {clean_key(key): text for key, text in texts.items()},
            "tags": {"mlflow.user": _user()} | source | user_tags | process_tags(),
            "description": description,
        }
        self._record("begin", run._asdict() | {"store": store_address(uri)} | begin)
        self._upload = UploadThread(Uploader(self._spool, uri), run.experiment)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of a step."""
        numbers = {clean_key(key): float(value) for key, value in values.items()}
        self._record("metrics", {"step": int(step), "values": numbers})

    def figure(self, path: str, png: bytes) -> None:
        """Record an image as the artifact `path`, for example `figures/loss.png`."""
        self._record("artifact", {"path": path}, png)

    def image(self, key: str, step: int, png: bytes) -> None:
        """Record an image of a step; MLflow shows the steps of a key side by side for several runs."""
        self._record("image", {"path": f"{key}.png", "key": key, "step": int(step)}, png)

    def text(self, path: str, text: str) -> None:
        """Record a text as the artifact `path`."""
        self._record("artifact", {"path": path}, redact(text).encode())

    def params(self, values: Mapping[str, Any]) -> None:
        """Record values that hold for the run as a whole; MLflow keeps them out of its charts of metrics."""
        self._record("params", {"params": {clean_key(key): str(value) for key, value in values.items()}})

    def tag(self, key: str, value: str) -> None:
        """Set a tag of the run."""
        self._record("tags", {"tags": {clean_key(key): str(value)}})

    def describe(self, markdown: str) -> None:
        """Replace the description at the top of the run's MLflow page."""
        self.tag("mlflow.note.content", markdown)

    def model(
        self,
        folder: str,
        register_as: str | None = None,
        score: VersionScore | None = None,
        scored_on: str | None = None,
        *,
        moves_champion: bool = True,
    ) -> None:
        """Log a model folder, and register it.

        If allowed, it becomes `champion` where its score is above the champion's on the same images and classes, of
        which `scored_on` is a hash.
        """
        body = {"id": uuid.uuid4().hex, "folder": folder, "register_as": register_as}
        self._record("model", body | {"score": score, "scored_on": scored_on, "moves_champion": moves_champion})

    def datasets(self, datasets: Sequence[TrackedDataset]) -> None:
        """Record the datasets that the run reads."""
        self._record("datasets", {"datasets": [each._asdict() for each in datasets]})

    def checkpoint(self, folder: str, name: str, scores: ModelScores) -> None:
        """Record the best checkpoint so far as a logged model; it replaces that of an earlier checkpoint."""
        self._record("checkpoint", {"folder": folder, "name": name} | scores.record())

    def scores(self, model: str, scores: ModelScores, description: str = "") -> None:
        """Record scores of a model by its address; a model of another run is linked, below the description."""
        self._record("scores", {"model": model, "description": description} | scores.record())

    def link(self, model: str, description: str) -> None:
        """Link the model that the run is about, by its address, below the description."""
        self._record("link", {"model": model, "description": description})

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until MLflow has the run."""
        return self._upload.uploader.run_id

    def run_url(self) -> str:
        """Return the address of the run's page, or the command that opens it."""
        if self._store.startswith("http"):
            return (self.run_id and self.url_of(self.run_id)) or self._store
        prefix = f"MLFLOW_TRACKING_URI={self._store} " if "MLFLOW_TRACKING_URI" in os.environ else ""
        return f"{prefix}vitray ui   (experiment {self.run.experiment}, run {self.run.name})"

    def url_of(self, run_id: str) -> str | None:
        """Return the address of the page of any run of the experiment; None without a server."""
        experiment = self._upload.uploader.experiment_id
        if experiment is None or not self._store.startswith("http"):
            return None
        return f"{self._store}/{run_page(experiment, run_id)}"

    def kill(self, uid: str, reason: str) -> None:
        """End another run of the experiment, whose driver is gone, as KILLED."""
        self._record("kill", {"uid": uid, "reason": reason})

    def flush(self, timeout: float) -> str | None:
        """Wait until MLflow has all records; return a description of the unsent rest, or None."""
        return self._upload.flush(timeout, timeout)

    def end(self, status: RunStatus, reason: str | None = None) -> None:
        """End the run and wait a limited time for MLflow; unsent records wait for `vitray sync`."""
        if self._ended:
            return
        self._ended = True
        self._record("end", {"status": status, "reason": reason})
        self._send(*END_TIMEOUTS[status])

    def leave(self) -> None:
        """Send what there is, without an end of the run: other processes go on with it."""
        if not self._ended:
            self._ended = True
            self._send(*END_TIMEOUTS["KILLED"])

    def _send(self, seconds: float, request_seconds: float) -> None:
        unsent = self._upload.flush(seconds, request_seconds)
        self._upload.close()
        if unsent is not None:
            LOG.warning("tracking: %s; `vitray sync` sends them from %s", unsent, self._spool.folder)

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

    def _record(self, kind: str, body: dict[str, Any], content: bytes | None = None) -> None:
        """Write a record to the spool, and the content of its file before; a full disk loses both."""
        try:
            if content is not None:
                body["file"] = self._spool.store_file(body["path"].rpartition("/")[2], content)
            self._spool.append({"kind": kind, "time": now()} | body)
        except (OSError, ValueError) as error:
            if not self._has_warned:
                LOG.warning("tracking: records are lost: %s: %s", self._spool.folder, one_line(error))
            self._has_warned = True


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return str(os.getuid())
