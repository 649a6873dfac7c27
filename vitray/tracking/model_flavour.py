"""A model folder as an MLflow model: registered and loaded by its address, and served where it names classes."""

import base64
import io
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema, TensorSpec
from mlflow.types.schema import Array, Object, Property
from PIL import Image

from vitray import storage
from vitray.config import Run, load_run
from vitray.tracking.mlflow_client import BASE, BASE_IDENTITY, INSIDE
from vitray.weights.delta import CLASSES, DELTA, RUN, WEIGHTS, Delta, read_delta
from vitray.weights.folder import load_model, load_tokenizer

PACKAGE = Path(__file__).parents[1]
SERVING = Path(__file__).with_name("serving.py")

# What serving imports (a test counts it), and MLflow, which serves.
REQUIREMENTS = ("mlflow", "numpy", "pillow", "pyarrow", "pydantic", "pyyaml", "safetensors", "simplejpeg", "torch")


def log_model(run_id: str, folder: str) -> str:
    """Log the model folder at an address as a model of this run, and return its uri, `models:/m-...`.

    A delta is logged as one, and its tags say where its base lies, which serving reads too. The run need not be the
    active one, and whichever is stays so.
    """
    client = MlflowClient()
    tracked = client.get_run(run_id)
    with tempfile.TemporaryDirectory(prefix="vitray-") as name:
        copy, built = Path(name) / "model", Path(name) / "built"
        run, delta = _fetch(folder, copy)
        # mlflow.pyfunc.log_model would put the model into the active experiment rather than into the run's.
        logged = client.create_logged_model(
            tracked.info.experiment_id,
            name=run.model.name,
            source_run_id=run_id,
            tags=None if delta is None else {BASE: delta.base.url, BASE_IDENTITY: delta.base.identity},
            params=tracked.data.params,
        )
        entry = Model(logged.artifact_location, run_id, model_uuid=logged.model_id, model_id=logged.model_id)
        try:
            (_keep if run.model.num_classes is None else _build)(built, copy, entry)
            client.log_model_artifacts(logged.model_id, str(built))
            client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
        except BaseException:
            client.finalize_logged_model(logged.model_id, "FAILED")
            raise
    return client.finalize_logged_model(logged.model_id, "READY").model_uri


def _fetch(folder: str, copy: Path) -> tuple[Run, Delta | None]:
    """Copy a model folder, and nothing that lies beside it, having checked that it can be served."""
    copy.mkdir()
    delta = read_delta(folder)
    for name in (WEIGHTS, CLASSES, RUN, *([] if delta is None else [DELTA])):
        with storage.local_copy(storage.join(folder, name)) as path:
            shutil.copyfile(path, copy / name)
    is_tokenizer = load_run(copy / RUN).task.kind == "tokenizer"
    return (load_tokenizer if is_tokenizer else load_model)(str(copy)).run, delta


def _build(path: Path, folder: Path, model: Model) -> None:
    """The files of the MLflow model: code as source, weights as safetensors, no pickle."""
    mlflow.pyfunc.save_model(
        path,
        python_model=SERVING,
        artifacts={"model": str(folder)},
        code_paths=[str(PACKAGE)],
        signature=signature(),
        input_example=example(),
        pip_requirements=requirements(),
        mlflow_model=model,
    )


def _keep(path: Path, folder: Path, model: Model) -> None:
    """What names no class is not served: its folder, where `registry` looks for one, and what MLflow lists."""
    shutil.copytree(folder, path / INSIDE)
    model.add_flavor("vitray", data=INSIDE)
    model.save(str(path / "MLmodel"))


def signature() -> ModelSignature:
    """What a served model answers.

    What it is asked is left open: MLflow's schemas hold either columns or a tensor, and the model takes both.
    """
    named = (("label", DataType.long), ("class", DataType.string), ("probability", DataType.double))
    ranked = Array(Object([Property(name, kind) for name, kind in named]))
    answers: list[ColSpec | TensorSpec] = [ColSpec(kind, name) for name, kind in named]
    answers.append(ColSpec(Array(DataType.double), "probabilities", required=False))
    answers.append(ColSpec(ranked, "top", required=False))
    return ModelSignature(outputs=Schema(answers), params=ParamSchema([ParamSpec("top_k", DataType.long, None)]))


def example() -> list[dict[str, Any]]:
    """One record: a small PNG, as one sends it."""
    ramp = np.arange(0, 256, 16, dtype=np.uint8)
    pixels_HWC = np.stack([*np.meshgrid(ramp, ramp), np.full((16, 16), 128, np.uint8)], axis=2)
    png = io.BytesIO()
    Image.fromarray(pixels_HWC).save(png, "PNG")
    return [{"image": base64.b64encode(png.getvalue()).decode()}]


def requirements() -> list[str]:
    """What serving needs, in the versions that are installed here."""
    # A build such as +cu130 is torch's own, and no index but torch's has it.
    return [f"{name}=={version(name).partition('+')[0]}" for name in REQUIREMENTS]
