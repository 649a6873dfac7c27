"""A model folder: model.safetensors + run.yaml + classes.json, at a path or on S3. No pickle, so no code."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vitray import storage
from vitray.config import ConfigError, Run, load_run
from vitray.model.vit import ViT
from vitray.weights.convert import import_weights

WEIGHTS, CLASSES, RUN = "model.safetensors", "classes.json", "run.yaml"


class Loaded(NamedTuple):
    """What a model folder holds."""

    run: Run
    vit: ViT
    classes: list[str] | None


def save_model(url: str, run: Run, vit: ViT, classes: Sequence[str] | None = None) -> None:
    """Write a model folder; `run.yaml` comes last, and without it there is no model."""
    if storage.exists(storage.join(url, RUN)):
        raise ConfigError(f"{url}: a model is there already; wanted a new folder")
    if classes is not None and len(classes) != run.model.num_classes:
        raise ConfigError(f"{url}: got {len(classes)} class names for {run.model.num_classes} classes")
    with tempfile.TemporaryDirectory(prefix="vitray-") as folder:
        save_file({key: tensor.contiguous() for key, tensor in vit.state_dict().items()}, Path(folder) / WEIGHTS)
        storage.upload(Path(folder) / WEIGHTS, storage.join(url, WEIGHTS))
    storage.write_bytes(storage.join(url, CLASSES), json.dumps(None if classes is None else list(classes)).encode())
    storage.write_bytes(
        storage.join(url, RUN), run.replace({"model": vit.model.model_dump(mode="json")}).to_yaml().encode()
    )


def load_model(url: str) -> Loaded:
    """Read a model folder; the network is in evaluation mode."""
    if not storage.exists(storage.join(url, RUN)):
        raise ConfigError(f"{url}: no {RUN}, so no model folder; wanted one written by vitray")
    with storage.local_copy(storage.join(url, RUN)) as path:
        run = load_run(path)
    vit = ViT(run.model)
    with storage.local_copy(storage.join(url, WEIGHTS)) as path:
        try:
            state = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{url}: {WEIGHTS} cannot be read: {error}") from None
    _check_fit(url, vit, state)
    vit.load_state_dict(state, assign=True)
    return Loaded(run, vit.eval(), json.loads(storage.read_bytes(storage.join(url, CLASSES))))


def open_weights(url: str, settings: Mapping[str, Any] | None = None) -> Loaded:
    """What is at an address: a model folder, or a weights file of another library."""
    if storage.exists(storage.join(url, RUN)):
        if settings:
            raise ConfigError(f"{url}: a model folder says its own settings; got {', '.join(settings)}, wanted none")
        return load_model(url)
    run, vit = import_weights(url, settings=settings)
    return Loaded(run, vit, None)


def _check_fit(url: str, vit: ViT, state: dict[str, torch.Tensor]) -> None:
    wanted = vit.state_dict()
    wrong = [f"{key} is missing" for key in wanted.keys() - state.keys()]
    wrong += [f"{key} has no place" for key in state.keys() - wanted.keys()]
    wrong += [
        f"{key} is {tuple(state[key].shape)}, wanted {tuple(wanted[key].shape)}"
        for key in wanted.keys() & state.keys()
        if state[key].shape != wanted[key].shape
    ]
    if wrong:
        raise ConfigError(f"{url}: {WEIGHTS} does not fit {vit.model.name} of {RUN}: {'; '.join(sorted(wrong)[:6])}")
