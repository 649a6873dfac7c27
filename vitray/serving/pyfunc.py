"""The code of a logged model. MLflow copies this file into the model, next to the model folder and our package.

An input row has the field `image` (an encoded image as bytes or base64 text, or its pixels, height x width x 3), and
for a model with several tasks the field `task`. It is cropped and normalized as in the evaluation of the task's run.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlflow.models
import numpy as np
import torch
from mlflow.exceptions import MlflowException
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from vitray.config.serving import BASE_TASK, default_task, unknown_task
from vitray.data.augment.decode import UndecodableImage, check_size, decode_image
from vitray.errors import LONGEST_MESSAGE, cut_middle, printable
from vitray.inference.answers import answer, class_names, is_classifier, probabilities, view_of
from vitray.weights.family import Member
from vitray.weights.folder import load_deltas

# Images per forward pass, which bounds the memory of a long request.
BATCH_SIZE = 64


class ImageClassifier(PythonModel):
    """A network and its deltas as a classifier: for each image the most probable class of its task."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the model folder and the deltas of it beside it, on a GPU if there is one."""
        base = context.artifacts["model"]
        folders = sorted(Path(context.artifacts["tasks"]).iterdir()) if "tasks" in context.artifacts else []
        urls = {BASE_TASK: base} | {folder.name: str(folder) for folder in folders}
        self.family = load_deltas(base, urls, "cuda" if torch.cuda.is_available() else "cpu")
        if not is_classifier(self.family.member(BASE_TASK).run):
            self.family.remove(BASE_TASK)

    # MLflow warns about an untyped input, and validates the content of all types but arrays and those of pandas.
    def predict(  # type: ignore[override] - the base class has untyped parameters
        self, model_input: np.ndarray, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Return for each image `label`, `class`, `probability`, and all `probabilities` or the `top` k.

        Of a network of several labels an image, also the `labels` that it takes as present, and their `scores`.

        The probabilities are a softmax, or one sigmoid per class for a run with loss bce.
        """
        images = _images(model_input)
        members = self._members(_tasks(model_input, len(images)))
        top_k = _top_k(params, min((len(class_names(member)) for member in members), default=1))
        answers = []
        for start in range(0, len(images), BATCH_SIZE):
            batch = members[start : start + BATCH_SIZE]
            views = [
                _preprocess(image, start + index, member)
                for index, (image, member) in enumerate(zip(images[start:], batch, strict=False))
            ]
            rows = probabilities(self.family, views, batch)
            for index, row_K in enumerate(rows, start):
                if np.isnan(row_K[0]):
                    raise _invalid(f"image {index}: the network's logits are not finite")
            answers += [answer(row_K, each, top_k) for row_K, each in zip(rows, batch, strict=True)]
        return answers

    def _members(self, tasks: list[Any]) -> list[Member]:
        """Return the network of each image."""
        names = list(self.family.members)
        members = []
        for index, task in enumerate(tasks):
            is_missing = task is None or task != task  # pandas fills a column with NaN
            name = default_task(names) if is_missing else str(task)
            if name is None:
                raise _invalid(f"image {index}: no task; expected one of {', '.join(names[:20])}")
            if name not in self.family.members:
                raise _invalid(f"image {index}: {unknown_task(name, names)}")
            members.append(self.family.member(name))
        return members


def _top_k(params: Any, classes: int) -> int | None:
    if params is not None and not isinstance(params, Mapping):
        raise _invalid(f"params: got {type(params).__name__}, expected params by name")
    top_k = (params or {}).get("top_k")
    if top_k is not None and not (isinstance(top_k, int | np.integer) and 1 <= top_k <= classes):
        raise _invalid(f"top_k: got {top_k!r}, expected 1 to {classes}, the number of classes")
    return None if top_k is None else int(top_k)


def _images(model_input: Any) -> list[Any]:
    """Return the images of a DataFrame, a mapping of columns, a list of records, or a tensor."""
    if isinstance(model_input, str | bytes):
        return [model_input]
    if isinstance(model_input, list):
        return [_image_column(part) if isinstance(part, Mapping) else part for part in model_input]
    images = model_input if isinstance(model_input, np.ndarray) else _image_column(model_input)
    # MLflow's server turns a single text into an array without dimensions.
    is_single = not isinstance(images, Iterable) or isinstance(images, str | bytes)
    is_single = is_single or (isinstance(images, np.ndarray) and images.ndim == 0)
    return [images] if is_single else list(images)


def _tasks(model_input: Any, count: int) -> list[Any]:
    """Return the task of each image; None where the input names none."""
    if isinstance(model_input, list):
        return [part.get("task") if isinstance(part, Mapping) else None for part in model_input]
    has_names = isinstance(model_input, Mapping) or hasattr(model_input, "columns")
    if not has_names or "task" not in model_input:
        return [None] * count
    tasks = np.atleast_1d(np.asarray(model_input["task"], dtype=object)).tolist()
    if len(tasks) != count:
        raise _invalid(f"got {len(tasks)} tasks for {count} images")
    return tasks


def _image_column(columns: Any) -> Any:
    if not isinstance(columns, Mapping) and not hasattr(columns, "columns"):
        raise _invalid(f"got {type(columns).__name__}, expected records, columns or a tensor")
    if "image" not in columns:
        raise _invalid(f"got the columns {', '.join(map(str, columns)) or 'none'}; expected image")
    return columns["image"]


def _preprocess(image: Any, index: int, member: Member) -> np.ndarray:
    """Return the pixels of one image, cropped as in the evaluation of its task's run."""
    try:
        return view_of(_pixels(image), member)
    except (ValueError, MemoryError) as error:  # UndecodableImage included
        raise _invalid(f"image {index}: {error}") from None


def _pixels(image: Any) -> np.ndarray:
    if isinstance(image, np.ndarray) and image.ndim == 0:
        image = image.item()
    if isinstance(image, str):
        try:
            # Some encoders break the text into lines.
            image = base64.b64decode("".join(image.split()), validate=True)
        except binascii.Error as error:
            raise UndecodableImage(f"not base64: {error}") from None
    if isinstance(image, bytes | bytearray | memoryview):
        return decode_image(bytes(image))
    pixels = np.asarray(image)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(f"got {type(image).__name__} of shape {pixels.shape}, expected base64 or height x width x 3")
    check_size(pixels.shape[1], pixels.shape[0])
    if pixels.dtype.kind not in "iuf":
        raise ValueError(f"got {pixels.dtype}, expected whole numbers 0 to 255")
    if pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() > 255:
        raise ValueError(f"got {pixels.dtype} from {pixels.min()} to {pixels.max()}, expected whole numbers 0 to 255")
    return pixels.astype(np.uint8)


def _invalid(fault: str) -> MlflowException:
    # MLflow's server returns any other exception as a stack trace.
    return MlflowException.invalid_parameter_value(printable(cut_middle(fault, LONGEST_MESSAGE)))


mlflow.models.set_model(ImageClassifier())
