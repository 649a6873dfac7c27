"""Initial weights adapted to another image size and other classes."""

import json

import torch
from torch import Tensor, nn

from vitray.config import Learned, Model
from vitray.errors import ConfigError
from vitray.models.positions import resample
from vitray.models.vit import ViT, build_head
from vitray.weights.freezing import part_of

# Settings that define the function of a network. The others only affect execution or training, or are adapted.
FIXED = ("name", "class_token", "pool", "positions", "layerscale", "activation", "norm_eps")


def adapt(initial: ViT, model: Model, where: str, *, new_head: bool) -> dict[str, Tensor]:
    """Return the tensors of `initial` at the image size and with the classes of `model`.

    Positions are resized by the recorded convention of `initial`. `new_head` forces a new head even for an equal
    number of classes. A new head ends in a layer of zeros (ViT paper, B.1.1). `where` starts an error message.
    """
    if differences := [*_other_settings(initial.model, model), *_other_tensors(initial, model)]:
        raise ConfigError(f"{where}: not the network of this run: {'; '.join(differences)}")
    state = {name: tensor for name, tensor in initial.state_dict().items() if part_of(name) != "head"}
    if isinstance(initial.model.positions, Learned):
        convention = initial.model.positions.resample
        state["positions.table"] = resample(state["positions.table"], initial.positions.grid, model.grid, convention)
    head = build_head(model)
    if new_head or _shapes(head) != _shapes(initial.head):
        for tensor in [*head.parameters()][-2:]:
            nn.init.zeros_(tensor)
    else:
        head = initial.head
    return state | {f"head.{name}": tensor for name, tensor in head.state_dict().items()}


def _other_settings(old: Model, new: Model) -> list[str]:
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    for settings in (before, after):
        settings["positions"].pop("resample", None)
    if old.layerscale and new.layerscale:
        after["layerscale"] = old.layerscale  # the initial value has no effect on loaded weights
    return [
        f"model.{setting}: got {json.dumps(before[setting])}, wanted {json.dumps(after[setting])}"
        for setting in FIXED
        if before[setting] != after[setting]
    ]


def _other_tensors(initial: ViT, model: Model) -> list[str]:
    """The first few missing, additional or differently shaped tensors, without those that are adapted."""
    with torch.device("meta"):
        wanted = _shapes(ViT(model))
    got = _shapes(initial)
    names = [
        name
        for name in {**wanted, **got}
        if wanted.get(name) != got.get(name) and not name.startswith(("head.", "positions."))
    ]
    lines = [f"{name}: got {got.get(name, 'none')}, wanted {wanted.get(name, 'none')}" for name in names[:3]]
    return [*lines, f"and {len(names) - 3} tensors more"] if len(names) > 3 else lines


def _shapes(module: nn.Module) -> dict[str, str]:
    return {name: " x ".join(map(str, tensor.shape)) for name, tensor in module.state_dict().items()}
