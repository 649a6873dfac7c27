"""A network as files of timm, torchvision or Hugging Face: its tensors, and the program that loads them there."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from vitray.config import Model
from vitray.config.model_names import TORCHVISION, WIDTHS, is_torchvision, width_key
from vitray.errors import ConfigError
from vitray.models.network import AnyNetwork
from vitray.models.other_networks import constructor_settings
from vitray.models.sizes import inner_width
from vitray.models.stems import ChannelNorm
from vitray.models.vit import ViT
from vitray.weights.files import State, few
from vitray.weights.layouts import LAYOUTS, tensor_names

WEIGHTS, LOADER = "model.safetensors", "load.py"
_FOLDER = "pathlib.Path(__file__).parent"
# Predefined networks of timm and torchvision by width and patch size; the numbers are torchvision's depths.
_TIMM = {"ti_16": "tiny", "s_16": "small", "s_32": "small", "b_16": "base", "b_32": "base", "l_16": "large"}
_TORCHVISION = {"b_16": 12, "b_32": 12, "l_16": 24, "l_32": 24, "h_14": 32}


def export_weights(vit: AnyNetwork, layout: str) -> State:
    """Return the network's tensors with the names and shapes of timm, torchvision or hf."""
    if layout not in LIBRARIES:
        *first, last = LIBRARIES
        raise ConfigError(f"layout {layout!r}: expected {', '.join(first)} or {last}")
    library = LIBRARIES[layout]
    if not isinstance(vit, ViT):
        if layout != "torchvision" or vit.model.num_classes is None or not is_torchvision(vit.model.name):
            wanted = "expected layout torchvision, and a network of torchvision with a head"
            raise ConfigError(f"{vit.model.name}: an export for {layout} has no such network; {wanted}")
        return {name.removeprefix("body."): tensor.detach() for name, tensor in vit.state_dict().items()}
    model = vit.model
    if fault := _fault(model, layout) or library.fault(model):
        raise ConfigError(f"{model.name}: {fault}")
    target = LAYOUTS[library.layout(model)]
    exported: State = {}
    unmapped = []
    for key, tensor in vit.state_dict().items():
        if library.stem and key.startswith("stem.proj.") and not model.shape.traits.is_single_layer:
            exported[key.replace("stem.proj", library.stem)] = tensor.detach()
            continue
        names = tensor_names(target, key, model)
        if not names:
            unmapped.append(key)
            continue
        exported |= dict(zip(names, tensor.detach().chunk(len(names)), strict=True))
    if unmapped:
        raise ConfigError(f"{model.name}: the {layout} layout has no place for {few(unmapped)}")
    width, grid = model.shape.size, model.grid
    table = vit.positions.embedding(grid)
    table = vit.norm.weight.new_zeros(grid[0] * grid[1], width) if table is None else table.detach()
    # These libraries also add a position to each token before the patches; ours is part of the token.
    table = torch.cat([table.new_zeros(model.num_prefix, width), table])
    for name, token in (("class_token", vit.class_token), ("distillation_token", vit.distillation_token)):
        if token is not None:
            exported[target.names[name]] = token.detach().reshape(1, 1, width)
    exported[target.names["positions"]] = table[None]
    return {key: tensor.contiguous() for key, tensor in exported.items()}


def _fault(model: Model, layout: str) -> str | None:
    """The first setting whose function no library can compute, even if the tensors fit."""
    is_added = model.positions.kind in ("learned", "learned2d", "sincos2d", "none")
    variants = {
        f"{model.positions.kind} positions": not is_added,
        "positions before every level": getattr(model.positions, "where", "stem") != "stem",
        f"{model.attention} attention": model.attention != "global",
        "registers": model.registers > 0,
        "qk_norm": model.qk_norm,
        f"norm {model.norm}": model.norm != "layernorm",
        f"activation {model.activation}": model.activation == "swiglu",
        "network without biases": not model.bias,
        "adapters": bool(model.adapters),
    }
    variant = next((variant for variant, is_set in variants.items() if is_set), None)
    return variant and f"an export for {layout} has no {variant}"


def _timm_fault(model: Model) -> str | None:
    if model.num_classes and model.head.kind == "mlp":
        return "timm has no head of two layers"
    return None if "timm" in model.shape.traits.libraries else f"an export for timm has no stem {model.shape.stem}"


def _hf_fault(model: Model, layout: str = "hf") -> str | None:
    if model.num_classes and model.head.kind == "mlp" and model.distillation_token:
        return f"{layout} has no head of two layers"
    if model.pool != "token":
        return f"{layout} reads the class token, and this model's pool is {model.pool}"
    if layout not in model.shape.traits.libraries:
        return f"{layout} has no stem {model.shape.stem}"
    if model.shape.branches > 1:
        return f"{layout} has no parallel branches, and this model has {model.shape.branches}"
    return f"{layout} has no LayerScale" if model.layerscale is not None else None


def _torchvision_fault(model: Model) -> str | None:
    if fault := _hf_fault(model, "torchvision"):
        return fault
    if model.distillation_token:
        return "torchvision has no distillation token"
    if model.activation != "gelu":
        return f"torchvision computes the exact gelu, and this model {model.activation}"
    if model.num_classes is None:
        return "torchvision has no network without a head"
    height, width = model.image_shape
    return None if height == width else f"torchvision reads square images, and this model {height} x {width}"


def write_library(vit: AnyNetwork, layout: str, folder: Path, classes: Sequence[str] | None = None) -> None:
    """Write a network for another library: model.safetensors, load.py, and for hf a config.json.

    load.py needs that library only. It builds the network, loads the tensors strictly and names it `model`.
    """
    save_file(export_weights(vit, layout), folder / WEIGHTS, metadata={"format": "pt"})
    library = LIBRARIES[layout]
    for name, content in library.files(vit, classes).items():
        (folder / name).write_text(content)
    (folder / LOADER).write_text(library.program(vit))


# ---- the program that loads an export --------------------------------------------------------------------------------


def _program(library: str, network: str) -> str:
    """Return the program of a library whose networks load a dictionary of tensors."""
    load = f"model.load_state_dict(safetensors.torch.load_file({_FOLDER} / {WEIGHTS!r}))"
    imports = f"import functools, pathlib, safetensors.torch, torch, {library}"
    return f"{imports}\nmodel = {network}\n{load}\nmodel.eval()\n"


def _timm_program(vit: AnyNetwork) -> str:
    assert isinstance(vit, ViT), "timm has no other networks"
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
        "mlp_ratio": model.ffn_ratio,
        "act_layer": model.activation,
    }
    # timm has few names, but any of them will do, because all arguments are stated.
    width, patch = _TIMM.get(_kind(model), "base"), shape.patch if _kind(model) in _TIMM else 16
    block = "timm.models.vision_transformer.ParallelThingsBlock"
    code = {name: repr(value) for name, value in arguments.items()}
    code["norm_layer"] = f"functools.partial(timm.layers.LayerNorm, eps={model.norm_eps!r})"
    if shape.branches > 1:
        code["block_fn"] = f"functools.partial({block}, num_parallel={shape.branches})"
    if not shape.traits.is_single_layer:
        layers = ", ".join(_layer_code(layer) for layer in vit.stem.proj)
        code["patch_size"] = "1"
        code["embed_layer"] = f"functools.partial(timm.layers.HybridEmbed, torch.nn.Sequential({layers}), proj=False)"
    name = "deit_base_distilled_patch16_224" if model.distillation_token else f"vit_{width}_patch{patch}_224"
    return _program("timm", f"timm.create_model('{name}', {_listed(code)})")


def _kind(model: Model) -> str:
    """The width and the patch of a network, as in b_16."""
    return f"{width_key(model.shape.size)}_{model.shape.patch}"


def _layer_code(layer: nn.Module) -> str:
    match layer:
        case nn.Conv2d():
            sizes = (layer.in_channels, layer.out_channels, layer.kernel_size[0], layer.stride[0], layer.padding[0])
            return f"torch.nn.Conv2d{sizes!r}"
        case nn.MaxPool2d():
            return f"torch.nn.MaxPool2d({layer.kernel_size!r})"
        case nn.BatchNorm2d():
            return f"torch.nn.BatchNorm2d({layer.num_features}, eps={layer.eps!r})"
        case ChannelNorm():
            return f"timm.layers.LayerNorm2d({layer.normalized_shape[0]}, eps={layer.eps!r})"
        case _:
            return "torch.nn.GELU()"


def _torchvision_program(vit: AnyNetwork) -> str:
    model = vit.model
    if isinstance(vit, ViT):
        return _program("torchvision", _torchvision_code(model))
    arguments = {"weights": None, "num_classes": model.num_classes, **constructor_settings(model)}
    listed = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return _program("torchvision", f"torchvision.models.get_model({model.name.removeprefix(TORCHVISION)!r}, {listed})")


def _torchvision_code(model: Model) -> str:
    arguments = {
        "image_size": model.image_shape[0],
        "patch_size": model.shape.patch,
        "num_layers": model.shape.depth,
        "num_heads": model.num_heads,
        "hidden_dim": model.shape.size,
        "mlp_dim": inner_width(model),
        "num_classes": model.num_classes,
        "representation_size": (model.head.hidden or model.shape.size) if model.head.kind == "mlp" else None,
    }
    code = {name: repr(value) for name, value in arguments.items()}
    code["norm_layer"] = f"functools.partial(torch.nn.LayerNorm, eps={model.norm_eps!r})"
    kind, shape = _kind(model), model.shape
    has_usual_sizes = model.ffn_ratio is None and model.num_heads == WIDTHS[kind.partition("_")[0]].heads
    if _TORCHVISION.get(kind) == shape.depth and has_usual_sizes:
        for fixed in ("patch_size", "num_layers", "num_heads", "hidden_dim", "mlp_dim"):
            del code[fixed]
        return f"torchvision.models.vit_{kind}({_listed(code)})"
    return f"torchvision.models.VisionTransformer({_listed(code)})"


def _listed(code: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in code.items() if value != "None")


def _hf_class(model: Model) -> str:
    return "DeiTForImageClassificationWithTeacher" if model.distillation_token else "ViTForImageClassification"


def _hf_program(vit: AnyNetwork) -> str:
    build = f"model = transformers.{_hf_class(vit.model)}.from_pretrained({_FOLDER})"
    return f"import pathlib, transformers\n{build}\n"


def _hf_files(vit: AnyNetwork, classes: Sequence[str] | None) -> dict[str, str]:
    model = vit.model
    names = classes or [f"class {index}" for index in range(model.num_classes or 0)]
    config = {
        "architectures": [_hf_class(model)],
        "model_type": "deit" if model.distillation_token else "vit",
        "hidden_size": model.shape.size,
        "num_hidden_layers": model.shape.depth,
        "num_attention_heads": model.num_heads,
        "intermediate_size": inner_width(model),
        "hidden_act": "gelu_pytorch_tanh" if model.activation == "gelu_tanh" else "gelu",
        "layer_norm_eps": model.norm_eps,
        "image_size": model.image_size,
        "patch_size": model.shape.patch,
        "qkv_bias": True,
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }
    return {"config.json": json.dumps(config, indent=2)}


# ---- the rows --------------------------------------------------------------------------------------------------------


class Library(NamedTuple):
    """How a library holds a network."""

    layout: Callable[[Model], str]
    """The name among `LAYOUTS` of the layout of a network."""
    fault: Callable[[Model], str | None]
    """The first setting whose function it cannot compute, besides those that no library can."""
    program: Callable[[AnyNetwork], str]
    """Python that builds the network there and loads its tensors."""
    files: Callable[[AnyNetwork, Sequence[str] | None], dict[str, str]] = lambda _vit, _classes: {}
    """The content of further files by name, from the network and its classes."""
    stem: str = ""
    """Its name of a stem of several layers."""


LIBRARIES = {
    "timm": Library(
        lambda model: "timm_parallel" if model.shape.branches > 1 else "timm",
        _timm_fault,
        _timm_program,
        stem="patch_embed.backbone",
    ),
    "torchvision": Library(lambda _: "torchvision", _torchvision_fault, _torchvision_program),
    "hf": Library(
        lambda model: "hf_distilled" if model.distillation_token else "hf", _hf_fault, _hf_program, _hf_files
    ),
}
