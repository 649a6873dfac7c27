"""Links of a run in MLflow: its datasets, step-keyed images, and the logged models that its scores belong to."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vitray.config import load_run
from vitray.config.training import Tracking
from vitray.system import storage
from vitray.weights.addresses import CHECKPOINT_TAG, FOLDER_TAG, find_logged_model, is_model_uri, resolve_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

# Tags of an evaluation's run.
TRAINING_RUN_TAG, VERSION_TAG = "vitray.training_run", "vitray.model_version"
# MLflow's limit.
DIGEST_LENGTH = 36
# MLflow opens its pages of model training with this query, and those of language models without it.
WORKFLOW = "workflowType=machine_learning"


def run_page(experiment_id: str, run_id: str) -> str:
    """Return the page of a run, below the address of a server."""
    return f"#/experiments/{experiment_id}/runs/{run_id}?{WORKFLOW}"


class TrackedDataset(NamedTuple):
    """A part of a dataset as an input of a run."""

    name: str
    digest: str
    """A hash of the images and their order."""
    url: str
    context: Literal["training", "validation", "evaluation"]
    images: int
    classes: int


class ModelScores(NamedTuple):
    """Scores of one model on one dataset; the values are metrics of a step."""

    step: int
    values: Mapping[str, float]
    dataset: TrackedDataset

    def record(self) -> dict[str, Any]:
        """Return the scores as JSON values."""
        values = {name: float(value) for name, value in self.values.items()}
        return {"step": self.step, "values": values, "dataset": self.dataset._asdict()}


def experiment_of(url: str) -> str:
    """Return the experiment of the network's training; of another library's weights, the default one."""
    settings = storage.join(resolve_uri(url), "run.yaml")
    if not storage.exists(settings):
        return Tracking().experiment
    with storage.local_copy(settings) as path:
        return load_run(path).tracking.experiment


def log_datasets(client: "MlflowClient", run_id: str, datasets: Iterable[Mapping[str, Any]]) -> None:
    """Log datasets as inputs of a run; those that it has stay as they are."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.types import ColSpec, Schema

    columns = Schema([ColSpec("binary", "image"), ColSpec("long", "label"), ColSpec("string", "key")])
    inputs = []
    for each in datasets:
        dataset = Dataset(
            each["name"],
            each["digest"][:DIGEST_LENGTH],
            source_type="s3" if storage.is_remote(each["url"]) else "local",
            source=json.dumps({"uri": each["url"]}),
            schema=json.dumps({"mlflow_colspec": columns.to_dict()}),
            profile=json.dumps({"num_rows": each["images"], "num_classes": each["classes"]}),
        )
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", each["context"])]))
    client.log_inputs(run_id, inputs)


def log_image(client: "MlflowClient", run_id: str, path: Path, key: str, step: int) -> None:
    """Log an image of a step, which MLflow shows in a grid with those of other runs; repeated calls log it once."""
    from PIL import Image

    # The names of MLflow's image files.
    start = f"images/{key.replace('/', '~')}+step+{step}+timestamp+"
    names = [file.path for file in client.list_artifacts(run_id, "images") if file.path.startswith(start)]
    if any(name.endswith("+compressed.webp") for name in names):  # the second of two files
        return
    with Image.open(path) as image:
        client.log_image(run_id, image, key=key, step=step, synchronous=True)


def log_checkpoint(client: "MlflowClient", run_id: str, body: Mapping[str, Any]) -> None:
    """Make a checkpoint the run's only logged model of a checkpoint, with the scores of its step.

    Its files stay in the run folder. The model of an earlier checkpoint is deleted, as that checkpoint is pruned.
    """
    import mlflow
    from mlflow.entities import LoggedModelOutput

    run = client.get_run(run_id)
    models = [
        model
        for model in client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run_id}'")
        if CHECKPOINT_TAG in model.tags
    ]
    model = next((model for model in models if model.tags[CHECKPOINT_TAG] == body["folder"]), None)
    for other in models:
        if model is None or other.model_id != model.model_id:
            client.delete_logged_model(other.model_id)
    if model is None:
        model = mlflow.create_external_model(
            body["name"],
            source_run_id=run_id,
            tags={CHECKPOINT_TAG: body["folder"]},
            params=run.data.params,
            experiment_id=run.info.experiment_id,
        )
    elif model.status != "READY":  # a request was interrupted
        client.finalize_logged_model(model.model_id, "READY")
    if model.model_id not in [output.model_id for output in (run.outputs.model_outputs if run.outputs else [])]:
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, body["step"])])
    _log_model_metrics(client, run_id, model.model_id, body)


def log_scores(client: "MlflowClient", run_id: str, body: Mapping[str, Any]) -> None:
    """Log the scores, if there are any, of the model at an address, and link the model.

    If MLflow has the model from another run, the two runs are linked in both directions.
    """
    from mlflow.entities import LoggedModelInput, RunTag

    model = find_model(client, body["model"], run_id)
    if "values" in body:
        _log_model_metrics(client, run_id, model and model.model_id, body)
    if model is None or model.source_run_id in (None, run_id):
        return
    client.log_inputs(run_id, models=[LoggedModelInput(model.model_id)])
    run, training = client.get_run(run_id), client.get_run(model.source_run_id)
    tags = {TRAINING_RUN_TAG: training.info.run_id}
    if training.info.experiment_id == run.info.experiment_id:
        tags["mlflow.parentRunId"] = training.info.run_id
    page = run_page(training.info.experiment_id, training.info.run_id)
    links = [f"Training run: [{training.info.run_name}]({page})"]
    versions = client.search_model_versions(f"run_id = '{model.source_run_id}'")
    versions = [each for each in versions if each.model_id == model.model_id or each.source == model.model_uri]
    for version in sorted(versions, key=lambda each: int(each.version)):
        tags[VERSION_TAG] = f"models:/{version.name}/{version.version}"  # at last the newest
        page = f"#/models/{version.name}/versions/{version.version}"
        links.append(f"Registered version: [{version.name}, version {version.version}]({page})")
    tags["mlflow.note.content"] = "\n\n".join([body["description"], *links])
    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()], synchronous=True)


def find_model(client: "MlflowClient", url: str, run_id: str) -> "LoggedModel | None":
    """Return the logged model at an address, or None.

    Of several models of one folder it is the run's own, otherwise the latest: a sweep logs the folder of its best trial
    once more.
    """
    if is_model_uri(url):
        return find_logged_model(client, url)
    if "'" in url or '"' in url:  # MLflow's filters cannot escape a quote
        return None
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    models = client.search_logged_models(experiments, f"tags.`{FOLDER_TAG}` = '{url}'")
    return max(models, key=lambda model: (model.source_run_id == run_id, model.creation_timestamp), default=None)


def _log_model_metrics(client: "MlflowClient", run_id: str, model_id: str | None, body: Mapping[str, Any]) -> None:
    """Log metrics of a run once more, linked to a model and a dataset; the run keeps one point for each step."""
    from mlflow.entities import Metric

    dataset, step = body["dataset"], body["step"]
    logged = client.get_run(run_id).data.metrics
    metrics = []
    for name, value in body["values"].items():
        key = clean_key(name)
        history = client.get_metric_history(run_id, key) if key in logged else []
        # MLflow ignores a point that it has, of the same value and time.
        same = next((point for point in history if point.step == step), None)
        value, timestamp = (value, body["time"]) if same is None else (same.value, same.timestamp)
        if value == value and abs(value) != float("inf"):  # a logged model would show these as numbers
            metrics.append(
                Metric(key, value, timestamp, step, model_id, dataset["name"], dataset["digest"][:DIGEST_LENGTH])
            )
    if metrics:
        client.log_batch(run_id, metrics=metrics, synchronous=True)


def clean_key(key: str) -> str:
    """Return a key with MLflow's legal characters: all but letters, digits and `_-. :/` become `_`."""
    return re.sub(r"[^\w\-. :/]", "_", key)
