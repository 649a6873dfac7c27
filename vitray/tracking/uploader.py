"""From the journal to MLflow: in order, once, in the background, and again from where it stopped."""

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitray.errors import one_line
from vitray.tracking.mlflow_client import BASE, BASE_IDENTITY, ambient, open_client
from vitray.tracking.spool import Entry, Journal, Mark, spool

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

LOG = logging.getLogger("vitray.tracking")

UID = "vitray.uid"
BEGUN = "vitray.begun"
REASON = "vitray.reason"

# What MLflow takes in one call.
MOST_METRICS, MOST_PARAMS = 1000, 100
MOST_VALUE, MOST_TAG = 6000, 8000


class Delivery:
    """The records of one journal on their way into one MLflow run.

    It may be repeated from any point: the run is found by its uid before it is made, and a step of a key arrives once.
    """

    def __init__(self, journal: Journal, uri: str) -> None:
        self.journal = journal
        self.uri = uri
        self.experiment_id: str | None = None
        self.run_id: str | None = None
        self._sent = 0
        self._begun = 0
        self._stale = False
        self._one_by_one_until = 0
        self._steps: dict[str, int] = {}
        self._all_steps: dict[str, set[int]] = {}

    @property
    def left(self) -> int:
        """Bytes that have not been sent."""
        return self.journal.size - self._sent

    @functools.cached_property
    def client(self) -> "MlflowClient":
        """The store's client."""
        return open_client(self.uri)

    def deliver(self) -> None:
        """Send the next portion; whatever MLflow raises says that it is still to be sent."""
        if self.run_id is None:
            self._open()
        portion = self._portion()
        try:
            self._send(portion)
        except Exception as error:
            kind = portion[0].body.get("kind")
            if _is_refused(error) and len(portion) > 1:
                self._one_by_one_until = portion[-1].end
                return
            if _is_refused(error) and kind != "begin":
                self._put_aside(portion[0].body, error)
            else:
                if kind in ("artifact", "model"):
                    # Numbers do not wait for a file that its store does not take: it queues up again, last.
                    self.journal.append(portion[0].body)
                    self._advance(portion)
                self.run_id = None  # what has arrived is asked again
                raise
        self._advance(portion)
        for entry in portion:
            self._discard(entry.body)

    def _advance(self, portion: list[Entry]) -> None:
        assert self.run_id is not None
        self._sent = portion[-1].end
        self.journal.set_mark(Mark(self.run_id, self._sent))

    def _portion(self) -> list[Entry]:
        """The next entry, or as many with numbers as MLflow takes at once."""
        entries = self.journal.read(self._sent)
        most, taken = MOST_METRICS, []
        for entry in entries:
            if entry.body.get("kind") != "metrics" or entry.end <= self._one_by_one_until:
                break
            most -= len(entry.body["values"])
            if most < 0:
                break
            taken.append(entry)
        return taken or entries[:1]

    def _open(self) -> None:
        """Find the run, or make it, and learn what it has."""
        first = self.journal.read(0)[0].body
        self.experiment_id = self._experiment(first["experiment"])
        runs, mark = self._runs(first["uid"]), self.journal.mark
        if runs:
            ids = [run.info.run_id for run in runs]
            run = self.client.get_run(mark.run_id if mark and mark.run_id in ids else ids[0])
        else:
            tags = {UID: first["uid"]} | self._parent(first)
            run = self.client.create_run(self.experiment_id, first["time"], tags, first["name"])
        # Another store, or a new one in place of the old: it gets everything that is here.
        self._sent = mark.sent if mark and mark.run_id == run.info.run_id else 0
        begin = self.journal.last(self._sent).begin
        self._begun = begin["time"] if begin else 0
        self._look_at(run)
        self.run_id = run.info.run_id

    def _runs(self, uid: str) -> "list[Run]":
        assert self.experiment_id is not None
        return list(self.client.search_runs([self.experiment_id], f"tags.`{UID}` = '{uid}'", order_by=["start_time"]))

    def _remove_twins(self, uid: str) -> None:
        """Delete what a request made that this side had given up: a run of the same uid, without any record."""
        for twin in self._runs(uid):
            if twin.info.run_id != self.run_id and not (
                twin.data.metrics or twin.data.params or BEGUN in twin.data.tags
            ):
                self.client.delete_run(twin.info.run_id)

    def _look_at(self, run: "Run") -> None:
        """Learn the latest step of every key, and whether someone has continued the run after this journal."""
        self._steps = {metric.key: metric.step for metric in run.data._metric_objs}
        self._all_steps = {}
        self._stale = self._begun < int(run.data.tags.get(BEGUN, 0))

    def _experiment(self, name: str) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        try:
            return self.client.create_experiment(name, artifacts_beside(self.uri))
        except Exception:
            # Another process may have been faster.
            if (found := self.client.get_experiment_by_name(name)) is None:
                raise
            return found.experiment_id

    def _parent(self, begin: dict[str, Any]) -> dict[str, str]:
        """The tag that shows the run below another one, whose record this process may still have to send."""
        if begin.get("parent") is None:
            return {}
        found = self._runs(begin["parent"])
        if not found and (spool() / begin["parent"]).exists():
            raise OSError("the run above this one has not reached MLflow yet")
        return {"mlflow.parentRunId": found[0].info.run_id} if found else {}

    def _send(self, portion: list[Entry]) -> None:
        body = portion[0].body
        match body.get("kind"):
            case "metrics":
                self._send_metrics([entry.body for entry in portion])
            case "begin":
                self._send_begin(body)
            case "tags" if not self._stale:
                self._send_tags(body["tags"])
            case "artifact":
                self._send_artifact(body)
            case "model":
                self._send_model(body)
            case "kill":
                self._send_kill(body)
            case "end":
                self._send_end(body)

    def _send_metrics(self, bodies: list[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        assert self.run_id is not None
        points, steps = [], dict(self._steps)
        for body in bodies:
            for key, value in body["values"].items():
                if not self._has(key, body["step"], steps):
                    points.append(Metric(key, value, body["time"], body["step"]))
                    steps[key] = max(body["step"], steps.get(key, body["step"]))
        if points:
            self.client.log_batch(self.run_id, metrics=points, synchronous=True)
        self._steps = steps

    def _has(self, key: str, step: int, steps: dict[str, int]) -> bool:
        """Whether a step is there already: again after a resume, or sent by a call whose answer was lost."""
        if step > steps.get(key, step - 1):
            return False
        if not self._stale:
            return True
        # The run went on elsewhere while this journal waited: what it alone knows lies between.
        if key not in self._all_steps:
            assert self.run_id is not None
            self._all_steps[key] = {metric.step for metric in self.client.get_metric_history(self.run_id, key)}
        return step in self._all_steps[key]

    def _send_begin(self, body: dict[str, Any]) -> None:
        from mlflow.entities import Param

        assert self.run_id is not None
        run = self.client.get_run(self.run_id)
        self._begun = body["time"]
        self._look_at(run)
        params = [Param(key, value[:MOST_VALUE]) for key, value in body["params"].items()]
        missing = [param for param in params if param.key not in run.data.params]
        for start in range(0, len(missing), MOST_PARAMS):
            self.client.log_batch(self.run_id, params=missing[start : start + MOST_PARAMS], synchronous=True)
        if self._stale:
            return
        # MLflow never changes a parameter: a continued run says in a tag what is different now.
        changed = [
            f"{param.key}: {run.data.params[param.key]} -> {param.value}"
            for param in params
            if run.data.params.get(param.key, param.value) != param.value
        ]
        tags = body["tags"] | {BEGUN: str(body["time"]), "mlflow.note.content": body["description"]}
        self._send_tags(tags | ({"vitray.changed": "; ".join(changed)} if changed else {}))
        if run.info.status != "RUNNING":
            self.client.update_run(self.run_id, status="RUNNING")

    def _send_tags(self, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        assert self.run_id is not None
        entities = [RunTag(key, value[:MOST_TAG]) for key, value in tags.items()]
        for start in range(0, len(entities), MOST_PARAMS):
            self.client.log_batch(self.run_id, tags=entities[start : start + MOST_PARAMS], synchronous=True)

    def _send_artifact(self, body: dict[str, Any]) -> None:
        assert self.run_id is not None
        path = self.journal.folder / body["file"]
        if path.exists():  # otherwise it went to another store before
            self.client.log_artifact(self.run_id, str(path), body["path"].rpartition("/")[0] or None)

    def _discard(self, body: dict[str, Any]) -> None:
        if body.get("kind") == "artifact":
            (self.journal.folder / body["file"]).unlink(missing_ok=True)

    def _send_model(self, body: dict[str, Any]) -> None:
        from vitray.tracking.model_flavour import log_model

        assert self.run_id is not None
        with ambient(self.uri):
            tag = f"vitray.models.{body['id']}"
            address = self.client.get_run(self.run_id).data.tags.get(tag)
            if address is None:
                address = log_model(self.run_id, body["folder"])
                self._send_tags({tag: address})
            if body["register_as"] is not None:
                register(self.client, address, body["register_as"], body["top1"])

    def _send_end(self, body: dict[str, Any]) -> None:
        assert self.run_id is not None
        run = self.client.get_run(self.run_id)
        self._look_at(run)
        self._remove_twins(run.data.tags[UID])
        if self._stale:
            return
        if body["reason"] is not None or REASON in run.data.tags:  # an earlier attempt may have left one
            self._send_tags({REASON: body["reason"] or ""})
        self.client.set_terminated(self.run_id, body["status"], body["time"])

    def _send_kill(self, body: dict[str, Any]) -> None:
        for run in self._runs(body["uid"]):
            if run.info.status == "RUNNING":
                self.client.set_tag(run.info.run_id, REASON, body["reason"])
                self.client.set_terminated(run.info.run_id, "KILLED", body["time"])

    def _put_aside(self, body: dict[str, Any], error: Exception) -> None:
        """Leave out a record that MLflow will never take, and say so in the log and on the run."""
        said = f"{body.get('kind')} {body.get('path', body.get('step', ''))}: {one_line(error)}"
        LOG.warning("tracking: MLflow refuses a record, which is left out: %s", said)
        try:
            self._send_tags({"vitray.refused": said})
        except Exception as second:  # a run that was deleted takes no tag either
            LOG.debug("tracking: %s", one_line(second))


def register(client: "MlflowClient", model_uri: str, name: str, top1: float | None) -> None:
    """Make a logged model the next version of a registered one, and `champion` where its val/top1 is the best so far.

    A version without val/top1 never becomes champion; one that equals the champion leaves it. A delta's version says of
    which network it is one.
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        versions = client.search_model_versions(f"name = '{name}'")
    except MlflowException:
        versions = []
    same = [version for version in versions if version.tags.get("vitray.models") == model_uri]
    logged = client.get_logged_model(model_uri.removeprefix("models:/")).tags
    base = {key: logged[key] for key in (BASE, BASE_IDENTITY) if key in logged}
    tags = {"vitray.models": model_uri} | base | ({} if top1 is None else {"val/top1": repr(top1)})
    version = same[0] if same else mlflow.register_model(model_uri, name, tags=tags)
    if base:
        linked = _linked(client, base[BASE])
        said = f"A delta of {linked} (identity {base[BASE_IDENTITY][:12]}), which must be there to load it."
        client.update_model_version(name, version.version, said)
    if top1 is None:
        return
    try:
        champion = client.get_model_version_by_alias(name, "champion")
    except MlflowException as error:
        if error.error_code not in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"):
            raise
        champion = None
    if champion is None or top1 > float(champion.tags.get("val/top1", "-inf")):
        client.set_registered_model_alias(name, "champion", version.version)


def _linked(client: "MlflowClient", url: str) -> str:
    """An address in Markdown; of what is known to the same server, a registered model or a run, with a link to it."""
    kind, _, rest = url.partition(":/")
    name, _, version = rest.strip("/").partition("/")
    if kind == "models":
        page = f"#/models/{name.partition('@')[0]}{f'/versions/{version}' if version else ''}"
        return f"[{url}]({page})"
    home = url.rstrip("/").removesuffix("/model")
    everywhere = [experiment.experiment_id for experiment in client.search_experiments()]
    asked = f'tags.`vitray.home` = "{home}"'  # MLflow has no way to write a quote in quotes
    for run in client.search_runs(everywhere, asked, max_results=1) if '"' not in home else []:
        return f"[{url}](#/experiments/{run.info.experiment_id}/runs/{run.info.run_id})"
    return f"[{url}]({url})" if kind.startswith("http") else f"`{url}`"


def artifacts_beside(uri: str) -> str | None:
    """Where a database in a file keeps its artifacts: in `mlruns` beside it; None leaves it to the server."""
    path = uri.removeprefix("sqlite:///")
    return str(Path(path).absolute().with_name("mlruns")) if path != uri else None


def _is_refused(error: Exception) -> bool:
    """Whether sending the same again cannot help."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE")
    return not isinstance(error, OSError)
