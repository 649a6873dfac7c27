"""Weights of other libraries made ours, and ours made theirs, tensor for tensor and to the last bit."""

import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitray import storage
from vitray.config import Model, Run
from vitray.config.model_names import WIDTHS
from vitray.errors import ConfigError, nearest
from vitray.models.vit import ViT
from vitray.weights.layouts import LAYOUTS, Layout, names_in

State = dict[str, Tensor]
# What a tensor file may be wrapped in: training scripts save {"model": ...}, flax saves its tree's path.
WRAPPERS = ("model", "state_dict")
PREFIXES = ("opt/target/", "params/img/", "params/", "module.")
NOT_WEIGHTS = ("num_batches_tracked",)


def import_weights(url: str, layout: str | None = None, settings: Mapping[str, Any] | None = None) -> tuple[Run, ViT]:
    """The network in a weights file of another library (.safetensors, .pth, .npz), and the run that describes it.

    The layout is recognised by its tensors' names. `settings` are `model.` settings that names and shapes cannot show,
    such as the image_size of a grid that is not square.
    """
    state = read_tensors(url)
    layout = layout or recognise(state, url)
    if layout not in LAYOUTS:
        raise ConfigError(f"layout {layout!r}: wanted one of {', '.join(LAYOUTS)}{nearest(layout, LAYOUTS)}")
    found = describe(state, LAYOUTS[layout], url) | dict(settings or {})
    run = Run().replace({f"model.{setting}": value for setting, value in found.items()})
    vit = ViT(run.model)
    vit.load_state_dict(_ours(state, LAYOUTS[layout], vit, url), assign=True)
    return run, vit.eval()


def export_weights(vit: ViT, layout: str) -> State:
    """The network's tensors as another library names and shapes them: timm, torchvision or hf."""
    if layout not in ("timm", "torchvision", "hf"):
        raise ConfigError(f"layout {layout!r}: wanted timm, torchvision or hf")
    _check_computes_the_same(vit.model, layout)
    names = LAYOUTS["timm_parallel" if layout == "timm" and vit.model.shape.branches > 1 else layout]
    theirs: State = {}
    homeless = []
    for key, tensor in vit.state_dict().items():
        targets = names_in(names, key, vit.model)
        if not targets or (layout != "timm" and vit.model.shape.branches > 1):
            homeless.append(key)
            continue
        theirs |= dict(zip(targets, tensor.detach().chunk(len(targets)), strict=True))
    if homeless:
        raise ConfigError(f"{vit.model.name}: the {layout} layout has no place for {_few(homeless)}")
    width, grid = vit.model.shape.size, vit.model.grid
    table = getattr(vit.positions, "table", vit.norm.weight.new_zeros(grid[0] * grid[1], width)).detach()
    if vit.class_token is not None:
        # These libraries add a position to the class token as well; ours is part of the token.
        table = torch.cat([table.new_zeros(1, width), table])
        theirs[names.names["class_token"][0]] = vit.class_token.detach().reshape(1, 1, width)
    theirs[names.names["positions"][0]] = table[None]
    return {key: tensor.contiguous() for key, tensor in theirs.items()}


def _check_computes_the_same(model: Model, layout: str) -> None:
    """Tensors that fit are not enough: torchvision and Hugging Face fix what their networks compute."""
    if layout in ("torchvision", "hf") and model.pool != "token":
        raise ConfigError(f"{model.name}: {layout} reads the class token, and this model's pool is {model.pool}")
    if layout == "torchvision" and model.activation != "gelu":
        raise ConfigError(f"{model.name}: {layout} computes the exact gelu, and this model {model.activation}")


def write_export(vit: ViT, layout: str, url: str, classes: Sequence[str] | None = None) -> str:
    """Write the network for another library and say how to load it there; for hf, a folder with its config.json."""
    theirs = export_weights(vit, layout)
    target = storage.join(url, "model.safetensors") if layout == "hf" else url
    with tempfile.TemporaryDirectory(prefix="vitray-") as folder:
        save_file(theirs, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        storage.upload(Path(folder) / "model.safetensors", target)
    if layout == "hf":
        storage.write_bytes(storage.join(url, "config.json"), json.dumps(_hf_config(vit, classes), indent=2).encode())
        return f"transformers.ViTForImageClassification.from_pretrained({url!r})"
    built = f"pool {vit.model.pool}, {vit.model.activation}, norm eps {vit.model.norm_eps:g}"
    return f"model.load_state_dict(safetensors.torch.load_file({url!r})), the model built there with {built}"


def _hf_config(vit: ViT, classes: Sequence[str] | None) -> dict[str, Any]:
    model = vit.model
    names = classes or [f"class {index}" for index in range(model.num_classes or 0)]
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": model.shape.size,
        "num_hidden_layers": model.shape.depth,
        "num_attention_heads": model.shape.heads,
        "intermediate_size": 4 * model.shape.size,
        "hidden_act": "gelu_pytorch_tanh" if model.activation == "gelu_tanh" else "gelu",
        "layer_norm_eps": model.norm_eps,
        "image_size": model.image_size,
        "patch_size": model.shape.patch,
        "qkv_bias": True,
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_tensors(url: str) -> State:
    """The tensors of a weights file, by name; reading cannot run code."""
    if storage.exists(storage.join(url, "model.safetensors")):  # a folder, as Hugging Face writes it
        url = storage.join(url, "model.safetensors")
    with storage.local_copy(url) as path:
        try:
            content = _READERS.get(path.suffix, _read_pickle)(path)
        except (SafetensorError, BadZipFile, OSError, ValueError, RuntimeError, EOFError) as error:
            raise ConfigError(f"{url}: not a {path.suffix} weights file: {str(error).splitlines()[0]}") from None
    for wrapper in WRAPPERS:
        if isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    prefix = next((prefix for prefix in PREFIXES if all(key.startswith(prefix) for key in content)), "")
    state = {key.removeprefix(prefix): value for key, value in content.items() if isinstance(value, Tensor)}
    if not state:
        raise ConfigError(f"{url}: holds no tensors")
    return state


def _read_pickle(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if "weights_only" not in str(error).lower() and "Unsupported" not in str(error):
            raise ValueError(str(error)) from None
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"it holds {named[1] if named else 'more than tensors'}, which only running code could load; save its"
            " tensors alone"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not tensors by name")
    return content


def _read_npz(path: Path) -> dict[str, Any]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {key: torch.from_numpy(np.asarray(arrays[key], dtype=np.float32)) for key in arrays.files}


_READERS = {".safetensors": load_file, ".npz": _read_npz}


# ---- describing ------------------------------------------------------------------------------------------------------


def recognise(state: State, url: str) -> str:
    """The layout of a weights file."""
    if any(".attn1." in key or key.endswith("gamma_1") or ".proj.0." in key for key in state):
        return "deit"
    known = [name for name, layout in LAYOUTS.items() if layout.mark in state]
    if "timm" in known and Path(url).suffix in (".pth", ".pt"):
        # timm and DeiT share their names but for LayerScale; DeiT ships .pth files, timm ships safetensors.
        return "deit"
    if not known:
        raise ConfigError(f"{url}: a layout we do not know, with {_few(sorted(state))}; known: {', '.join(LAYOUTS)}")
    return known[0]


def describe(state: State, layout: Layout, url: str) -> dict[str, Any]:
    """The `model.` settings that names and shapes show."""
    names = layout.names
    weight, _, norm_weight = layout.words

    def first(part: str, level: int = 0, branch: int = 0) -> Tensor | None:
        suffix = str(branch or "")
        word = norm_weight if part.endswith("norm") else weight
        for name in names.get(part, ()):
            return state.get(name.format(i=level, b=branch, s=suffix, _s=suffix and f"_{suffix}", p=word))
        return None

    def count(has: Any) -> int:
        return next(number for number in range(len(state) + 1) if not has(number))

    norm = first("norm") if first("pooled_norm") is None else first("pooled_norm")
    depth = count(lambda level: first("attn.norm", level) is not None)
    spells_branches = "{b}" in names["attn.norm"][0] or "{s}" in names["attn.norm"][0]
    branches = count(lambda branch: first("attn.norm", 0, branch) is not None) if spells_branches else 1
    if norm is None or not depth:
        raise ConfigError(f"{url}: no {names['norm'][0]} or no {names['attn.norm'][0]} among {_few(sorted(state))}")
    width = next((key for key, value in WIDTHS.items() if value.size == norm.numel()), None)
    if width is None:
        raise ConfigError(
            f"{url}: width {norm.numel()} is none of {', '.join(f'{k} {w.size}' for k, w in WIDTHS.items())}"
        )
    stem, patch = _describe_stem(state, first("stem"), names["stem"][0], weight, url)
    has_token = first("class_token") is not None
    settings: dict[str, Any] = {
        "name": f"vit_{width}{depth}x{branches}_{patch}_{stem}",
        "class_token": has_token,
        "pool": "mean_then_norm" if first("pooled_norm") is not None else "token" if has_token else "mean",
        "activation": layout.activation,
        "norm_eps": layout.norm_eps,
        "positions": "none",
        "num_classes": None,
    }
    if first("attn.scale") is not None:
        settings["layerscale"] = 1e-4  # its initial value is not in the file; DeiT III's is said
    if (table := first("positions")) is not None:
        patches = table.shape[-2] if table.ndim > 1 else 0
        side = math.isqrt(patches)
        if has_token and side * side != patches:
            side = math.isqrt(patches - 1)
        settings |= {"positions": {"kind": "learned", "resample": layout.resample}, "image_size": side * patch}
    if (head := first("head")) is not None:
        settings["num_classes"] = head.shape[1 if weight == "kernel" else 0]
        if (hidden := first("hidden")) is not None:
            settings["head"] = {"kind": "mlp", "hidden": hidden.shape[1 if weight == "kernel" else 0]}
    return settings


def _describe_stem(state: State, linear: Tensor | None, name: str, weight: str, url: str) -> tuple[str, int]:
    """The stem and the patch."""
    if linear is not None and linear.ndim == 4:
        return "linear", linear.shape[0 if weight == "kernel" else 2]
    layers = [key for key in state if re.fullmatch(re.escape(name.removesuffix("{p}")) + r"\d+\.weight", key)]
    convolutions = [key for key in layers if state[key].ndim == 4]
    if not convolutions:
        raise ConfigError(f"{url}: no stem named {name.format(p=weight)} among {_few(sorted(state))}")
    normed = "bn" if any(key.endswith("running_mean") for key in state) else "ln"
    return f"hmlp_{normed}", 4 * 2 ** (len(convolutions) - 1)


# ---- fitting ---------------------------------------------------------------------------------------------------------


def _ours(state: State, layout: Layout, vit: ViT, url: str) -> State:
    """Their tensors under our names; refused with the tensors named unless every one has exactly one place."""
    unused = {key for key in state if not key.endswith(NOT_WEIGHTS)}
    wrong: list[str] = []
    ours: State = {}
    for key, wanted in vit.state_dict().items():
        if key.endswith(NOT_WEIGHTS):
            ours[key] = wanted
            continue
        names = names_in(layout, key, vit.model)
        found = [state[name] for name in names if name in state]
        unused -= set(names)
        if len(found) < max(len(names), 1):
            wrong.append(f"{key} is missing{f' ({names[0]})' if names else ''}")
            continue
        tensor = torch.cat([_as_ours(part, name) for part, name in zip(found, names, strict=True)])
        if key in ("class_token", "positions.table"):
            tensor = (
                tensor.reshape(-1, vit.model.shape.size).squeeze(0) if key == "class_token" else tensor.flatten(0, -2)
            )
        ours[key] = tensor
    _fold_class_slot(ours, vit)
    for key, tensor in ours.items():
        if tensor.shape != (wanted := vit.state_dict()[key]).shape:
            wrong.append(f"{key} is {tuple(tensor.shape)}, wanted {tuple(wanted.shape)}")
    wrong += [f"{key} has no place here" for key in sorted(unused)]
    if wrong:
        raise ConfigError(f"{url}: read as {vit.model.name}, but {_few(wrong, '; ')}")
    return {key: tensor.float().contiguous() if tensor.is_floating_point() else tensor for key, tensor in ours.items()}


def _as_ours(tensor: Tensor, name: str) -> Tensor:
    """Flax stores a product as (in, out), a convolution as (rows, columns, in, out), and attention heads apart."""
    if "/" not in name:
        return tensor
    if name.endswith("/bias"):
        return tensor.flatten()
    if name.endswith("/kernel"):
        if tensor.ndim == 4:
            return tensor.permute(3, 2, 0, 1)
        return (tensor.flatten(0, -2) if "/out/" in name else tensor.flatten(1)).T
    return tensor


def _fold_class_slot(ours: State, vit: ViT) -> None:
    """Some tables begin with a position for the class token: the same as a token that has it added."""
    table, token = ours.get("positions.table"), ours.get("class_token")
    rows, columns = vit.model.grid
    if table is not None and token is not None and len(table) == rows * columns + 1:
        ours["class_token"], ours["positions.table"] = token + table[0], table[1:]


def _few(names: list[str], separator: str = ", ") -> str:
    return separator.join(names[:6]) + (f"{separator}and {len(names) - 6} more" if len(names) > 6 else "")
