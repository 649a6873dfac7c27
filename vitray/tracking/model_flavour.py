"""A model folder as a logged MLflow model, which MLflow can register, load and (for a classifier) serve."""

import base64
import io
import shutil
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
from vitray.storage import scratch_folder
from vitray.tracking.lineage import FOLDER_TAG
from vitray.tracking.model_registry import BASE_IDENTITY_TAG, BASE_TAG
from vitray.tracking.model_uri import MODEL_DIR
from vitray.weights.delta import CLASSES, DELTA, RUN, WEIGHTS, Delta, read_delta
from vitray.weights.folder import load_model, load_tokenizer

PACKAGE = Path(__file__).parents[1]
PYFUNC = Path(__file__).with_name("pyfunc.py")

# The packages that pyfunc.py imports, checked by a test, and MLflow.
REQUIREMENTS = ("mlflow", "numpy", "pillow", "pyarrow", "pydantic", "pyyaml", "safetensors", "simplejpeg", "torch")


def log_model(run_id: str, folder: str) -> str:
    """Log a model folder as a model of this run, and return its uri, `models:/m-...`.

    A delta stays a delta: its tags name the base, which serving needs too. MLflow's active run does not change.
    """
    client = MlflowClient()
    tracked = client.get_run(run_id)
    with scratch_folder() as name:
        copy, logged_dir = name / "model", name / "built"
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
        description = Model(logged.artifact_location, run_id, model_uuid=logged.model_id, model_id=logged.model_id)
        try:
            (_save_folder if run.model.num_classes is None else _save_pyfunc)(logged_dir, copy, description)
            client.log_model_artifacts(logged.model_id, str(logged_dir))
            client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
        except BaseException:
            client.finalize_logged_model(logged.model_id, "FAILED")
            raise
    return client.finalize_logged_model(logged.model_id, "READY").model_uri


def _copy_model(folder: str, copy: Path) -> tuple[Run, Delta | None]:
    """Copy only the files of a model folder, and check that the model loads."""
    copy.mkdir()
    delta = read_delta(folder)
    for name in (WEIGHTS, CLASSES, RUN, *([] if delta is None else [DELTA])):
        with storage.local_copy(storage.join(folder, name)) as path:
            shutil.copyfile(path, copy / name)
    is_tokenizer = load_run(copy / RUN).task.kind == "tokenizer"
    return (load_tokenizer if is_tokenizer else load_model)(str(copy)).run, delta


def _save_pyfunc(path: Path, folder: Path, description: Model) -> None:
    """Write a model that MLflow can serve: code as source, weights as safetensors, no pickle."""
    # MLflow keeps the name of the code file in the model.
    code = Path(shutil.copyfile(PYFUNC, folder.with_name("serving.py")))
    mlflow.pyfunc.save_model(
        path,
        python_model=code,
        artifacts={"model": str(folder)},
        code_paths=[str(PACKAGE)],
        signature=_signature(),
        input_example=_input_example(),
        # Without local versions such as +cu130, which only torch's own index has.
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in REQUIREMENTS],
        mlflow_model=description,
    )


def _save_folder(path: Path, folder: Path, description: Model) -> None:
    """Write a model without classes, which MLflow lists but cannot serve; `resolve_uri` finds its folder."""
    shutil.copytree(folder, path / MODEL_DIR)
    description.add_flavor("vitray", data=MODEL_DIR)
    description.save(str(path / "MLmodel"))


def _signature() -> ModelSignature:
    """Return the output schema of a served model.

    The input schema stays open: MLflow's schemas hold either columns or a tensor, and the model takes both.
    """
    scalars = (("label", DataType.long), ("class", DataType.string), ("probability", DataType.double))
    ranked = Array(Object([Property(name, kind) for name, kind in scalars]))
    outputs: list[ColSpec | TensorSpec] = [ColSpec(kind, name) for name, kind in scalars]
    outputs.append(ColSpec(Array(DataType.double), "probabilities", required=False))
    outputs.append(ColSpec(ranked, "top", required=False))
    return ModelSignature(outputs=Schema(outputs), params=ParamSchema([ParamSpec("top_k", DataType.long, None)]))


def _input_example() -> list[dict[str, Any]]:
    """Return one record with a small PNG."""
    ramp = np.arange(0, 256, 16, dtype=np.uint8)
    pixels_HWC = np.stack([*np.meshgrid(ramp, ramp), np.full((16, 16), 128, np.uint8)], axis=2)
    png = io.BytesIO()
    Image.fromarray(pixels_HWC).save(png, "PNG")
    return [{"image": base64.b64encode(png.getvalue()).decode()}]
