"""The code of a logged model. MLflow copies this file into the model, next to the model folder and our package.

An input image is a record with the field `image` (an encoded image as bytes or base64 text, or its pixels), or one
row of a uint8 tensor, N x height x width x 3. It is cropped and normalised as in the run's evaluation.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any

import mlflow.models
import numpy as np
import torch
from mlflow.exceptions import MlflowException
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from vitray.config import Run
from vitray.data.augment.batch import normalised
from vitray.data.augment.decode import UndecodableImage, check_size, decode_image
from vitray.data.augment.image import crop_centre
from vitray.errors import LONGEST_MESSAGE, cut_middle, printable
from vitray.models.probabilities import probabilities_of, probability_of
from vitray.weights.folder import load_model

# Images per forward pass, which bounds the memory of a long request.
BATCH_SIZE = 64


class ImageClassifier(PythonModel):
    """A model folder as a classifier: for each image the most probable class, and the probabilities of all."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the model folder, on a GPU if there is one."""
        loaded = load_model(context.artifacts["model"])
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.run, self.vit = loaded.run, loaded.vit.to(self.device)
        self.classes = loaded.classes or [str(label) for label in range(loaded.run.model.num_classes or 0)]

    # MLflow warns about an untyped input, and validates the content of all types but arrays and those of pandas.
    def predict(  # type: ignore[override] - the base class has untyped parameters
        self, model_input: np.ndarray, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Return for each image `label`, `class`, `probability`, and all `probabilities` or the `top` k.

        The probabilities are a softmax, or one sigmoid per class for a run with loss bce.
        """
        top_k = _top_k(params, len(self.classes))
        images = _images(model_input)
        answers = []
        for start in range(0, len(images), BATCH_SIZE):
            batch = images[start : start + BATCH_SIZE]
            views = [_preprocess(image, start + index, self.run) for index, image in enumerate(batch)]
            answers += [self._answer(probabilities_K, top_k) for probabilities_K in self._probabilities(views)]
        return answers

    @torch.inference_mode()
    def _probabilities(self, views_HWC: list[np.ndarray]) -> np.ndarray:
        images_BHWC = torch.from_numpy(np.stack(views_HWC)).to(self.device)
        logits_BK = self.vit(normalised(images_BHWC, self.run.data.normalise))
        return probabilities_of(logits_BK, probability_of(self.run)).cpu().numpy()

    def _answer(self, probabilities_K: np.ndarray, top_k: int | None) -> dict[str, Any]:
        order = np.argsort(-probabilities_K, kind="stable")  # among equals the lowest label is first
        best = self._class_answer(probabilities_K, order[0])
        if top_k is None:
            return {**best, "probabilities": probabilities_K.tolist()}
        return {**best, "top": [self._class_answer(probabilities_K, label) for label in order[:top_k]]}

    def _class_answer(self, probabilities_K: np.ndarray, label: int) -> dict[str, Any]:
        return {"label": int(label), "class": self.classes[label], "probability": float(probabilities_K[label])}


def _top_k(params: Any, classes: int) -> int | None:
    if params is not None and not isinstance(params, Mapping):
        raise _invalid(f"params: got {type(params).__name__}, wanted params by name")
    top_k = (params or {}).get("top_k")
    if top_k is not None and not (isinstance(top_k, int | np.integer) and 1 <= top_k <= classes):
        raise _invalid(f"top_k: got {top_k!r}, wanted 1 to {classes}, the number of classes")
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


def _image_column(columns: Any) -> Any:
    if not isinstance(columns, Mapping) and not hasattr(columns, "columns"):
        raise _invalid(f"got {type(columns).__name__}, wanted records, columns or a tensor")
    if "image" not in columns:
        raise _invalid(f"got the columns {', '.join(map(str, columns)) or 'none'}; wanted image")
    return columns["image"]


def _preprocess(image: Any, index: int, run: Run) -> np.ndarray:
    """Return the pixels of one image, cropped as in the run's evaluation."""
    try:
        return crop_centre(_pixels(image), run.data.eval_crop, run.model.image_shape)
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
        raise ValueError(f"got {type(image).__name__} of shape {pixels.shape}, wanted base64 or height x width x 3")
    check_size(pixels.shape[1], pixels.shape[0])
    if pixels.dtype.kind not in "iuf":
        raise ValueError(f"got {pixels.dtype}, wanted whole numbers 0 to 255")
    if pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() > 255:
        raise ValueError(f"got {pixels.dtype} from {pixels.min()} to {pixels.max()}, wanted whole numbers 0 to 255")
    return pixels.astype(np.uint8)


def _invalid(fault: str) -> MlflowException:
    # MLflow's server returns any other exception as a stack trace.
    return MlflowException.invalid_parameter_value(printable(cut_middle(fault, LONGEST_MESSAGE)))


mlflow.models.set_model(ImageClassifier())
