"""The settings of a stream, and what a worker gets from it; loads no platform."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from vitray.config.augmentation import Augment, CenterCrop
from vitray.config.training import Balance
from vitray.data.augment.draws import Draws
from vitray.data.augment.views import ViewKind


def _unchanged(value: Any, _rank: int = 0) -> Any:
    return value


class Share(NamedTuple):
    """The part of one worker."""

    rank: int
    """Among all workers, one node after another in turn: ranks 0 to nodes - 1 are on different nodes."""
    workers: int
    broadcast: Callable[..., Any] = _unchanged
    """Returns the value of the worker of a rank, the first one by default, on every worker; all of them call it."""
    nodes: int = 1
    """Nodes of the workers, each with equally many of them."""


class HostBatch(NamedTuple):
    """One worker's part of one step, on the host."""

    images: np.ndarray
    """uint8, BHWC; BVHWC, the global views, in a stream of several views."""
    labels: np.ndarray
    positions: np.ndarray
    """In the epoch, or in the stored order of an evaluation; a step starts at step * global batch."""
    rows: np.ndarray
    """Row numbers of the images in the stored order of the split; padding of an evaluation's last step has none."""
    epoch: int
    draws: tuple[Draws, ...] = ()
    """The augmentation to apply on the device, of each kind of views; empty if the images have it."""
    masks: np.ndarray | None = None
    """The mask of each image (BN) or global view (BVN), for tasks that need one."""
    hidden: np.ndarray | None = None
    """The number of hidden patches of all views of an image, where it differs between images."""
    views: np.ndarray | None = None
    """The local views (BVHWC), in a stream of several views."""


class StreamSpec(NamedTuple):
    """The settings of one stream."""

    split: str
    batch: int
    """Images of a global batch, over all workers."""
    size: tuple[int, int]
    crop: Augment | CenterCrop
    seed: int = 0
    repeats: int = 1
    """Views of each image per epoch (repeated augmentation)."""
    max_corrupt: float = 0.001
    memory: int | None = None
    """Limit of the stream's blocks in the object store, in bytes; by default a quarter of the store."""
    cpus: int | None = None
    """Most CPUs of one execution that decodes its images; by default all."""
    cache: Literal["none", "decoded"] = "none"
    """`decoded` reads pixels that the cluster decodes once; it changes no image."""
    in_bulk: bool = False
    """Whether a single worker reads the blocks of an execution after its end, while the next one runs. Ray's scheduling
    loop is a thread of that worker and spins while blocks wait for memory: on a CPU it costs more than half of the
    training speed (LOG)."""
    row_mask: np.ndarray | None = None
    """True for each row of the split to use; the other rows are neither read nor counted."""
    balance: Balance = "none"
    """How often an epoch shows the images of each class."""
    views: tuple[ViewKind, ...] = ()
    """Global and local views of each image, in place of one of `size` by `crop`."""

    @property
    def kinds(self) -> tuple[ViewKind, ...]:
        """The kinds of views."""
        return self.views or (ViewKind(self.size, self.crop),)

    @property
    def image_bytes(self) -> int:
        """The bytes of all views of an image."""
        return sum(3 * math.prod(kind.size) * kind.views for kind in self.kinds)
