"""A network on one device: the outputs of a chunk of images, as a table for each kind of output.

Shapes: B images of a batch, H x W pixels, C colors, D features, K classes.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from vitray.data.augment.batch import normalized, to_device
from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.augment.image import crop_center
from vitray.inference.images import EncodedImage, ImageSet, read_encoded
from vitray.inference.models import open_network
from vitray.inference.network_spec import NetworkSpec
from vitray.models.network import AnyNetwork

Output = Literal["logits", "features"]
# Images of a forward pass. A fixed number: the last bits of an output depend on it.
BATCH = 64

# Changes the view of an image, after the crop; the second argument is the image's key.
Alter = Callable[[np.ndarray, str], np.ndarray]


def decoding_threads() -> int:
    """Return the number of threads that decode for one device: its share of the CPUs."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()))


class Extractor:
    """A network and its images in one process; two chunks at a time keep its device and its decoders busy."""

    def __init__(
        self,
        spec: NetworkSpec,
        images: ImageSet,
        alter: Alter | None = None,
        vit: AnyNetwork | None = None,
        decoders: int | None = None,
    ) -> None:
        """`decoders` is the number of threads that decode; None is the share of a device of this process."""
        self._spec, self._images, self._alter, self._vit = spec, images, alter, vit
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._decoders = ThreadPoolExecutor(decoders or decoding_threads())
        self._lock = threading.Lock()

    def load(self) -> None:
        """Load the network, before the first call of `extract`: an actor's constructor would hide the error."""
        self._vit = (self._vit or open_network(self._spec)).to(self._device).eval()

    def extract(self, start: int, stop: int, outputs: Sequence[Output]) -> dict[str, pa.Table]:
        """Return a table of each kind of output for the images from `start` to `stop`."""
        encoded = read_encoded(self._images, range(start, stop))
        reasons: list[str | None] = []
        parts: dict[str, list[np.ndarray]] = {output: [] for output in outputs}
        blank_HWC = np.zeros((*self._spec.size, 3), np.uint8)
        for first in range(0, len(encoded), BATCH):
            views = list(self._decoders.map(self._view, encoded[first : first + BATCH]))
            reasons += [view if isinstance(view, str) else None for view in views]
            images_BHWC = np.stack([blank_HWC if isinstance(view, str) else view for view in views])
            for output, values in self._forward(torch.from_numpy(images_BHWC), outputs).items():
                parts[output].append(values.float().cpu().numpy())
        columns = {
            "row": pa.array(range(start, stop), pa.int64()),
            "key": pa.array([image.key for image in encoded], pa.string()),
            "label": pa.array([image.label for image in encoded], pa.int64()),
            "corrupt": pa.array(reasons, pa.string()),
        }
        return {output: pa.table({**columns, output: _vectors(np.concatenate(parts[output]))}) for output in outputs}

    def _view(self, image: EncodedImage) -> np.ndarray | str:
        """The pixels as the network sees them, or the reason why there are none."""
        try:
            pixels_HWC = decode_image(image.content)
        except UndecodableImage as error:
            return str(error)
        view_HWC = crop_center(pixels_HWC, self._spec.crop, self._spec.size)
        return view_HWC if self._alter is None else self._alter(view_HWC, image.key)

    @torch.inference_mode()
    def _forward(self, images_BHWC: Tensor, outputs: Sequence[Output]) -> dict[str, Tensor]:
        assert self._vit is not None, "load comes first"
        autocast = torch.autocast(self._device.type, torch.bfloat16, enabled=self._spec.precision == "bf16")
        with self._lock, autocast:
            images_BCHW = normalized(to_device(images_BHWC, self._device), self._spec.normalize)
            features_BD, logits_BK = self._vit.features_and_logits(images_BCHW)
            values = {"features": features_BD, "logits": logits_BK}
        return {output: values[output] for output in outputs}


def _vectors(values_ND: np.ndarray) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(values_ND.ravel()), values_ND.shape[1])
