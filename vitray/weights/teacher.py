"""The teacher of a distillation: a trained classifier at an address, checked against the run that learns from it."""

from collections.abc import Sequence
from typing import NamedTuple

from vitray.config import Run
from vitray.config.augmentation import Normalize
from vitray.config.classification import Distillation
from vitray.errors import ConfigError, nearest
from vitray.models.network import AnyNetwork
from vitray.models.products import Products
from vitray.weights import LoadedModel, identity_of, open_weights
from vitray.weights.addresses import pin_uri

SETTING = "task.distill.teacher"


class TeacherSource(NamedTuple):
    """A teacher and its origin."""

    url: str
    """Its permanent address, readable from any folder."""
    identity: str
    """A hash of its tensors."""
    name: str
    network: AnyNetwork
    """From normalized images to logits."""
    normalize: Normalize
    """The normalization of its images."""
    gflops: float
    """Of the matrix products of one image's forward pass; a multiply-add counts once."""


def open_teacher(run: Run, distill: Distillation, classes: Sequence[str]) -> TeacherSource:
    """Return the teacher that a run names, checked against the run's classes and image size."""
    try:
        url = pin_uri(distill.teacher)
        loaded = open_weights(url)
    except ConfigError as error:
        raise ConfigError(f"{SETTING}: {error}") from None
    _check_classes(loaded, distill.teacher, classes)
    model = loaded.vit.model
    if model.image_shape != run.model.image_shape:
        (height, width), (own_height, own_width) = model.image_shape, run.model.image_shape
        raise ConfigError(
            f"{SETTING}: got {distill.teacher}, which reads images of {height} x {width} pixels, expected {own_height}"
            f" x {own_width}, as model.image_size: fine-tune the teacher at that size, or train at its own"
        )
    identity = identity_of(loaded.vit.state_dict())
    network = loaded.vit.requires_grad_(False)
    network.count(products := Products())
    return TeacherSource(url, identity, model.name, network, loaded.run.data.normalize, products.gflops)


def _check_classes(loaded: LoadedModel, url: str, classes: Sequence[str]) -> None:
    number, names = loaded.vit.model.num_classes, loaded.classes
    if number is None:
        raise ConfigError(f"{SETTING}: got {url}, a network without a head, expected a classifier")
    if number != len(classes):
        raise ConfigError(
            f"{SETTING}: got {url}, which knows {number} classes, expected the {len(classes)} of the data"
        )
    # A weights file of another library has no names: an equal number counts as the same classes.
    for label, (name, wanted) in enumerate(zip(names or classes, classes, strict=True)):
        if name != wanted:
            raise ConfigError(
                f"{SETTING}: got {url}, whose class {label} is {name}, expected {wanted}, as in the data"
                f"{nearest(wanted, names or ())}"
            )
