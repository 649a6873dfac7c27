"""Activation memory of a network, measured on shapes alone, beside its sizes; and its diagram in text."""

from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vitray.config import Learned, Learned2d, Model
from vitray.config.classification import Part
from vitray.models.network import build_network, network_sizes
from vitray.models.other_networks import other_sizes
from vitray.models.sizes import inner_width
from vitray.models.vit import ViT


class Counts(NamedTuple):
    """The size of a network and the cost of one image."""

    params: int
    gflops: float
    """Billions of multiply-adds of a forward pass, as `Sizes` counts them."""
    activation_bytes: int
    """Activations that one fp32 image stores for the backward pass."""


def count(model: Model) -> Counts:
    """Return the counts of a model without allocating weights or images."""
    with torch.device("meta"):
        vit = build_network(model.model_copy(update={"execution": "loop", "drop_path": 0.0}))
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[id(storage)] = storage
        return tensor

    # Fake CPU tensors: on meta, attention is decomposed and would store its N x N weights.
    with FakeTensorMode(allow_non_fake_inputs=True):
        vit.to_empty(device="cpu")
        # In training mode a batch norm over a single value fails, which some networks have at small images.
        images = torch.empty(1 if model.is_vit else 2, 3, *model.image_shape)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            vit(images)
        weights = {id(parameter.untyped_storage()) for parameter in vit.parameters()}
    sizes = network_sizes(model)
    activation_bytes = sum(storage.nbytes() for key, storage in saved.items() if key not in weights)
    return Counts(sizes.params, sizes.gflops, activation_bytes // len(images))


def diagram(model: Model, counts: Counts) -> str:
    """Return a text diagram of the network from the image down, with the parameters of each part."""
    if not model.is_vit:
        return _other_diagram(model, counts)
    with torch.device("meta"):
        vit = ViT(model)
    shape, (height, width), (rows, columns) = model.shape, model.image_shape, model.grid
    tokens = rows * columns + model.num_prefix

    def size(*modules: nn.Module) -> str:
        return _amount(sum(parameter.numel() for module in modules for parameter in module.parameters()))

    stem = " > ".join(_layer(layer) for layer in vit.stem.proj)
    scale = "" if model.layerscale is None else f" * scale {model.layerscale:g}"
    heads = f"{model.num_heads} heads{' with norms' if model.qk_norm else ''}"
    heads += " along rows, in the next level along columns" if model.attention == "axial" else ""
    gates = " gated" if model.activation == "swiglu" else ""
    hidden = f"{shape.size} > {inner_width(model)}{gates} > {shape.size}"
    hidden += f" > adapter {model.adapters}" if model.adapters else ""
    norm = "norm" if model.norm == "layernorm" else model.norm
    block: list[tuple[str, str]] = []
    for part, text in (("attn", heads), ("ffn", hidden)):
        for branch in range(1, shape.branches + 1):
            module = vit.blocks[0].get_submodule(f"{part}{branch}")
            fork = "──" if shape.branches == 1 else "┬─" if branch == 1 else "└─" if branch == shape.branches else "├─"
            block.append((f"│ {fork} {norm} > {part}{branch} {text}{scale}", size(module)))
        block.append(("⊕ add", ""))
    positions, head = model.positions.kind, "no head"
    if isinstance(model.positions, Learned | Learned2d):
        positions += f", resized as {model.positions.resample}"
    if vit.positions_added_at != "stem":
        positions += f", before every level{' the same' if vit.positions_added_at == 'shared' else ''}"
    if model.num_classes:
        mean = ", the mean of two" if model.distillation_token else ""
        head = f"head {model.head.kind} > {model.num_classes} classes{mean}"
    lines = [
        (f"image 3 x {height} x {width}", ""),
        (f"stem {shape.stem}: {stem}", size(vit.stem)),
        (f"{rows} x {columns} patches + positions ({positions})", size(vit.positions, vit.level_positions)),
        *([("class token first", _amount(shape.size))] if model.class_token else []),
        *([("distillation token next", _amount(shape.size))] if model.distillation_token else []),
        *([(f"{model.registers} registers next", _amount(shape.size * model.registers))] if model.registers else []),
        (f"┌ {shape.depth} levels on {tokens} tokens of {shape.size}", f"{size(*vit.blocks)} in all"),
        *block,
        ("└", ""),
        (f"{norm}, pool {model.pool}", size(vit.norm)),
        (head, size(vit.head)),
    ]
    return _table(f"{model.name}   ({shape.paper_spelling})", counts, lines)


def _table(title: str, counts: Counts, lines: Sequence[tuple[str, str]]) -> str:
    left = max(len(text) for text, _ in lines) + 2
    total = (
        f"{counts.params / 1e6:.1f} M parameters   {counts.gflops:.2f} GFLOPs   "
        f"{counts.activation_bytes / 1e6:.0f} MB of activations per image in training"
    )
    rows = [f"{text:<{left}}{amount:>12}".rstrip() for text, amount in lines]
    return "\n".join([title, total, "", *rows])


def _other_diagram(model: Model, counts: Counts) -> str:
    (height, width), parts = model.image_shape, other_sizes(model).parts
    lines = [(f"image 3 x {height} x {width}", "")]
    lines += [(part, _amount(parts[part])) for part in get_args(Part) if part in parts]
    return _table(model.name, counts, lines)


def _amount(number: int) -> str:
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{number / 1e3:.1f} k" if number else ""


def _layer(layer: nn.Module) -> str:
    match layer:
        case nn.Conv2d():
            return f"{layer.kernel_size[0]}x{layer.kernel_size[0]}/{layer.stride[0]} conv {layer.out_channels}"
        case nn.BatchNorm2d():
            return "bn"
        case nn.LayerNorm():
            return "ln"
        case nn.MaxPool2d():
            return f"max pool {layer.kernel_size}"
        case nn.GELU():
            return "gelu"
        case _:
            return layer.describe()  # pyright: ignore[reportCallIssue]
