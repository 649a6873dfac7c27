"""Upload of a spool to MLflow: in order, each record once, resumable."""

import functools
import logging
from typing import TYPE_CHECKING, Any

from vitray.errors import ConfigError, one_line
from vitray.system.mlflow_client import artifact_root, open_client, tracking_env
from vitray.tracking.lineage import log_checkpoint, log_datasets, log_image, log_link, log_scores
from vitray.tracking.model_registry import UID_TAG, move_champion, register_model
from vitray.tracking.spool import Spool, SpoolCursor, SpoolRecord, spool_dir
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
        self._one_by_one_until = 0
        # Metrics that the run had when it was opened, and the steps of each metric that was sent or looked up since.
        self._logged_before: set[str] = set()
        self._steps: dict[str, set[int]] = {}

    @property
    def remaining(self) -> int:
        """Bytes that have not been sent."""
        return self.spool.size - self._sent

    @functools.cached_property
    def client(self) -> "MlflowClient":
        """The client of the store."""
        return open_client(self.uri)

    def send_next(self) -> None:
        """Send the next batch of records; after an exception of MLflow, call it again later."""
        run_id = self.run_id or self._open_run()
        batch = self._next_batch()
        try:
            self._send(run_id, batch)
        except Exception as error:
            kind = batch[0].body.get("kind")
            if _is_permanent(error) and len(batch) > 1:
                self._one_by_one_until = batch[-1].end
                return
            if _is_permanent(error) and kind != "begin":
                self._skip(run_id, batch[0].body, error)
            else:
                if kind in ("artifact", "image", "model", "checkpoint"):
                    # A file that its store rejects goes to the end of the queue, so that it does not delay metrics.
                    self.spool.append(batch[0].body)
                    self._advance(run_id, batch)
                self.run_id = None  # query the run's state again
                raise
        self._advance(run_id, batch)
        for record in batch:
            if "file" in record.body:
                (self.spool.folder / record.body["file"]).unlink(missing_ok=True)

    def _advance(self, run_id: str, batch: list[SpoolRecord]) -> None:
        self.spool.set_cursor(SpoolCursor(run_id, batch[-1].end))  # first: if it fails, the batch is sent again
        self._sent = batch[-1].end

    def _next_batch(self) -> list[SpoolRecord]:
        """Return the next record, or as many metric records as MLflow accepts per call."""
        records = self.spool.read(self._sent)
        room, batch = MAX_METRICS, []
        for record in records:
            if record.body.get("kind") != "metrics" or record.end <= self._one_by_one_until:
                break
            room -= len(record.body["values"])
            if room < 0:
                break
            batch.append(record)
        return batch or records[:1]

    def _open_run(self) -> str:
        """Find or create the run, read its state and return its id."""
        first = self.spool.read(0)[0].body
        self.experiment_id = self._find_experiment(first["experiment"])
        runs, cursor = self._find_runs(first["uid"]), self.spool.cursor
        if runs:
            ids = [run.info.run_id for run in runs]
            run = self.client.get_run(cursor.run_id if cursor and cursor.run_id in ids else ids[0])
        else:
            tags = {UID_TAG: first["uid"]} | self._parent_tag(first)
            run = self.client.create_run(self.experiment_id, first["time"], tags, first["name"])
        # A new run, as in another store, receives all records.
        self._sent = cursor.sent if cursor and cursor.run_id == run.info.run_id else 0
        begin = self.spool.state(self._sent).begin
        self._starts = begin["starts"] if begin else 0
        self._read_state(run)
        self.run_id = run.info.run_id
        return run.info.run_id

    def _find_runs(self, uid: str) -> "list[Run]":
        assert self.experiment_id is not None
        uid_filter = f"tags.`{UID_TAG}` = '{uid}'"
        return list(self.client.search_runs([self.experiment_id], uid_filter, order_by=["start_time"]))

    def _delete_duplicates(self, uid: str) -> None:
        """Delete empty runs of the same uid, created by requests that had timed out here."""
        for run in self._find_runs(uid):
            has_records = run.data.metrics or run.data.params or STARTS_TAG in run.data.tags
            if run.info.run_id != self.run_id and not has_records:
                self.client.delete_run(run.info.run_id)

    def _read_state(self, run: "Run") -> None:
        self._logged_before, self._steps = set(run.data.metrics), {}
        self._is_stale = self._starts < int(run.data.tags.get(STARTS_TAG, 0))

    def _find_experiment(self, name: str) -> str:
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return self.client.create_experiment(name, artifact_root(self.uri), EXPERIMENT_TAGS)
            except Exception:  # another process may have created it first
                if (experiment := self.client.get_experiment_by_name(name)) is None:
                    raise
        for key, value in EXPERIMENT_TAGS.items():
            if key not in experiment.tags:  # made by an earlier version
                self.client.set_experiment_tag(experiment.experiment_id, key, value)
        return experiment.experiment_id

    def _parent_tag(self, begin: dict[str, Any]) -> dict[str, str]:
        """Return the tag that nests the run under its parent."""
        if begin.get("parent") is None:
            return {}
        parents = self._find_runs(begin["parent"])
        if not parents and (spool_dir() / begin["parent"]).exists():
            raise OSError("the parent run has not reached MLflow yet")
        return {PARENT_TAG: parents[0].info.run_id} if parents else {}

    def _missing_parent_tag(self, run: "Run") -> dict[str, str]:
        """Return the tag of a run that was created before its parent, on another node, had reached MLflow."""
        return {} if PARENT_TAG in run.data.tags else self._parent_tag(self.spool.read(0)[0].body)

    def _send(self, run_id: str, batch: list[SpoolRecord]) -> None:
        body = batch[0].body
        match body.get("kind"):
            case "metrics":
                self._send_metrics(run_id, [record.body for record in batch])
            case "begin":
                self._send_begin(run_id, body)
            case "params" if not self._is_stale:
                if changed := self._send_params(self.client.get_run(run_id), body["params"]):
                    self._send_tags(run_id, {"vitray.changed": changed})
            case "tags" if not self._is_stale:
                self._send_tags(run_id, body["tags"])
            case "artifact":
                path = self.spool.folder / body["file"]
                if path.exists():  # it is missing after an upload to another store
                    self.client.log_artifact(run_id, str(path), body["path"].rpartition("/")[0] or None)
            case "model":
                self._send_model(run_id, body)
            case "datasets":
                log_datasets(self.client, run_id, body["datasets"])
            case "image":
                path = self.spool.folder / body["file"]
                if path.exists():
                    log_image(self.client, run_id, path, body["key"], body["step"])
            case "checkpoint":
                with tracking_env(self.uri):
                    log_checkpoint(self.client, run_id, body)
            case "scores":
                log_scores(self.client, run_id, body)
            case "link":
                log_link(self.client, run_id, body)
            case "kill":
                self._send_kill(body)
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
            self._steps[key].add(step)

    def _logged_steps(self, run_id: str, key: str) -> set[int]:
        if key not in self._steps:
            history = self.client.get_metric_history(run_id, key) if key in self._logged_before else []
            self._steps[key] = {metric.step for metric in history}
        return self._steps[key]

    def _send_begin(self, run_id: str, body: dict[str, Any]) -> None:
        run = self.client.get_run(run_id)
        self._starts = body["starts"]
        self._read_state(run)
        changed = self._send_params(run, body["params"])
        if self._is_stale:
            return
        tags = (
            body["tags"]
            | self._missing_parent_tag(run)
            | {STARTS_TAG: str(body["starts"]), "mlflow.note.content": body["description"]}
        )
        self._send_tags(run_id, tags | ({"vitray.changed": changed} if changed else {}))
        if run.info.status != "RUNNING":
            self.client.update_run(run_id, status="RUNNING")

    def _send_params(self, run: Any, values: dict[str, str]) -> str:
        """Send the parameters that the run lacks; return how the others differ from those of an earlier start.

        MLflow's parameters are immutable, so a tag lists these changes.
        """
        from mlflow.entities import Param

        known = run.data.params
        params = [Param(key, value[:MAX_PARAM_VALUE]) for key, value in values.items()]
        missing = [param for param in params if param.key not in known]
        self.client.log_batch(run.info.run_id, params=missing, synchronous=True)
        changed = [param for param in params if known.get(param.key, param.value) != param.value]
        return "; ".join(f"{param.key}: {known[param.key]} -> {param.value}" for param in changed)

    def _send_tags(self, run_id: str, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        entities = [RunTag(key, value[:MAX_TAG_VALUE]) for key, value in tags.items()]
        self.client.log_batch(run_id, tags=entities, synchronous=True)

    def _send_model(self, run_id: str, body: dict[str, Any]) -> None:
        from vitray.serving.flavor import log_model

        with tracking_env(self.uri):
            tag, run = f"vitray.model.{body['id']}", self.client.get_run(run_id)
            model_uri = run.data.tags.get(tag)
            if model_uri is None:
                filter_text = f"source_run_id = '{run_id}'"
                for model in self.client.search_logged_models([run.info.experiment_id], filter_text):
                    is_of_folder = model.tags.get(FOLDER_TAG) == body["folder"]
                    if is_of_folder and model.model_uri not in run.data.tags.values():  # of an upload that was killed
                        self.client.delete_logged_model(model.model_id)
                model_uri = log_model(run_id, body["folder"])
                self._send_tags(run_id, {tag: model_uri})
            if body["register_as"] is not None:
                names = body["register_as"], body["top1"], body["scored_on"]
                version = register_model(self.client, model_uri, *names)
                if body["moves_champion"] and (line := move_champion(self.client, version)):
                    LOG.warning("tracking: %s", line)

    def _send_end(self, run_id: str, body: dict[str, Any]) -> None:
        run = self.client.get_run(run_id)
        self._read_state(run)
        self._delete_duplicates(run.data.tags[UID_TAG])
        if self._is_stale:
            return
        tags = self._missing_parent_tag(run)
        if body["reason"] is not None or REASON_TAG in run.data.tags:  # replace the reason of an earlier attempt
            tags[REASON_TAG] = body["reason"] or ""
        if tags:
            self._send_tags(run_id, tags)
        self.client.set_terminated(run_id, body["status"], body["time"])

    def _send_kill(self, body: dict[str, Any]) -> None:
        for run in self._find_runs(body["uid"]):
            if run.info.status == "RUNNING":
                self.client.set_tag(run.info.run_id, REASON_TAG, body["reason"])
                self.client.set_terminated(run.info.run_id, "KILLED", body["time"])

    def _skip(self, run_id: str, body: dict[str, Any], error: Exception) -> None:
        """Report a record that MLflow will never accept, in the log and in a tag of the run."""
        refusal = f"{body.get('kind')} {body.get('path', body.get('step', ''))}: {one_line(error)}"
        LOG.warning("tracking: MLflow refuses a record, which is left out: %s", refusal)
        try:
            self._send_tags(run_id, {"vitray.refused": refusal})
        except Exception as tag_error:  # a deleted run accepts no tags either
            LOG.debug("tracking: %s", one_line(tag_error))


def _is_permanent(error: BaseException) -> bool:
    """Whether a retry cannot succeed."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE")
    if isinstance(error, ConfigError) and error.__context__ is not None:  # a message in place of another error
        return isinstance(error.__context__, FileNotFoundError) or _is_permanent(error.__context__)
    is_from_s3 = type(error).__module__.partition(".")[0] in ("boto3", "botocore")  # unreachable, or it refuses
    return not (is_from_s3 or isinstance(error, OSError))
