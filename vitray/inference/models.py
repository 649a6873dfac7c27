"""Networks by address: a picklable description, from which any process loads the network itself.

An address is a model folder, a delta, `models:/name@alias`, `runs:/<id>/<path>`, `s3://`, or a weights file of another
library.
"""

import hashlib
import json
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

from vitray.config.augmentation import CentreCrop, Normalise
from vitray.config.sections import Model
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.tracking.mlflow_client import tracking_env, tracking_uri
from vitray.tracking.model_uri import is_model_uri, pin_uri
from vitray.weights import identity_of, open_weights


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
    normalise: Normalise
    crop: CentreCrop
    precision: Literal["fp32", "bf16"]
    store: str | None = None
    """The MLflow at which the address is valid; None for other addresses."""

    @property
    def key(self) -> str:
        """A hash of everything that decides the outputs for an image."""
        settings: list[Any] = [self.settings, self.identity, self.size, self.precision]
        settings += [self.normalise.model_dump(mode="json"), self.crop.model_dump(mode="json")]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def describe_network(url: str) -> tuple[NetworkSpec, ViT]:
    """Return the description of the network at an address, and the network in evaluation mode."""
    pinned = pin_uri(url)
    run, vit, classes = open_weights(pinned)
    spec = NetworkSpec(
        url=pinned,
        name=short_name(url),
        network=run.model.name,
        settings=_settings_of(vit.model),
        identity=identity_of(vit.state_dict()),
        classes=None if classes is None else tuple(classes),
        num_classes=vit.model.num_classes,
        features=vit.model.num_features,
        size=vit.model.image_shape,
        normalise=run.data.normalise,
        crop=run.data.eval_crop,
        precision=run.compute.precision,
        store=tracking_uri() if is_model_uri(pinned) else None,
    )
    return spec, vit.requires_grad_(False)


def open_network(spec: NetworkSpec) -> ViT:
    """Return the described network in evaluation mode; refuse other weights at its address."""
    # An actor on a cluster has neither the driver's environment nor its working folder.
    with tracking_env(spec.store) if spec.store else nullcontext():
        vit = open_weights(spec.url).vit
    if identity_of(vit.state_dict()) != spec.identity or _settings_of(vit.model) != spec.settings:
        raise ConfigError(f"{spec.url}: its weights or settings have changed since the command began; start it again")
    return vit.requires_grad_(False)


def _settings_of(model: Model) -> str:
    return model.model_dump_json(exclude={"drop_path", "drop_path_over_depth", "dropout", "execution"})


def short_name(url: str) -> str:
    """Return the end of an address, with the folder above it where the end is only `model`."""
    if url.startswith("models:/"):
        return url.removeprefix("models:/").replace("/", "-").replace("@", "-")
    parts = [part for part in url.replace(":", "/").split("/") if part not in ("", ".", "..")]
    end = [part for part in parts if part != "model"][-1:] or parts[-1:] or ["model"]
    return end[0].removesuffix(".safetensors").removesuffix(".pth").removesuffix(".npz")
