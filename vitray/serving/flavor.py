"""A model folder as a logged MLflow model, which MLflow can register, load and (for a classifier) serve."""

import base64
import io
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import mlflow.pyfunc
import numpy as np
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema, TensorSpec
from mlflow.types.schema import AnyType, Array, Object, Property
from PIL import Image

from vitray.config import Run, load_run
from vitray.config.serving import BASE_TASK, is_task_name
from vitray.errors import ConfigError, cut_middle
from vitray.inference.answers import check_classifier, is_classifier
from vitray.system import storage
from vitray.system.storage import scratch_folder
from vitray.weights.addresses import (
    BASE_IDENTITY_TAG,
    BASE_TAG,
    FOLDER_TAG,
    MODEL_DIR,
    TASKS_TAG,
    pin_uri,
    resolve_uri,
)
from vitray.weights.delta import CLASSES, DELTA, RUN, WEIGHTS, Delta, identity_of, read_delta, read_state
from vitray.weights.folder import check_member, flatten_model, load_model, load_tokenizer
from vitray.weights.zoo import FOLDER as ZOO

PACKAGE = Path(__file__).parents[1]
PYFUNC = Path(__file__).with_name("pyfunc.py")

# The packages that pyfunc.py imports, checked by a test, and MLflow.
REQUIREMENTS = (
    "mlflow", "numpy", "pillow", "pyarrow", "pydantic", "pyyaml", "safetensors", "simplejpeg", "torch", "torchvision",
)  # fmt: skip


def log_model(run_id: str, folder: str) -> str:
    """Log a model folder as a model of this run, and return its uri, `models:/m-...`.

    A delta stays a delta: its tags name the base, which serving needs too. MLflow's active run does not change.
    """
    client = MlflowClient()
    tracked = client.get_run(run_id)
    with scratch_folder() as name:
        copy = name / "model"
        run, delta = _copy_model(folder, copy)
        # Not mlflow.pyfunc.log_model: it uses the active experiment instead of the run's.
        logged = client.create_logged_model(
            tracked.info.experiment_id,
            name=run.model.name.replace("/", "-"),  # MLflow refuses a slash
            source_run_id=run_id,
            tags={FOLDER_TAG: folder}
            | ({} if delta is None else {BASE_TAG: delta.base.url, BASE_IDENTITY_TAG: delta.base.identity}),
            params=tracked.data.params,
        )
        with _finalized(client, logged) as (path, description):
            if run.model.num_classes is None:
                _save_folder(path, copy, description)
            else:
                _save_pyfunc(path, {"model": copy}, [], description)
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
    return logged.model_uri


def log_family(experiment: str, name: str, base: str, tasks: Mapping[str, str]) -> str:
    """Log a base and deltas of it as one model, whose requests name a task per image; return its uri, `models:/m-...`.

    The model holds the base whole and each delta, and needs nothing else to be served.
    """
    client = MlflowClient()
    found = client.get_experiment_by_name(experiment)
    experiment_id = found.experiment_id if found else client.create_experiment(experiment)
    base, identity = pin_uri(base), identity_of(read_state(base))
    with scratch_folder() as folder:
        flatten_model(base, str(folder / "model"))
        has_classes = is_classifier(load_run(folder / "model" / RUN))
        (folder / "tasks").mkdir()
        for task, url in tasks.items():
            if not is_task_name(task) or task == BASE_TASK:
                raise ConfigError(f"{task}: expected a task of letters, digits and _-. other than {BASE_TASK}")
            check_classifier(check_member(url, base, identity), url)
            _, delta = _copy_model(resolve_uri(url), folder / "tasks" / task)
            if delta is None or delta.base.identity != identity:
                raise ConfigError(f"{task}={url}: got a delta of another delta, expected a delta of {base} itself")
        names = [BASE_TASK] * has_classes + list(tasks)
        tags = {BASE_TAG: base, BASE_IDENTITY_TAG: identity, TASKS_TAG: cut_middle(", ".join(names), 4000)}
        logged = client.create_logged_model(experiment_id, name=name, tags=tags)
        with _finalized(client, logged) as (path, description):
            artifacts = {"model": folder / "model", "tasks": folder / "tasks"}
            _save_pyfunc(path, artifacts, names, description)
    return logged.model_uri


@contextmanager
def _finalized(client: MlflowClient, logged: LoggedModel) -> Iterator[tuple[Path, Model]]:
    """Yield a folder for the files of a logged model; upload them after the block. A failed model is marked as such."""
    run_id, place = logged.source_run_id, logged.artifact_location
    with scratch_folder() as folder:
        try:
            yield folder / "built", Model(place, run_id, model_uuid=logged.model_id, model_id=logged.model_id)
            client.log_model_artifacts(logged.model_id, str(folder / "built"))
        except BaseException:
            client.finalize_logged_model(logged.model_id, "FAILED")
            raise
    client.finalize_logged_model(logged.model_id, "READY")


def _copy_model(folder: str, copy: Path) -> tuple[Run, Delta | None]:
    """Copy only the files of a model folder, and check that the model loads."""
    copy.mkdir(parents=True)
    delta = read_delta(folder)
    for name in (WEIGHTS, CLASSES, RUN, *([] if delta is None else [DELTA])):
        with storage.local_copy(storage.join(folder, name)) as path:
            shutil.copyfile(path, copy / name)
    is_tokenizer = load_run(copy / RUN).task.traits.saves == "tokenizer"
    return (load_tokenizer if is_tokenizer else load_model)(str(copy)).run, delta


def _save_pyfunc(path: Path, artifacts: Mapping[str, Path], tasks: Sequence[str], description: Model) -> None:
    """Write a model that MLflow can serve: code as source, weights as safetensors, no pickle."""
    # MLflow keeps the name of the code file in the model.
    code = Path(shutil.copyfile(PYFUNC, artifacts["model"].with_name("serving.py")))
    package = shutil.copytree(PACKAGE, code.with_name("code") / PACKAGE.name, ignore=_other_weights)
    mlflow.pyfunc.save_model(
        path,
        python_model=code,
        artifacts={name: str(folder) for name, folder in artifacts.items()},
        code_paths=[str(package)],
        signature=_signature(bool(tasks)),
        input_example=_input_example(tasks),
        # Without local versions such as +cu130, which only torch's own index has.
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in REQUIREMENTS],
        mlflow_model=description,
    )


def _other_weights(folder: str, _: Sequence[str]) -> list[str]:
    """Return what a logged model leaves out of a folder of the package: its networks, and bytecode."""
    return ["__pycache__", *([ZOO.name] if Path(folder) == ZOO.parent else [])]


def _save_folder(path: Path, folder: Path, description: Model) -> None:
    """Write a model without classes, which MLflow lists but cannot serve; `resolve_uri` finds its folder."""
    shutil.copytree(folder, path / MODEL_DIR)
    description.add_flavor("vitray", data=MODEL_DIR)
    description.save(str(path / "MLmodel"))


def _signature(has_tasks: bool) -> ModelSignature:
    """Return the schemas of a served model.

    An image is of any type: MLflow's schema cannot say that bytes, base64 text and pixels are accepted.
    """
    inputs = [ColSpec(AnyType(), "image")]
    if has_tasks:
        inputs.append(ColSpec(DataType.string, "task", required=False))
    scalars = (("label", DataType.long), ("class", DataType.string), ("probability", DataType.double))
    ranked = Array(Object([Property(name, kind) for name, kind in scalars]))
    outputs: list[ColSpec | TensorSpec] = [ColSpec(kind, name) for name, kind in scalars]
    outputs.append(ColSpec(Array(DataType.double), "probabilities", required=False))
    outputs.append(ColSpec(ranked, "top", required=False))
    # Of a network of several labels an image.
    outputs.append(ColSpec(Array(DataType.string), "labels", required=False))
    outputs.append(ColSpec(Array(DataType.double), "scores", required=False))
    params = ParamSchema([ParamSpec("top_k", DataType.long, None)])
    return ModelSignature(Schema(list(inputs)), Schema(outputs), params)


def _input_example(tasks: Sequence[str]) -> list[dict[str, str]]:
    """Return a record with a small PNG, or one for each of the first two tasks."""
    ramp = np.arange(0, 256, 16, dtype=np.uint8)
    pixels_HWC = np.stack([*np.meshgrid(ramp, ramp), np.full((16, 16), 128, np.uint8)], axis=2)
    png = io.BytesIO()
    Image.fromarray(pixels_HWC).save(png, "PNG")
    image = {"image": base64.b64encode(png.getvalue()).decode()}
    return [image | {"task": task} for task in tasks[:2]] or [image]
