"""The settings of another library's weights: from names, shapes, the name of the network, and the files beside them.

They are those of `model.`, and `normalize` of `data.`. A setting that decides the function of the network and appears
in none of these places is demanded, never assumed.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from vitray.config.model_names import RESNETS, WIDTHS, width_key, width_of
from vitray.config.parsing import short
from vitray.errors import ConfigError, printable
from vitray.weights.files import State, WeightsFile, few
from vitray.weights.layouts import LAYOUTS, WeightLayout, resnet_names

# Networks of timm, DeiT and MAE whose width and heads are those of the letter, and whose positions are learned.
_NETWORK = re.compile(
    r"(?:vit|deit3?|flexivit)_(tiny|small|medium|base|large|huge)(?:_distilled)?"
    r"(?:_patch\d+|_r\d*_s\d+(?:_p\d+)?)?(?:_\d+(?:x\d+)?|_LS)*"
)
# timm's networks whose rotary positions are `rope` here: the others mix axes, shift or scale the grid, or add a table.
_ROPE = re.compile(r"vit_(small|base|large)_patch16_rope_224(?:\..*)?")
_TORCHVISION = re.compile(r"vit_([blh])_\d+")
_LETTERS = {"tiny": "ti", "small": "s", "medium": "m", "base": "b", "large": "l", "huge": "h"}
# Hugging Face's names of the two activations.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Arguments of timm that are read here, or that do not change the function; any other is refused.
_TIMM_ARGUMENTS = {"img_size", "num_classes", "dynamic_img_size", "dynamic_img_pad", "num_heads", "global_pool"}
_DEMANDS = {
    "heads": "heads (attention heads; {usual})",
    "activation": "activation ({activations})",
    "norm_eps": "norm_eps (epsilon of the norms)",
    "positions": "positions ({positions})",
    "normalize": 'normalize (mean and std of the colors; "normalize={{}}" are those of ImageNet,'
    ' "normalize={{mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}}" those of Google)',
}


class Shapes(NamedTuple):
    """The facts in the tensors' names and shapes."""

    size: int
    depth: int
    branches: int
    patch: int
    stem: str
    heads: int | None
    """Attention heads; None in a file with fused heads."""
    has_table: bool
    """Whether the file has a table of positions."""
    is_gated: bool
    """Whether the feed-forwards have gates, of an unknown activation."""
    maybe_rope: bool
    """Whether a network with rope in its attention has the same names and shapes."""
    settings: dict[str, Any]
    """The other settings."""


def detect_layout(state: State, url: str) -> str:
    """Return the layout of a weights file."""
    if any(".attn1." in key or key.endswith("gamma_1") or ".proj.0." in key for key in state):
        return "deit"
    known = [name for name, layout in LAYOUTS.items() if layout.marker in state]
    if "timm" in known and Path(url).suffix in (".pth", ".pt"):
        # timm and DeiT share all names except LayerScale's; DeiT ships .pth files, timm ships safetensors.
        return "deit"
    if not known:
        other = "one of torchvision becomes a model folder by `vitray model FILE name=torchvision/... --save FOLDER`"
        layouts = f"known: {', '.join(LAYOUTS)}; {other}"
        raise ConfigError(f"{url}: {_kind_of(state)}, with {few(sorted(state))}; {layouts}")
    return known[0]


def _kind_of(state: State) -> str:
    """Return what can be said of tensors of no known layout."""
    if any("relative_position" in name for name in state):
        return "a network with relative positions, as Swin, and not a plain Vision Transformer"
    if any(values.ndim == 4 for values in state.values()) and not any("att" in name.lower() for name in state):
        return "a network without attention, and not a Vision Transformer"
    return "a layout we do not know"


def settings_of(
    file: WeightsFile, layout: str, url: str, given: Mapping[str, Any], fallback: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the settings of a weights file, completed by `given`.

    A needed setting that neither the file nor `given` has comes from `fallback`, or is an error. With `fallback` None
    it may be missing, which is enough to read the tensors.
    """
    shapes = _read_shapes(file.tensors, LAYOUTS[layout], url)
    stated = _stated_settings(file, layout, shapes, url) | ({"heads": shapes.heads} if shapes.heads else {})
    stated = {name: value for name, value in stated.items() if value is not None}
    for setting in sorted((stated.keys() & given.keys()) - {"image_size", "positions", "normalize"}):
        if stated[setting] != given[setting]:
            raise ConfigError(
                f"{url}: {setting}: got {given[setting]}, and the network of the file has {stated[setting]}"
            )
    demanded = {"heads"} | ({"activation", "norm_eps"} if layout.startswith("hf") else set())
    if not shapes.settings["class_token"] and LAYOUTS[layout].activation == "gelu":
        demanded.add("activation")  # timm's SigLIP networks have gelu or gelu_tanh
    if shapes.is_gated:
        demanded.add("activation")
    if not shapes.has_table or shapes.maybe_rope:
        demanded.add("positions")
    if LAYOUTS[layout].normalize is None:
        demanded.add("normalize")
    lacking = demanded - stated.keys() - given.keys()
    if fallback is not None and (missing := lacking - fallback.keys()):
        ordered = sorted(missing, key=lambda name: (name == "normalize", name))
        raise ConfigError(_demand(ordered, shapes, file.network, url))
    settings = shapes.settings | stated | dict(given) | {name: fallback[name] for name in lacking if fallback}
    positions = settings["positions"]
    positions = {"kind": positions} if isinstance(positions, str) else positions
    if isinstance(positions, dict) and positions.get("kind", "learned") == "learned":
        positions = {"kind": "learned", "resample": LAYOUTS[layout].resample} | positions
    heads = settings.get("heads")
    key = width_key(shapes.size, heads)
    if key is None:
        known = ", ".join(f"{key} {width.size}" for key, width in WIDTHS.items())
        raise ConfigError(f"{url}: width {shapes.size} is none of {known}, nor a multiple of 64")
    name = f"vit_{key}{shapes.depth}x{shapes.branches}_{shapes.patch}_{shapes.stem}"
    named = width_of(key)
    heads = None if named and named.heads == heads else heads
    return {"name": name} | settings | {"positions": positions, "heads": heads}


def _demand(missing: list[str], shapes: Shapes, network: str | None, url: str) -> str:
    usual = [f"{width.heads} in ViT-{key.capitalize()}" for key, width in WIDTHS.items() if width.size == shapes.size]
    facts = {
        "usual": ", ".join(usual) or f"{shapes.size} channels in all",
        "activations": "swiglu, if its gates have SiLU" if shapes.is_gated else "gelu or gelu_tanh",
        "positions": "learned, unless the network has rope too, which is not supported"
        if shapes.has_table
        else "none, sincos2d or rope",
    }
    origin = f" of {network}" if network else ""
    section = "data" if missing[0] == "normalize" else "model"
    return (
        f"{url}: the weights{origin} do not show {', '.join(_DEMANDS[name].format(**facts) for name in missing)}; add"
        f" {section}.{missing[0]}=... to the run, or save a model folder once: vitray model {url}"
        f" {' '.join(f'{name}=...' for name in missing)} --save FOLDER"
    )


# ---- names and shapes ------------------------------------------------------------------------------------------------


def _read_shapes(state: State, layout: WeightLayout, url: str) -> Shapes:
    names, weight = layout.names, layout.leaves[0]

    def first(part: str, level: int = 0, branch: int = 0) -> Tensor | None:
        tensors = layout.tensors(part, "weight", level, branch)
        return state.get(tensors[0]) if tensors else None

    def count(has: Callable[[int], bool]) -> int:
        return next(number for number in range(len(state) + 1) if not has(number))

    norm = first("norm") if first("pooled_norm") is None else first("pooled_norm")
    depth = count(lambda level: first("attn.norm", level) is not None)
    has_branches = "{b}" in names["attn.norm"] or "{s}" in names["attn.norm"]
    branches = count(lambda branch: first("attn.norm", 0, branch) is not None) if has_branches else 1
    if norm is None or not depth:
        raise ConfigError(f"{url}: no {names['norm']} or no {names['attn.norm']} among {few(sorted(state))}")
    stem, patch = _infer_hybrid(state, layout, url) or _infer_stem(state, first("stem"), names["stem"], weight, url)
    registers = first("registers")
    distilled = first("distillation_token") is not None
    has_token, scaled = first("class_token") is not None, first("attn.scale") is not None
    settings: dict[str, Any] = {
        "class_token": has_token,
        "distillation_token": distilled,
        "registers": 0 if registers is None else registers.shape[-2],
        "qk_norm": first("attn.q_norm") is not None,
        "pool": "mean_then_norm" if first("pooled_norm") is not None else "token" if has_token else "mean",
        "activation": layout.activation,
        "norm_eps": layout.norm_eps,
        "positions": "none",
        "num_classes": None,
    }
    if layout.normalize is not None:
        settings["normalize"] = layout.normalize.model_dump(mode="json")
    if stem in RESNETS:
        settings["resnet_eps"] = layout.resnet_eps
    if scaled:
        settings["layerscale"] = 1e-4  # the file lacks the initial value; this is DeiT III's
    if (table := first("positions")) is not None:
        patches = table.shape[-2] if table.ndim > 1 else 0
        side = math.isqrt(patches)
        if side * side != patches:  # the table begins with the tokens before the patches
            side = math.isqrt(max(patches - has_token - distilled - settings["registers"], 0))
        settings |= {"positions": "learned", "image_size": side * patch}
    if (head := first("head")) is not None:
        settings["num_classes"] = head.shape[1 if weight == "kernel" else 0]
        if (hidden := first("hidden")) is not None:
            settings["head"] = {"kind": "mlp", "hidden": hidden.shape[1 if weight == "kernel" else 0]}
    # Flax keeps heads apart: (width, heads, channels).
    query = first("attn.qkv")
    heads = query.shape[1] if weight == "kernel" and query is not None and query.ndim == 3 else None
    # timm's networks with axial rope and DeiT III's have equal names: the angles of rope are in no file.
    maybe_rope = layout.marker == LAYOUTS["deit"].marker and scaled and branches == 1 and stem == "linear"
    up, down = first("ffn.up"), first("ffn.down")
    is_gated = weight == "weight" and up is not None and down is not None and len(up) == 2 * down.shape[1]
    if down is not None and norm.numel():
        width, inner = norm.numel(), down.shape[0 if weight == "kernel" else 1]
        if inner != (8 * math.ceil(width / 3) if is_gated else 4 * width):
            settings["ffn_ratio"] = inner / width
    has_table = table is not None
    return Shapes(norm.numel(), depth, branches, patch, stem, heads, has_table, is_gated, maybe_rope, settings)


def _infer_hybrid(state: State, layout: WeightLayout, url: str) -> tuple[str, int] | None:
    """The ResNet of a hybrid and the patch size; None for a network without one."""

    def has(*path: str, is_alone: bool = False) -> bool:
        names = resnet_names(layout, path, "weight", is_alone=is_alone)
        return bool(names) and names[0] in state

    def count(stage: int) -> int:
        return next(unit for unit in range(len(state) + 1) if not has("stages", str(stage), str(unit), "conv1"))

    if not has("root") and not has("root", is_alone=True):
        return None
    names = layout.tensors("stem", "weight")
    if not names or names[0] not in state:
        raise ConfigError(f"{url}: it has a ResNet, and no projection {names[0] if names else ''} of its feature map")
    cells = state[names[0]].shape[0 if "/" in names[0] else 2]
    layers = tuple(units for stage in range(4) if (units := count(stage)))
    for kind, traits in RESNETS.items():
        known = traits.units
        if layers == known:
            return kind, cells * (32 if layers else 4)
        if known and layers == (*known[:2], sum(known[2:])) and cells == 1:
            return kind, 16
    raise ConfigError(
        f"{url}: its ResNet has stages of {list(layers)} units, and patches of {cells} cells; expected R50"
    )


def _infer_stem(state: State, linear: Tensor | None, name: str, weight: str, url: str) -> tuple[str, int]:
    """The kind of stem and the patch size."""
    if linear is not None and linear.ndim == 4:
        return "linear", linear.shape[0 if weight == "kernel" else 2]
    layers = [key for key in state if re.fullmatch(re.escape(name.removesuffix("{p}")) + r"\d+\.weight", key)]
    convolutions = [key for key in layers if state[key].ndim == 4]
    if not convolutions:
        raise ConfigError(f"{url}: no stem named {name.format(p=weight)} among {few(sorted(state))}")
    normed = "bn" if any(key.endswith("running_mean") for key in state) else "ln"
    return f"hmlp_{normed}", 4 * 2 ** (len(convolutions) - 1)


# ---- the description beside the tensors ------------------------------------------------------------------------------


def _stated_settings(file: WeightsFile, layout: str, shapes: Shapes, url: str) -> dict[str, Any]:
    """The settings in the files beside the tensors, and those that follow from the network's name."""
    if layout.startswith("hf"):
        kind = "deit" if layout.endswith("_distilled") else "vit"
        stated = _of_hugging_face(file.config, kind, url) if file.config else {}
        return stated | {"normalize": _normalize_of_hugging_face(file.processor)}
    stated: dict[str, Any] = {}
    if file.network and (named := _ROPE.fullmatch(file.network)):
        stated = {"heads": WIDTHS[_LETTERS[named[1]]].heads, "positions": {"kind": "rope", "base": 100.0}}
    elif "rope" in (file.network or ""):
        raise ConfigError(
            f"{url}: it is {file.network}; of timm's networks with rope vitray has vit_small_patch16_rope_224, and base"
            " and large"
        )
    if file.network and (key := known_width(file.network)) and WIDTHS[key].size == shapes.size:
        stated = {"heads": WIDTHS[key].heads} | ({"positions": "learned"} if shapes.has_table else {})
    return stated | (_of_timm(file.config, shapes, url) if "architecture" in file.config else {})


def known_width(network: str) -> str | None:
    """Return the letter of the width of a network of timm, DeiT, MAE or torchvision; None for others."""
    name = network.partition(".")[0]  # timm adds the weights: vit_base_patch16_224.augreg_in1k
    if named := _NETWORK.fullmatch(name):
        return _LETTERS[named[1]]
    named = _TORCHVISION.fullmatch(name)
    return named[1] if named else None


def _of_timm(config: Mapping[str, Any], shapes: Shapes, url: str) -> dict[str, Any]:
    arguments = config.get("model_args") or {}
    if not isinstance(arguments, dict):
        raise ConfigError(f"{url}: config.json: model_args: got {short(arguments)}, expected arguments by name")
    if other := sorted(set(arguments) - _TIMM_ARGUMENTS):
        raise ConfigError(f"{url}: config.json: model_args has {few(other)}, for which vitray has no network")
    same = {"num_heads": "heads", "img_size": "image_size"}
    stated = {same[name]: value for name, value in arguments.items() if name in same}
    trained = config.get("pretrained_cfg", config)  # early files have its content one level up
    if isinstance(trained, dict) and {"mean", "std"} <= trained.keys():
        stated["normalize"] = {"mean": trained["mean"], "std": trained["std"]}
    match arguments.get("global_pool", config.get("global_pool")):
        case None:
            return stated
        case "token" if shapes.settings["pool"] == "token":
            return stated
        case "avg":
            return stated | {"pool": "mean" if shapes.settings["pool"] == "token" else shapes.settings["pool"]}
        case other:
            raise ConfigError(
                f"{url}: config.json: global_pool {other} does not fit a pool of {shapes.settings['pool']}"
            )


def _of_hugging_face(config: Mapping[str, Any], wanted: str, url: str) -> dict[str, Any]:
    # The fallbacks are the library's own.
    kind, activation = config.get("model_type"), config.get("hidden_act", "gelu")
    if kind != wanted:
        raise ConfigError(f"{url}: config.json: model_type {printable(str(kind)[:80])}, expected {wanted}")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"{url}: config.json: hidden_act {printable(str(activation)[:80])}, expected one of {known}")
    size = config.get("image_size", 224)
    return {
        "heads": config.get("num_attention_heads", 12),
        "activation": _ACTIVATIONS[activation],
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "image_size": size,
    }


def _normalize_of_hugging_face(processor: Mapping[str, Any]) -> dict[str, Any] | None:
    """The normalization of a preprocessor_config.json; None if it states none, as defaults depend on its class."""
    if processor.get("do_normalize") is False:
        return {"mean": [0.0] * 3, "std": [1.0] * 3}
    if {"image_mean", "image_std"} <= processor.keys():
        return {"mean": processor["image_mean"], "std": processor["image_std"]}
    return None
