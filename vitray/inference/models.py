"""Networks by address: a picklable description, from which any process loads the network itself.

An address is a model folder, a delta, `zoo/NAME`, `models:/name@alias`, `runs:/<id>/<path>`, `s3://`, or a weights file
of another library.
"""

from collections.abc import Sequence
from contextlib import nullcontext

from vitray.config import Run
from vitray.config.model import Model
from vitray.errors import ConfigError
from vitray.inference.network_spec import NetworkSpec
from vitray.models.network import AnyNetwork
from vitray.models.probabilities import probability_of
from vitray.system.mlflow_client import tracking_env, tracking_uri
from vitray.weights import identity_of, open_weights
from vitray.weights.addresses import is_model_uri, pin_uri


def describe_network(url: str) -> tuple[NetworkSpec, AnyNetwork]:
    """Return the description of the network at an address, and the network in evaluation mode."""
    pinned = pin_uri(url)
    run, vit, classes = open_weights(pinned)
    spec = spec_of(run, vit, classes, pinned, short_name(url))
    return spec._replace(store=tracking_uri() if is_model_uri(pinned) else None), vit.requires_grad_(False)


def named_networks(urls: Sequence[str]) -> list[tuple[str, NetworkSpec, AnyNetwork]]:
    """Return the networks at these addresses under names of their own: their addresses, where short names are equal."""
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"{url}: given {urls.count(url)} times; expected each network once")
    opened = [describe_network(url) for url in urls]
    names = [spec.name for spec, _ in opened]
    names = names if len(set(names)) == len(names) else urls
    return [(name, spec, network) for name, (spec, network) in zip(names, opened, strict=True)]


def spec_of(run: Run, vit: AnyNetwork, classes: Sequence[str] | None, url: str, name: str) -> NetworkSpec:
    """Return the description of a network of a run, at an address that any process can read."""
    return NetworkSpec(
        url=url,
        name=name,
        network=run.model.name,
        settings=_settings_of(vit.model),
        identity=identity_of(vit.state_dict()),
        classes=None if classes is None else tuple(classes),
        num_classes=vit.model.num_classes,
        features=vit.width,
        size=vit.model.image_shape,
        normalize=run.data.normalize,
        crop=run.data.eval_crop,
        precision="bf16" if run.compute.precision == "bf16" else "fp32",  # auto: of a run that has not ended
        tf32=run.compute.tf32,
        probability=probability_of(run),
        thresholds=run.thresholds,
        fold=run.data.fold and (run.data.train, run.data.fold),
    )


def open_network(spec: NetworkSpec) -> AnyNetwork:
    """Return the described network in evaluation mode; refuse other weights at its address."""
    # An actor on a cluster has neither the driver's environment nor its working folder.
    with tracking_env(spec.store) if spec.store else nullcontext():
        vit = open_weights(spec.url).vit
    if identity_of(vit.state_dict()) != spec.identity or _settings_of(vit.model) != spec.settings:
        raise ConfigError(f"{spec.url}: its weights or settings have changed since the command began; start it again")
    return vit.requires_grad_(False)


def _settings_of(model: Model) -> str:
    of_training = {"drop_path", "drop_path_draw", "drop_path_schedule", "dropout", "batch_momentum"}
    return model.model_dump_json(exclude=of_training | {"execution"})


def short_name(url: str) -> str:
    """Return the end of an address, with the folder above it where the end is only `model`."""
    if url.startswith("models:/"):
        return url.removeprefix("models:/").replace("/", "-").replace("@", "-")
    parts = [part for part in url.replace(":", "/").split("/") if part not in ("", ".", "..")]
    end = [part for part in parts if part != "model"][-1:] or parts[-1:] or ["model"]
    return end[0].removesuffix(".safetensors").removesuffix(".pth").removesuffix(".npz")
