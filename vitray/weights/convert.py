"""Import of other libraries' weights, exact to the last bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitray.config import Model, Run
from vitray.config.augmentation import Normalize
from vitray.config.model_names import axial_resnet, is_torchvision
from vitray.errors import ConfigError, nearest, one_line
from vitray.models.network import AnyNetwork
from vitray.models.other_networks import OtherNetwork
from vitray.models.vit import ViT
from vitray.weights.detect import detect_layout, settings_of
from vitray.weights.files import State, WeightsFile, few, read_weights
from vitray.weights.layouts import LAYOUTS, MINUS_ONE_TO_ONE, WeightLayout, tensor_names

NOT_WEIGHTS = "num_batches_tracked"


def import_weights(
    url: str,
    layout: str | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    fallback: Mapping[str, Any] | None = None,
) -> tuple[Run, AnyNetwork]:
    """Return a run with the settings of another library's weights file (.safetensors, .pth, .npz), and its network.

    Without `layout`, the tensor names decide. `settings` gives `model.` settings that the file does not show, such as
    heads, or the image_size of a grid that is not square; its `normalize` is the setting `data.normalize`. `fallback`
    gives settings that count only where they would otherwise be missing. A file of one of torchvision's networks needs
    its `name`, as in torchvision/resnet50.
    """
    file, given = read_weights(url), {**(fallback or {}), **(settings or {})}
    name = str(given.get("name", ""))
    if axial_resnet(name):
        raise ConfigError(f"{url}: weights files of {name} are not read; expected a model folder written by vitray")
    if is_torchvision(name):
        return _torchvision(file.tensors, given, url)
    return _vit(file, layout, url, settings or {}, fallback or {})


def import_state(url: str) -> State:
    """Return the tensors of another library's weights file under our names, even without some settings."""
    return _vit(read_weights(url), None, url, {}, None)[1].state_dict()


def _vit(
    file: WeightsFile, layout: str | None, url: str, given: Mapping[str, Any], fallback: Mapping[str, Any] | None
) -> tuple[Run, ViT]:
    layout = layout or detect_layout(file.tensors, url)
    if layout not in LAYOUTS:
        raise ConfigError(f"layout {layout!r}: expected one of {', '.join(LAYOUTS)}{nearest(layout, LAYOUTS)}")
    try:
        run = _run_of(settings_of(file, layout, url, given, fallback))
        vit = ViT(run.model)
        vit.load_state_dict(_renamed(file.tensors, LAYOUTS[layout], vit, url), assign=True)
    except (IndexError, TypeError, RuntimeError) as error:  # of tensors with too few or too many dimensions
        raise ConfigError(f"{url}: its tensors do not fit together: {one_line(error)[:300]}") from None
    return run, vit.eval()


def _run_of(settings: Mapping[str, Any]) -> Run:
    sections = {"normalize": "data"}
    return Run().replace({f"{sections.get(name, 'model')}.{name}": value for name, value in settings.items()})


# Networks whose published weights read colors from -1 to 1. In torchvision, the first two convert images normalized as
# ImageNet's to that range (transform_input); here they do not.
_MINUS_ONE_TO_ONE = ("torchvision/googlenet", "torchvision/inception_v3", "torchvision/efficientnet_v2_l")
# Heads that help in training alone; vitray builds the networks without them.
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")


def published_normalize(name: str) -> Normalize:
    """Return the normalization of torchvision's published weights of a network."""
    return MINUS_ONE_TO_ONE if name in _MINUS_ONE_TO_ONE else Normalize()


def _torchvision(state: State, settings: dict[str, Any], url: str) -> tuple[Run, AnyNetwork]:
    with torch.device("meta"):
        head = OtherNetwork(Model(name=settings["name"], num_classes=1)).head_name
    ours = {f"body.{name}": tensor for name, tensor in state.items() if not name.startswith(_AUXILIARY)}
    classes = ours.get(f"{head}weight")
    settings = {name: settings[name] for name in ("name", "image_size", "normalize") if name in settings}
    usual = published_normalize(settings["name"]).model_dump(mode="json")
    run = _run_of({"normalize": usual} | settings | {"num_classes": None if classes is None else len(classes)})
    network = OtherNetwork(run.model)
    wanted = network.state_dict()
    wrong = [f"{name} is missing" for name in wanted.keys() - ours.keys() if not name.endswith(NOT_WEIGHTS)]
    wrong += [f"{name} has no place here" for name in ours.keys() - wanted.keys()]
    for name in wanted.keys() & ours.keys():
        if ours[name].shape != wanted[name].shape:
            wrong.append(f"{name} is {tuple(ours[name].shape)}, expected {tuple(wanted[name].shape)}")
    if wrong:
        raise ConfigError(f"{url}: read as {run.model.name}, but {few(sorted(wrong), '; ')}")
    network.load_state_dict(wanted | ours)
    return run, network.eval()


def _renamed(state: State, layout: WeightLayout, vit: ViT, url: str) -> State:
    """The tensors under our names; an error lists tensors that are missing, left over or misshapen."""
    unused = {key for key in state if not key.endswith(NOT_WEIGHTS)}
    wrong: list[str] = []
    ours: State = {}
    for key, wanted in vit.state_dict().items():
        if key.endswith(NOT_WEIGHTS):
            ours[key] = wanted
            continue
        names = tensor_names(layout, key, vit.model)
        parts = [state[name] for name in names if name in state]
        unused -= set(names)
        if len(parts) < max(len(names), 1):
            wrong.append(f"{key} is missing{f' ({names[0]})' if names else ''}")
            continue
        tensor = torch.cat([_from_flax(part, name) for part, name in zip(parts, names, strict=True)])
        if key in ("class_token", "distillation_token"):
            tensor = tensor.flatten()
        elif key == "registers":
            tensor = tensor.reshape(-1, vit.model.shape.size)
        elif key == "positions.table":
            tensor = tensor.flatten(0, -2)
        ours[key] = tensor
    _fold_prefix_slots(ours, vit)
    for key, tensor in ours.items():
        if tensor.shape != (wanted := vit.state_dict()[key]).shape:
            wrong.append(f"{key} is {tuple(tensor.shape)}, expected {tuple(wanted.shape)}")
        elif tensor.is_floating_point() != wanted.is_floating_point():
            wrong.append(f"{key} is {tensor.dtype}, expected {wanted.dtype}")
    wrong += [f"{key} has no place here" for key in sorted(unused)]
    if wrong:
        raise ConfigError(f"{url}: read as {vit.model.name}, but {few(wrong, '; ')}")
    return {key: tensor.contiguous() for key, tensor in ours.items()}


def _from_flax(tensor: Tensor, name: str) -> Tensor:
    """The tensor in torch's shape.

    Flax stores a product as (in, out), a convolution as (rows, columns, in, out), and attention heads separately.
    """
    if "/" not in name:
        return tensor
    if name.endswith(("/bias", "/scale")):
        return tensor.flatten()
    if name.endswith("/kernel"):
        if tensor.ndim == 4:
            return tensor.permute(3, 2, 0, 1)
        return (tensor.flatten(0, -2) if "/out/" in name else tensor.flatten(1)).T
    return tensor


def _fold_prefix_slots(ours: State, vit: ViT) -> None:
    """Add the positions of class token and registers, which some tables begin with, to the tokens themselves."""
    table, (rows, columns) = ours.get("positions.table"), vit.model.grid
    prefix = [name for name in ("class_token", "distillation_token", "registers") if name in ours]
    if table is None or not prefix or len(table) != rows * columns + vit.num_prefix:
        return
    ours["positions.table"], start = table[vit.num_prefix :], 0
    for name in prefix:
        slots = table[start : start + ours[name].numel() // table.shape[1]]
        ours[name], start = ours[name] + slots.reshape(ours[name].shape), start + len(slots)
