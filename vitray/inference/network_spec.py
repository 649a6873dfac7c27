"""A network without its tensors, for processes that do not load torch."""

import hashlib
import json
from typing import Any, Literal, NamedTuple

from vitray.config.augmentation import CenterCrop, Normalize
from vitray.config.training import Fold
from vitray.data.augment.views import View
from vitray.models.probabilities import Probability


class NetworkSpec(NamedTuple):
    """A network without its tensors, and how its images are prepared."""

    url: str
    """A permanent address, readable from any folder."""
    name: str
    """A short name: the end of the address as the user wrote it."""
    network: str
    """The name of the architecture, such as vit_b12x1_16."""
    settings: str
    """The settings of the network as JSON, without those that only training and speed depend on."""
    identity: str
    """A hash of the tensors."""
    classes: tuple[str, ...] | None
    """None if the file has no class names."""
    num_classes: int | None
    """None for a network without a head."""
    features: int
    """The width of the pooled features."""
    size: tuple[int, int]
    normalize: Normalize
    crop: CenterCrop
    precision: Literal["fp32", "bf16"]
    tf32: bool
    """Whether a GPU rounds the factors of fp32 products to TF32."""
    probability: Probability
    """How logits become probabilities."""
    fold: tuple[str, Fold] | None = None
    """The split of its training, and the fold of it that it did not learn."""
    thresholds: tuple[float, ...] | None = None
    """The least probability of each class that counts as present, of several labels an image; None of one."""
    store: str | None = None
    """The MLflow at which the address is valid; None for other addresses."""

    @property
    def view(self) -> View:
        """How an image becomes the input of the network."""
        return View(self.crop, self.size)

    @property
    def key(self) -> str:
        """A hash of everything that decides the outputs for an image."""
        settings: list[Any] = [self.settings, self.identity, self.size, self.precision, self.tf32]
        settings += [self.normalize.model_dump(mode="json"), self.crop.model_dump(mode="json")]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


class Numerics(NamedTuple):
    """What the last bits of outputs depend on, besides the networks, their precision and their views."""

    device: Literal["cpu", "cuda"]
    threads: int
    """Of a forward pass on a CPU; 1 on a GPU, where they do not count."""
    batch: int
    """Images of a forward pass."""
    compile: bool = False
    """Compiled networks see batches of one shape: the last one is padded."""


class Wanted(NamedTuple):
    """The outputs of each network for an image."""

    logits: bool = False
    """Of those that have classes."""
    features: bool = False
    """The pooled vector before the head."""
    levels: tuple[str, ...] = ()
    """Levels whose features are kept, such as block07."""
