"""Export of a network to timm, torchvision or Hugging Face: its tensors, and the code that loads them there."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from vitray import storage
from vitray.config import Model
from vitray.errors import ConfigError
from vitray.models.stems import ChannelNorm
from vitray.models.vit import ViT
from vitray.storage import scratch_folder
from vitray.weights.files import State, few
from vitray.weights.layouts import LAYOUTS, tensor_names

EXPORTS = ("timm", "torchvision", "hf")


def export_weights(vit: ViT, layout: str) -> State:
    """Return the network's tensors with the names and shapes of timm, torchvision or hf."""
    if layout not in EXPORTS:
        raise ConfigError(f"layout {layout!r}: wanted timm, torchvision or hf")
    model, branches = vit.model, vit.model.shape.branches
    if fault := _fault(model, layout):
        raise ConfigError(f"{model.name}: {fault}")
    target = LAYOUTS["timm_parallel" if layout == "timm" and branches > 1 else layout]
    exported: State = {}
    unmapped = []
    for key, tensor in vit.state_dict().items():
        if layout == "timm" and key.startswith("stem.proj.") and model.shape.stem != "linear":
            exported[key.replace("stem.proj.", "patch_embed.backbone.")] = tensor.detach()
            continue
        names = tensor_names(target, key, model)
        if not names or (layout != "timm" and branches > 1):
            unmapped.append(key)
            continue
        exported |= dict(zip(names, tensor.detach().chunk(len(names)), strict=True))
    if unmapped:
        raise ConfigError(f"{model.name}: the {layout} layout has no place for {few(unmapped)}")
    width, grid = model.shape.size, model.grid
    table = vit.positions.embedding(grid)
    table = vit.norm.weight.new_zeros(grid[0] * grid[1], width) if table is None else table.detach()
    if vit.class_token is not None:
        # These libraries also add a position to the class token; ours is part of the token.
        table = torch.cat([table.new_zeros(1, width), table])
        exported[target.names["class_token"]] = vit.class_token.detach().reshape(1, 1, width)
    exported[target.names["positions"]] = table[None]
    return {key: tensor.contiguous() for key, tensor in exported.items()}


def _fault(model: Model, layout: str) -> str | None:
    """The first setting whose function a library cannot compute, even if the tensors fit."""
    if variant := _variant(model):
        return f"an export for {layout} has no {variant}"
    if layout == "timm":
        return f"{layout} has no head of two layers" if model.num_classes and model.head.kind == "mlp" else None
    if model.pool != "token":
        return f"{layout} reads the class token, and this model's pool is {model.pool}"
    if model.shape.stem != "linear":
        return f"{layout} has no stem {model.shape.stem}"
    if layout == "hf":
        return None
    if model.activation != "gelu":
        return f"{layout} computes the exact gelu, and this model {model.activation}"
    if model.num_classes is None:
        return f"{layout} has no network without a head"
    height, width = model.image_shape
    return None if height == width else f"{layout} reads square images, and this model {height} x {width}"


def _variant(model: Model) -> str | None:
    """The first setting that only our own model folders keep."""
    is_added = model.positions.kind in ("learned", "learned2d", "sincos2d", "none")
    variants = {
        f"{model.positions.kind} positions": not is_added,
        "positions before every level": getattr(model.positions, "where", "stem") != "stem",
        "registers": model.registers > 0,
        "qk_norm": model.qk_norm,
        f"norm {model.norm}": model.norm != "layernorm",
        f"activation {model.activation}": model.activation == "swiglu",
        "network without biases": not model.bias,
    }
    return next((variant for variant, is_set in variants.items() if is_set), None)


def write_export(vit: ViT, layout: str, url: str, classes: Sequence[str] | None = None) -> str:
    """Write the network for another library and return the code that loads it; hf gets a folder with a config.json."""
    exported = export_weights(vit, layout)
    target = storage.join(url, "model.safetensors") if layout == "hf" else url
    with scratch_folder() as folder:
        save_file(exported, folder / "model.safetensors", metadata={"format": "pt"})
        storage.upload(folder / "model.safetensors", target)
    if layout == "hf":
        storage.write_bytes(storage.join(url, "config.json"), json.dumps(_hf_config(vit, classes), indent=2).encode())
    return _code(vit, layout, url)


# ---- the code that loads an export -----------------------------------------------------------------------------------


def _code(vit: ViT, layout: str, url: str) -> str:
    """Python that builds the network in its library and loads the tensors, as `model`."""
    if "://" in url:
        url = url.rstrip("/").rpartition("/")[2]  # the libraries read local files, so a downloaded copy
    match layout:
        case "hf":
            build = f"model = transformers.ViTForImageClassification.from_pretrained({url!r})"
            return f"import transformers\n{build}"
        case "timm":
            library, build = "timm.layers, timm.models.vision_transformer", _timm_code(vit)
        case _:
            library, build = "torchvision", _torchvision_code(vit.model)
    load = f"model.load_state_dict(safetensors.torch.load_file({url!r}))"
    return f"import functools, safetensors.torch, torch, {library}\nmodel = {build}\n{load}\nmodel.eval()"


def _timm_code(vit: ViT) -> str:
    model, shape = vit.model, vit.model.shape
    arguments = {
        "img_size": model.image_shape,
        "patch_size": shape.patch,
        "embed_dim": shape.size,
        "depth": shape.depth,
        "num_heads": model.num_heads,
        "num_classes": model.num_classes or 0,
        "class_token": model.class_token,
        "global_pool": "token" if model.pool == "token" else "avg",
        "fc_norm": model.pool == "mean_then_norm",
        "init_values": model.layerscale,
        "act_layer": model.activation,
    }
    block = "timm.models.vision_transformer.ParallelThingsBlock"
    code = {name: repr(value) for name, value in arguments.items()}
    code["norm_layer"] = f"functools.partial(timm.layers.LayerNorm, eps={model.norm_eps!r})"
    if shape.branches > 1:
        code["block_fn"] = f"functools.partial({block}, num_parallel={shape.branches})"
    if shape.stem != "linear":
        layers = ", ".join(_layer_code(layer) for layer in vit.stem.proj)
        code["patch_size"] = "1"
        code["embed_layer"] = f"functools.partial(timm.layers.HybridEmbed, torch.nn.Sequential({layers}), proj=False)"
    return f"timm.models.vision_transformer.VisionTransformer({_listed(code)})"


def _layer_code(layer: nn.Module) -> str:
    match layer:
        case nn.Conv2d():
            sizes = (layer.in_channels, layer.out_channels, layer.kernel_size[0], layer.stride[0], layer.padding[0])
            return f"torch.nn.Conv2d{sizes!r}"
        case nn.BatchNorm2d():
            return f"torch.nn.BatchNorm2d({layer.num_features}, eps={layer.eps!r})"
        case ChannelNorm():
            return f"timm.layers.LayerNorm2d({layer.normalized_shape[0]}, eps={layer.eps!r})"
        case _:
            return "torch.nn.GELU()"


def _torchvision_code(model: Model) -> str:
    arguments = {
        "image_size": model.image_shape[0],
        "patch_size": model.shape.patch,
        "num_layers": model.shape.depth,
        "num_heads": model.num_heads,
        "hidden_dim": model.shape.size,
        "mlp_dim": 4 * model.shape.size,
        "num_classes": model.num_classes,
        "representation_size": (model.head.hidden or model.shape.size) if model.head.kind == "mlp" else None,
    }
    code = {name: repr(value) for name, value in arguments.items()}
    code["norm_layer"] = f"functools.partial(torch.nn.LayerNorm, eps={model.norm_eps!r})"
    return f"torchvision.models.VisionTransformer({_listed(code)})"


def _listed(code: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in code.items() if value != "None")


def _hf_config(vit: ViT, classes: Sequence[str] | None) -> dict[str, Any]:
    model = vit.model
    names = classes or [f"class {index}" for index in range(model.num_classes or 0)]
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": model.shape.size,
        "num_hidden_layers": model.shape.depth,
        "num_attention_heads": model.num_heads,
        "intermediate_size": 4 * model.shape.size,
        "hidden_act": "gelu_pytorch_tanh" if model.activation == "gelu_tanh" else "gelu",
        "layer_norm_eps": model.norm_eps,
        "image_size": model.image_size,
        "patch_size": model.shape.patch,
        "qkv_bias": True,
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }
