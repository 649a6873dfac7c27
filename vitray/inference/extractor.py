"""A network on one device: the outputs of a chunk of images, as a table for each kind of output.

Shapes: N images, D numbers of an image.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import pyarrow as pa
import torch

from vitray.data.augment.views import decode_views, usable
from vitray.inference.images import ImageSet, read_encoded
from vitray.inference.network_spec import NetworkSpec, Wanted
from vitray.inference.networks import Networks
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
        self._spec, self._images, self._alter = spec, images, alter
        self._loaded = {} if vit is None else {spec.name: vit}
        self._networks: Networks | None = None
        self._decoders = ThreadPoolExecutor(decoders or decoding_threads())
        self._lock = threading.Lock()

    def load(self) -> None:
        """Load the network, before the first call of `extract`: an actor's constructor would hide the error."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._networks = Networks([self._spec], Wanted(logits=True, features=True), device, loaded=self._loaded)

    def extract(self, start: int, stop: int, outputs: Sequence[Output]) -> dict[str, pa.Table]:
        """Return a table of each kind of output for the images from `start` to `stop`."""
        assert self._networks is not None, "load comes first"
        encoded = read_encoded(self._images, range(start, stop))
        reasons: list[str | None] = []
        parts: dict[str, list[np.ndarray]] = {output: [] for output in outputs}
        for first in range(0, len(encoded), BATCH):
            batch = encoded[first : first + BATCH]
            contents = [each.content for each in batch]
            [views_BHWC], why = decode_views(contents, [self._spec.view], run=self._decoders.map)
            if self._alter is not None:
                places = np.flatnonzero(usable(why)).tolist()
                altered = self._decoders.map(self._alter, views_BHWC[places], [batch[place].key for place in places])
                for place, view_HWC in zip(places, altered, strict=True):
                    views_BHWC[place] = view_HWC
            reasons += why
            with self._lock:
                values = self._networks.outputs([views_BHWC])[self._spec.name]
            for output, arrays in parts.items():
                arrays.append(values[output].float().cpu().numpy())
        columns = {
            "row": pa.array(range(start, stop), pa.int64()),
            "key": pa.array([image.key for image in encoded], pa.string()),
            "label": pa.array([image.label for image in encoded], pa.int64()),
            "corrupt": pa.array(reasons, pa.string()),
        }
        return {output: pa.table({**columns, output: _vectors(np.concatenate(parts[output]))}) for output in outputs}


def _vectors(values_ND: np.ndarray) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(values_ND.ravel()), values_ND.shape[1])
