"""Upload of spools to MLflow: in order, each record once, now by a driver's thread or later by another process."""

import functools
import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vitray.errors import ConfigError, one_line
from vitray.system.mlflow_client import (
    artifact_root,
    import_mlflow,
    open_client,
    store_address,
    tracking_env,
    tracking_uri,
)
from vitray.system.processes import is_dead
from vitray.tracking.lineage import log_checkpoint, log_datasets, log_image, log_scores
from vitray.tracking.model_registry import UID_TAG, VersionScore, move_champion, register_model
from vitray.tracking.spool import RECORDS, Spool, SpoolCursor, SpoolRecord, spool_dir
from vitray.weights.addresses import FOLDER_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

LOG = logging.getLogger("vitray.tracking")

STARTS_TAG = "vitray.starts"
REASON_TAG = "vitray.reason"
PARENT_TAG = "mlflow.parentRunId"
# MLflow's pages of model training, rather than of language models.
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}

# MLflow's limits: metrics per call, and characters per value.
MAX_METRICS, MAX_PARAM_VALUE, MAX_TAG_VALUE = 1000, 6000, 8000

# Seconds between uploads, so that points are sent in batches, and at most while the server is offline.
PAUSE, MAX_PAUSE = 1.0, 30.0


# ---- one spool -------------------------------------------------------------------------------------------------------


class Uploader:
    """Sends the records of one spool to one MLflow run.

    It may restart from any record: the run is searched by its uid before it is created, and each step of a metric is
    logged once.
    """

    def __init__(self, spool: Spool, uri: str) -> None:
        self.spool = spool
        self.uri = uri
        self.experiment_id: str | None = None
        self.run_id: str | None = None
        self._sent = 0
        self._starts = 0
        # Whether another process has continued the run after this spool was written: not by the clocks of two machines.
        self._is_stale = False
        # The steps of each metric that MLflow has; None before they are looked up.
        self._steps: dict[str, set[int] | None] = {}

    @property
    def remaining(self) -> int:
        """Bytes that have not been sent."""
        return self.spool.size - self._sent

    @functools.cached_property
    def client(self) -> "MlflowClient":
        """The client of the store."""
        return open_client(self.uri)

    @functools.cached_property
    def _first(self) -> dict[str, Any]:
        return next(self.spool.records()).body

    def send_next(self) -> None:
        """Send the next batch of records; after an exception of MLflow, call it again later."""
        run_id = self.run_id or self._open_run()
        if self.remaining:  # none is, if a process was killed between its last upload and the removal of the spool
            self._deliver(run_id, self._next_batch())

    def _next_batch(self) -> list[SpoolRecord]:
        """Return the next record, or as many metric records as MLflow accepts per call."""
        room, batch = MAX_METRICS, []
        for record in self.spool.records(self._sent):
            if record.body.get("kind") != "metrics":
                return batch or [record]
            room -= len(record.body["values"])
            if batch and room < 0:
                return batch
            batch.append(record)
        return batch

    def _deliver(self, run_id: str, batch: list[SpoolRecord]) -> None:
        """Send a batch and advance; leave out a record that MLflow refuses for good."""
        body = batch[0].body
        try:
            self._send(run_id, [record.body for record in batch])
        except Exception as error:
            is_refused = _is_permanent(error)
            if is_refused and len(batch) > 1:
                for record in batch:  # alone, so that only the refused one is left out
                    self._deliver(run_id, [record])
                return
            if not is_refused or body.get("kind") == "begin":
                if body.get("kind") in ("artifact", "image", "model", "checkpoint"):
                    # A file that its store rejects goes to the end of the queue, so that it does not delay metrics.
                    self.spool.append(body)
                    self._advance(run_id, batch)
                self.run_id = None  # query the run's state again
                raise
            self._report_refusal(run_id, body, error)
        self._advance(run_id, batch)
        if "file" in body and (path := self.spool.stored(body["file"])):
            path.unlink(missing_ok=True)

    def _advance(self, run_id: str, batch: list[SpoolRecord]) -> None:
        self.spool.set_cursor(SpoolCursor(run_id, batch[-1].end))  # first: if it fails, the batch is sent again
        self._sent = batch[-1].end

    def _report_refusal(self, run_id: str, body: dict[str, Any], error: Exception) -> None:
        """Name a record that MLflow will never accept, in the log and in a tag of the run."""
        refusal = f"{body.get('kind')} {body.get('path', body.get('step', ''))}: {one_line(error)}"
        LOG.warning("tracking: MLflow refuses a record, which is left out: %s", refusal)
        try:
            self._send_tags(run_id, {"vitray.refused": refusal})
        except Exception as tag_error:  # a deleted run accepts no tags either
            LOG.debug("tracking: %s", one_line(tag_error))

    # ---- the run -----------------------------------------------------------------------------------------------------

    def _open_run(self) -> str:
        """Find or create the run, read its state and return its id."""
        first, cursor = self._first, self.spool.cursor
        self.experiment_id = self._find_experiment(first["experiment"])
        if runs := self._find_runs(first["uid"]):
            ids = [run.info.run_id for run in runs]
            run = self.client.get_run(cursor.run_id if cursor and cursor.run_id in ids else ids[0])
        else:
            tags = {UID_TAG: first["uid"]} | self._parent_tag({})
            run = self.client.create_run(self.experiment_id, first["time"], tags, first["name"])
        # A new run, as in another store, receives all records.
        self._sent = cursor.sent if cursor and cursor.run_id == run.info.run_id else 0
        sent = (record.body for record in self.spool.records() if record.end <= self._sent)
        self._starts = max((body["starts"] for body in sent if body.get("kind") == "begin"), default=0)
        self._read_state(run)
        self.run_id = run.info.run_id
        return run.info.run_id

    def _find_experiment(self, name: str) -> str:
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return self.client.create_experiment(name, artifact_root(self.uri), EXPERIMENT_TAGS)
            except Exception:  # another process may have created it first
                if (experiment := self.client.get_experiment_by_name(name)) is None:
                    raise
        for key, value in EXPERIMENT_TAGS.items():
            if key not in experiment.tags:  # not made by a run
                self.client.set_experiment_tag(experiment.experiment_id, key, value)
        return experiment.experiment_id

    def _find_runs(self, uid: str) -> "list[Run]":
        assert self.experiment_id is not None
        uid_filter = f"tags.`{UID_TAG}` = '{uid}'"
        return list(self.client.search_runs([self.experiment_id], uid_filter, order_by=["start_time"]))

    def _parent_tag(self, known: Mapping[str, str]) -> dict[str, str]:
        """Return the tag that nests the run under its parent, unless it is known or the parent is on another node."""
        parent = self._first.get("parent")
        if parent is None or PARENT_TAG in known:
            return {}
        parents = self._find_runs(parent)
        if not parents and (spool_dir() / parent).exists():
            raise OSError("the parent run has not reached MLflow yet")
        return {PARENT_TAG: parents[0].info.run_id} if parents else {}

    def _read_state(self, run: "Run") -> None:
        self._steps = dict.fromkeys(run.data.metrics)
        self._is_stale = self._starts < int(run.data.tags.get(STARTS_TAG, 0))

    # ---- the kinds of records ----------------------------------------------------------------------------------------

    def _send(self, run_id: str, bodies: list[dict[str, Any]]) -> None:
        body = bodies[0]
        match body.get("kind"):
            case "metrics":
                self._send_metrics(run_id, bodies)
            case "begin":
                self._send_begin(run_id, body)
            case "params" if not self._is_stale:
                self._send_params(self.client.get_run(run_id), body["params"])
            case "tags" if not self._is_stale:
                self._send_tags(run_id, body["tags"])
            case "artifact" | "image" as kind:
                path = self.spool.stored(body["file"])
                if path is None or not path.exists():  # it was uploaded to another store
                    return
                if kind == "image":
                    log_image(self.client, run_id, path, body["key"], body["step"])
                else:
                    self.client.log_artifact(run_id, str(path), body["path"].rpartition("/")[0] or None)
            case "model":
                with tracking_env(self.uri):
                    self._send_model(run_id, body)
            case "datasets":
                log_datasets(self.client, run_id, body["datasets"])
            case "checkpoint":
                with tracking_env(self.uri):
                    log_checkpoint(self.client, run_id, body)
            case "scores" | "link":
                log_scores(self.client, run_id, body)
            case "kill":
                for run in self._find_runs(body["uid"]):
                    if run.info.status == "RUNNING":
                        self.client.set_tag(run.info.run_id, REASON_TAG, body["reason"])
                        self.client.set_terminated(run.info.run_id, "KILLED", body["time"])
            case "end":
                self._send_end(run_id, body)

    def _send_metrics(self, run_id: str, bodies: list[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        points: dict[tuple[str, int], Metric] = {}
        for body in bodies:
            for key, value in body["values"].items():
                # The run may have this step already, from before a resume or from a call whose response was lost.
                if body["step"] not in self._logged_steps(run_id, key):
                    points.setdefault((key, body["step"]), Metric(key, value, body["time"], body["step"]))
        if points:
            self.client.log_batch(run_id, metrics=list(points.values()), synchronous=True)
        for key, step in points:
            self._logged_steps(run_id, key).add(step)

    def _logged_steps(self, run_id: str, key: str) -> set[int]:
        steps = self._steps.setdefault(key, set())
        if steps is None:
            steps = self._steps[key] = {metric.step for metric in self.client.get_metric_history(run_id, key)}
        return steps

    def _send_begin(self, run_id: str, body: dict[str, Any]) -> None:
        run = self.client.get_run(run_id)
        self._starts = body["starts"]
        self._read_state(run)
        self._send_params(run, body["params"])
        if self._is_stale:
            return
        tags = body["tags"] | self._parent_tag(run.data.tags)
        self._send_tags(run_id, tags | {STARTS_TAG: str(body["starts"]), "mlflow.note.content": body["description"]})
        if run.info.status != "RUNNING":
            self.client.update_run(run_id, status="RUNNING")

    def _send_params(self, run: "Run", values: dict[str, str]) -> None:
        """Send the parameters that the run lacks.

        MLflow's parameters are immutable, so a tag lists those that differ from an earlier start.
        """
        from mlflow.entities import Param

        known = run.data.params
        params = [Param(key, value[:MAX_PARAM_VALUE]) for key, value in values.items()]
        missing = [param for param in params if param.key not in known]
        self.client.log_batch(run.info.run_id, params=missing, synchronous=True)
        changed = [param for param in params if known.get(param.key, param.value) != param.value]
        if changed and not self._is_stale:
            text = "; ".join(f"{param.key}: {known[param.key]} -> {param.value}" for param in changed)
            self._send_tags(run.info.run_id, {"vitray.changed": text})

    def _send_tags(self, run_id: str, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        entities = [RunTag(key, value[:MAX_TAG_VALUE]) for key, value in tags.items()]
        self.client.log_batch(run_id, tags=entities, synchronous=True)

    def _send_model(self, run_id: str, body: dict[str, Any]) -> None:
        from vitray.serving.flavor import log_model

        tag, run = f"vitray.model.{body['id']}", self.client.get_run(run_id)
        model_uri = run.data.tags.get(tag)
        if model_uri is None:
            models = self.client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run_id}'")
            for model in models:
                is_of_folder = model.tags.get(FOLDER_TAG) == body["folder"]
                if is_of_folder and model.model_uri not in run.data.tags.values():  # of an upload that was killed
                    self.client.delete_logged_model(model.model_id)
            model_uri = log_model(run_id, body["folder"])
            self._send_tags(run_id, {tag: model_uri})
        if body["register_as"] is not None:
            score = body["score"] and VersionScore(*body["score"])
            version = register_model(self.client, model_uri, body["register_as"], score, body["scored_on"])
            if body["moves_champion"] and (line := move_champion(self.client, version)):
                LOG.warning("tracking: %s", line)

    def _send_end(self, run_id: str, body: dict[str, Any]) -> None:
        run = self.client.get_run(run_id)
        self._read_state(run)
        for other in self._find_runs(run.data.tags[UID_TAG]):
            # Created by a request that had timed out here.
            is_empty = not (other.data.metrics or other.data.params or STARTS_TAG in other.data.tags)
            if other.info.run_id != run_id and is_empty:
                self.client.delete_run(other.info.run_id)
        if self._is_stale:
            return
        tags = self._parent_tag(run.data.tags)
        if body["reason"] is not None or REASON_TAG in run.data.tags:  # replace the reason of an earlier attempt
            tags[REASON_TAG] = body["reason"] or ""
        if tags:
            self._send_tags(run_id, tags)
        self.client.set_terminated(run_id, body["status"], body["time"])


def _is_permanent(error: BaseException) -> bool:
    """Whether a retry cannot succeed."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE")
    if isinstance(error, ConfigError) and error.__context__ is not None:  # a message in place of another error
        return isinstance(error.__context__, FileNotFoundError) or _is_permanent(error.__context__)
    is_from_s3 = type(error).__module__.partition(".")[0] in ("boto3", "botocore")  # unreachable, or it refuses
    return not (is_from_s3 or isinstance(error, OSError))


# ---- in the background -----------------------------------------------------------------------------------------------


class UploadThread:
    """Uploads a spool in the background, and never raises.

    After the first complete upload, another thread closes the dead runs of the experiment.
    """

    def __init__(self, uploader: Uploader, experiment: str) -> None:
        self.uploader = uploader
        self._experiment = experiment
        self._error: str | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitray-tracking", daemon=True)
        self._thread.start()

    def flush(self, timeout: float, offline_timeout: float) -> str | None:
        """Wait until all records are sent; return a description of the unsent rest, or None.

        The wait is limited to `timeout` seconds, or `offline_timeout` if the server does not respond.
        """
        start, last_wake = time.monotonic(), -1
        while remaining := self.uploader.remaining:
            waited = time.monotonic() - start
            if int(waited) > last_wake:  # retry every second, even during a longer pause
                self._wake.set()
                last_wake = int(waited)
            if waited > timeout or (self._error and waited > offline_timeout):
                return f"{remaining} bytes of records are not sent: {self._error or 'MLflow answers slowly'}"
            time.sleep(0.05)
        return None

    def close(self) -> None:
        """Stop after the current call; remove the spool if it was uploaded completely, else release it."""
        self._closing.set()
        self._wake.set()
        self._thread.join(0.3 if self.uploader.remaining else 5)

    def _run(self) -> None:
        try:
            import_mlflow()  # in this thread, because it takes seconds
        except Exception as error:
            LOG.warning("tracking: MLflow cannot be imported, records wait: %s", one_line(error))
        uploader, spool, failures, pause = self.uploader, self.uploader.spool, 0, PAUSE
        arguments = self._experiment, uploader.uri
        cleanup = threading.Thread(target=_clean_up, args=arguments, name="vitray-orphans", daemon=True)
        try:
            while not self._closing.is_set():
                try:
                    while uploader.remaining and not self._closing.is_set():
                        uploader.send_next()
                        if failures > 1:
                            LOG.warning("tracking: MLflow takes records again")
                        self._error, failures, pause = None, 0, PAUSE
                    if cleanup.ident is None and not self._closing.is_set():
                        cleanup.start()
                except Exception as error:
                    text = one_line(error)
                    # MLflow's message of a refused connection has four lines; only its start and end are specific.
                    self._error = text if len(text) < 300 else f"{text[:110]} ... {text[-150:]}"
                    failures, pause = failures + 1, min(MAX_PAUSE, 2 * pause)
                    if failures == 2:  # ignore a single failure
                        message = "tracking: MLflow does not accept records; they are kept in %s and sent later: %s"
                        LOG.warning(message, spool.folder, self._error)
                self._wake.wait(pause)
                self._wake.clear()
        finally:
            if uploader.remaining:
                spool.close()
            else:
                spool.remove()


def _clean_up(experiment: str, uri: str) -> None:
    try:
        close_dead_runs(experiment, uri)
    except Exception as error:
        LOG.debug("tracking: records of dead drivers are not complete: %s", one_line(error))


# ---- spools that earlier runs left behind ----------------------------------------------------------------------------


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
    return [_flush(folder, to or _with_credentials(store)) for folder, store in _spools()]


def close_dead_runs(experiment: str, uri: str) -> None:
    """Flush the spools of a store, then mark as KILLED its running runs whose driver died on this machine."""
    for folder, store in _spools():
        if store == store_address(uri):
            _flush(folder, uri)
    client = open_client(uri)
    entity = client.get_experiment_by_name(experiment)
    for run in client.search_runs([entity.experiment_id], "attributes.status = 'RUNNING'") if entity else []:
        tags = run.data.tags
        # A run that still has a spool here was flushed above, or has just been resumed.
        if UID_TAG in tags and not (spool_dir() / tags[UID_TAG]).exists() and is_dead(tags):
            client.set_tag(run.info.run_id, REASON_TAG, _death_notice(tags))
            client.set_terminated(run.info.run_id, "KILLED")


def _spools() -> list[tuple[Path, str | None]]:
    """Return the spools, and the store that the latest start of each has recorded.

    Parents come first, as a parent run has to exist before its children, then the oldest.
    """
    spools: list[tuple[tuple[bool, int], Path, str | None]] = []
    for path in spool_dir().glob(f"*/{RECORDS}"):
        order, store = (False, 0), None
        try:
            with path.open("rb") as lines:
                begins = [json.loads(line) for line in lines if line.startswith(b'{"kind":"begin"')]
            order = begins[0].get("parent") is not None, begins[0]["time"]
            store = begins[-1].get("store")
        except (OSError, ValueError, LookupError):
            pass
        spools.append((order, path.parent, store))
    return [(folder, store) for _, folder, store in sorted(spools, key=lambda spool: spool[:2])]


def _with_credentials(store: str | None) -> str | None:
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
        begin, has_ended, latest = None, False, 0
        for _, body in spool.records():
            latest = body.get("time", latest)
            if body.get("kind") == "begin":
                begin, has_ended = body, False
            has_ended = has_ended or body.get("kind") == "end"
        if begin is None:
            spool.remove()
            return FlushResult(uid, uid, "complete", "nothing was recorded", store)
        if uri is None:
            reason = "waits: its store is not recorded; `vitray sync --to ADDRESS` sends it there"
            return FlushResult(uid, begin["name"], "waiting", reason, None)
        if not has_ended and is_dead(begin["tags"]):
            reason = _death_notice(begin["tags"])
            spool.append({"kind": "end", "time": latest, "status": "KILLED", "reason": reason})
            has_ended = True
        uploader = Uploader(spool, uri)
        while uploader.remaining:
            uploader.send_next()
        if not has_ended:
            return FlushResult(uid, begin["name"], "running", "sent; stays RUNNING, as its driver may be alive", store)
        spool.remove()
        return FlushResult(uid, begin["name"], "complete", "complete", store)
    except Exception as error:
        return FlushResult(uid, uid, "waiting", f"still waits: {one_line(error)}", store)
    finally:
        spool.close()


def _death_notice(tags: Mapping[str, str]) -> str:
    return f"its driver, process {tags['vitray.pid']} on {tags['vitray.host']}, died"
