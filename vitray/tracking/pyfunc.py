"""The code of a logged model: MLflow copies this file beside the model folder and our package, and runs it to serve.

An image is a record with an `image` (PNG, JPEG, ... as base64 text or as bytes, or its pixels), or one of a uint8
tensor, N x height x width x 3. However it comes, it is cropped and normalised as the run's evaluations do it.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import mlflow.models
import numpy as np
import torch
from mlflow.exceptions import MlflowException
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from vitray.config import Run
from vitray.config.training import Finetune, Supervised
from vitray.data.augment.batch import normalised
from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.augment.image import crop_centre
from vitray.weights.folder import load_model

# Images of one forward pass: a longer request costs no more memory.
BATCH = 64


class ImageClassifier(PythonModel):
    """A model folder that answers each image with its class, and how probable that and the others are."""

    def load_context(self, context: PythonModelContext) -> None:
        """Read the model folder, onto a GPU where there is one."""
        loaded = load_model(context.artifacts["model"])
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.run, self.vit = loaded.run, loaded.vit.to(self.device)
        self.classes = loaded.classes or [str(label) for label in range(loaded.run.model.num_classes or 0)]

    # MLflow warns of an input without a type, and of any type but an array and pandas' checks what is in it.
    def predict(  # type: ignore[override] - the base takes and returns what it likes
        self, model_input: np.ndarray, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """For each image `label`, `class`, `probability` and all `probabilities`, or instead of all the `top` k.

        Probabilities are softmax, which sum to 1; of a run with loss bce sigmoid, each class by itself.
        """
        top_k = (params or {}).get("top_k")
        if top_k is not None and not 1 <= top_k <= len(self.classes):
            raise _refused(f"top_k: got {top_k}, wanted 1 to {len(self.classes)}, the number of classes")
        images = _images(model_input)
        answers = []
        for start in range(0, len(images), BATCH):
            some = [_view(image, start + place, self.run) for place, image in enumerate(images[start : start + BATCH])]
            answers += [self._answer(shares_K, top_k) for shares_K in self._probabilities(some)]
        return answers

    @torch.inference_mode()
    def _probabilities(self, views_HWC: list[np.ndarray]) -> np.ndarray:
        images_BHWC = torch.from_numpy(np.stack(views_HWC)).to(self.device)
        logits_BK = self.vit(normalised(images_BHWC, self.run.data.normalise))
        # What has no classes is not logged as a model.
        assert isinstance(self.run.task, Supervised | Finetune)
        return (logits_BK.sigmoid() if self.run.task.loss == "bce" else logits_BK.softmax(dim=1)).cpu().numpy()

    def _answer(self, shares_K: np.ndarray, top_k: int | None) -> dict[str, Any]:
        # Stable, so that of equals the first is named.
        order = np.argsort(-shares_K, kind="stable")
        best = self._named(shares_K, order[0])
        if top_k is None:
            return {**best, "probabilities": shares_K.tolist()}
        return {**best, "top": [self._named(shares_K, label) for label in order[:top_k]]}

    def _named(self, shares_K: np.ndarray, label: int) -> dict[str, Any]:
        return {"label": int(label), "class": self.classes[label], "probability": float(shares_K[label])}


def _images(given: Any) -> list[Any]:
    """The images of a DataFrame, of a mapping of columns, of a list of records, or of a tensor."""
    if isinstance(given, list):
        return [_under_image(part) if isinstance(part, Mapping) else part for part in given]
    images = given if isinstance(given, np.ndarray) else _under_image(given)
    # MLflow's server makes an array without dimensions of a single text.
    alone = isinstance(images, str | bytes) or (isinstance(images, np.ndarray) and images.ndim == 0)
    return [images] if alone else list(images)


def _under_image(columns: Any) -> Any:
    if "image" not in columns:
        raise _refused(f"got the columns {', '.join(map(str, columns)) or 'none'}; wanted image")
    return columns["image"]


def _view(image: Any, place: int, run: Run) -> np.ndarray:
    """The pixels of one image as the network was evaluated on them."""
    try:
        return crop_centre(_pixels(image), run.data.eval_crop, run.model.image_shape)
    except ValueError as fault:  # UndecodableImage is one
        raise _refused(f"image {place}: {fault}") from None


def _pixels(image: Any) -> np.ndarray:
    if isinstance(image, np.ndarray) and image.ndim == 0:
        image = image.item()
    if isinstance(image, str):
        try:
            # Some encoders break the text into lines.
            image = base64.b64decode("".join(image.split()), validate=True)
        except binascii.Error as fault:
            raise UndecodableImage(f"not base64: {fault}") from None
    if isinstance(image, bytes | bytearray | memoryview):
        return decode_image(bytes(image))
    pixels = np.asarray(image)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(f"got {type(image).__name__} of shape {pixels.shape}, wanted base64 or height x width x 3")
    if pixels.dtype.kind not in "iu" or pixels.min() < 0 or pixels.max() > 255:
        raise ValueError(f"got {pixels.dtype} from {pixels.min()} to {pixels.max()}, wanted whole numbers 0 to 255")
    return pixels.astype(np.uint8)


def _refused(fault: str) -> MlflowException:
    # Any other exception reaches the caller of the server as a stack trace.
    return MlflowException.invalid_parameter_value(fault)


mlflow.models.set_model(ImageClassifier())
