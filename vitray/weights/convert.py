"""Import and export of other libraries' weights, exact to the last bit."""

import json
import math
import pickle
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
from vitray.config import Run
from vitray.config.model_names import WIDTHS
from vitray.errors import ConfigError, nearest
from vitray.models.vit import ViT
from vitray.weights.layouts import LAYOUTS, WeightLayout, tensor_names

State = dict[str, Tensor]
# Training scripts save {"model": ...}; flax prefixes names with the path of the tree.
WRAPPERS = ("model", "state_dict")
PREFIXES = ("opt/target/", "params/img/", "params/", "module.")
NOT_WEIGHTS = "num_batches_tracked"


def import_weights(url: str, layout: str | None = None, settings: Mapping[str, Any] | None = None) -> tuple[Run, ViT]:
    """Return the network in another library's weights file (.safetensors, .pth, .npz), and a run with its settings.

    Without `layout`, the tensor names decide. `settings` are `model.` settings that do not follow from names and
    shapes, such as the image_size of a grid that is not square.
    """
    state = read_tensors(url)
    layout = layout or detect_layout(state, url)
    if layout not in LAYOUTS:
        raise ConfigError(f"layout {layout!r}: wanted one of {', '.join(LAYOUTS)}{nearest(layout, LAYOUTS)}")
    inferred = infer_settings(state, LAYOUTS[layout], url) | dict(settings or {})
    run = Run().replace({f"model.{setting}": value for setting, value in inferred.items()})
    vit = ViT(run.model)
    vit.load_state_dict(_renamed(state, LAYOUTS[layout], vit, url), assign=True)
    return run, vit.eval()


def export_weights(vit: ViT, layout: str) -> State:
    """Return the network's tensors with the names and shapes of timm, torchvision or hf."""
    if layout not in ("timm", "torchvision", "hf"):
        raise ConfigError(f"layout {layout!r}: wanted timm, torchvision or hf")
    # Settings whose function a library cannot compute, even if the tensors fit.
    model, branches = vit.model, vit.model.shape.branches
    if layout in ("torchvision", "hf") and model.pool != "token":
        raise ConfigError(f"{model.name}: {layout} reads the class token, and this model's pool is {model.pool}")
    if layout == "torchvision" and model.activation != "gelu":
        raise ConfigError(f"{model.name}: {layout} computes the exact gelu, and this model {model.activation}")
    target = LAYOUTS["timm_parallel" if layout == "timm" and branches > 1 else layout]
    exported: State = {}
    unmapped = []
    for key, tensor in vit.state_dict().items():
        names = tensor_names(target, key, model)
        if not names or (layout != "timm" and branches > 1):
            unmapped.append(key)
            continue
        exported |= dict(zip(names, tensor.detach().chunk(len(names)), strict=True))
    if unmapped:
        raise ConfigError(f"{model.name}: the {layout} layout has no place for {_few(unmapped)}")
    width, grid = model.shape.size, model.grid
    table = getattr(vit.positions, "table", vit.norm.weight.new_zeros(grid[0] * grid[1], width)).detach()
    if vit.class_token is not None:
        # These libraries also add a position to the class token; ours is part of the token.
        table = torch.cat([table.new_zeros(1, width), table])
        exported[target.names["class_token"]] = vit.class_token.detach().reshape(1, 1, width)
    exported[target.names["positions"]] = table[None]
    return {key: tensor.contiguous() for key, tensor in exported.items()}


def write_export(vit: ViT, layout: str, url: str, classes: Sequence[str] | None = None) -> str:
    """Write the network for another library and return the code that loads it; hf gets a folder with a config.json."""
    exported = export_weights(vit, layout)
    target = storage.join(url, "model.safetensors") if layout == "hf" else url
    with tempfile.TemporaryDirectory(prefix="vitray-") as folder:
        save_file(exported, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        storage.upload(Path(folder) / "model.safetensors", target)
    if layout == "hf":
        storage.write_bytes(storage.join(url, "config.json"), json.dumps(_hf_config(vit, classes), indent=2).encode())
        return f"transformers.ViTForImageClassification.from_pretrained({url!r})"
    settings = f"pool {vit.model.pool}, {vit.model.activation}, norm eps {vit.model.norm_eps:g}"
    return f"model.load_state_dict(safetensors.torch.load_file({url!r})), the model built there with {settings}"


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
    """Return the tensors of a weights file by name; reading cannot run code."""
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
    except pickle.UnpicklingError:
        raise ValueError(
            f"it holds {_unsafe_names(path)}, which only running code could load; save its tensors alone"
        ) from None
    except Exception as error:  # unreadable bytes raise almost anything
        raise ValueError(str(error)) from None
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not tensors by name")
    return content


def _unsafe_names(path: Path) -> str:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except ValueError:  # the format before torch 1.6
        names = []
    return ", ".join(sorted(names)) or "more than tensors"


def _read_npz(path: Path) -> dict[str, Any]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {key: torch.from_numpy(np.asarray(arrays[key], dtype=np.float32)) for key in arrays.files}


_READERS = {".safetensors": load_file, ".npz": _read_npz}


# ---- settings from names and shapes ----------------------------------------------------------------------------------


def detect_layout(state: State, url: str) -> str:
    """Return the layout of a weights file."""
    if any(".attn1." in key or key.endswith("gamma_1") or ".proj.0." in key for key in state):
        return "deit"
    known = [name for name, layout in LAYOUTS.items() if layout.marker in state]
    if "timm" in known and Path(url).suffix in (".pth", ".pt"):
        # timm and DeiT share all names except LayerScale's; DeiT ships .pth files, timm ships safetensors.
        return "deit"
    if not known:
        raise ConfigError(f"{url}: a layout we do not know, with {_few(sorted(state))}; known: {', '.join(LAYOUTS)}")
    return known[0]


def infer_settings(state: State, layout: WeightLayout, url: str) -> dict[str, Any]:
    """Return the `model.` settings that follow from names and shapes."""
    names, weight = layout.names, layout.leaves[0]

    def first(part: str, level: int = 0, branch: int = 0) -> Tensor | None:
        tensors = layout.tensors(part, "weight", level, branch)
        return state.get(tensors[0]) if tensors else None

    def count(has: Any) -> int:
        return next(number for number in range(len(state) + 1) if not has(number))

    norm = first("norm") if first("pooled_norm") is None else first("pooled_norm")
    depth = count(lambda level: first("attn.norm", level) is not None)
    has_branches = "{b}" in names["attn.norm"] or "{s}" in names["attn.norm"]
    branches = count(lambda branch: first("attn.norm", 0, branch) is not None) if has_branches else 1
    if norm is None or not depth:
        raise ConfigError(f"{url}: no {names['norm']} or no {names['attn.norm']} among {_few(sorted(state))}")
    width = next((key for key, value in WIDTHS.items() if value.size == norm.numel()), None)
    if width is None:
        raise ConfigError(
            f"{url}: width {norm.numel()} is none of {', '.join(f'{k} {w.size}' for k, w in WIDTHS.items())}"
        )
    stem, patch = _infer_stem(state, first("stem"), names["stem"], weight, url)
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
        settings["layerscale"] = 1e-4  # the file lacks the initial value; this is DeiT III's
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


def _infer_stem(state: State, linear: Tensor | None, name: str, weight: str, url: str) -> tuple[str, int]:
    """The kind of stem and the patch size."""
    if linear is not None and linear.ndim == 4:
        return "linear", linear.shape[0 if weight == "kernel" else 2]
    layers = [key for key in state if re.fullmatch(re.escape(name.removesuffix("{p}")) + r"\d+\.weight", key)]
    convolutions = [key for key in layers if state[key].ndim == 4]
    if not convolutions:
        raise ConfigError(f"{url}: no stem named {name.format(p=weight)} among {_few(sorted(state))}")
    normed = "bn" if any(key.endswith("running_mean") for key in state) else "ln"
    return f"hmlp_{normed}", 4 * 2 ** (len(convolutions) - 1)


# ---- renaming --------------------------------------------------------------------------------------------------------


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
        if key == "class_token":
            tensor = tensor.reshape(-1, vit.model.shape.size).squeeze(0)
        elif key == "positions.table":
            tensor = tensor.flatten(0, -2)
        ours[key] = tensor
    _fold_class_slot(ours, vit)
    for key, tensor in ours.items():
        if tensor.shape != (wanted := vit.state_dict()[key]).shape:
            wrong.append(f"{key} is {tuple(tensor.shape)}, wanted {tuple(wanted.shape)}")
    wrong += [f"{key} has no place here" for key in sorted(unused)]
    if wrong:
        raise ConfigError(f"{url}: read as {vit.model.name}, but {_few(wrong, '; ')}")
    return {key: tensor.float().contiguous() if tensor.is_floating_point() else tensor for key, tensor in ours.items()}


def _from_flax(tensor: Tensor, name: str) -> Tensor:
    """The tensor in torch's shape.

    Flax stores a product as (in, out), a convolution as (rows, columns, in, out), and attention heads separately.
    """
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
    """Add the position of the class token, which some tables begin with, to the token itself."""
    table, token = ours.get("positions.table"), ours.get("class_token")
    rows, columns = vit.model.grid
    if table is not None and token is not None and len(table) == rows * columns + 1:
        ours["class_token"], ours["positions.table"] = token + table[0], table[1:]


def _few(names: list[str], separator: str = ", ") -> str:
    return separator.join(names[:6]) + (f"{separator}and {len(names) - 6} more" if len(names) > 6 else "")
