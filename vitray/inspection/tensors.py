"""The tensors of a network by level, branch and kind: LayerScale and the spectra of weights.

The levels of a network of torchvision are its stages; level 0 is the rest of it but the head.
Queries, keys and values are tensors of their own here. Shapes: D width, K singular values.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from vitray.models.network import AnyNetwork
from vitray.models.other_networks import NORMS, OtherNetwork
from vitray.models.vit import ViT, regroup

Kind = Literal[
    "stem",
    "class_token",
    "distillation_token",
    "registers",
    "positions",
    "query",
    "key",
    "value",
    "output",
    "up",
    "down",
    "adapter",
    "norm",
    "layerscale",
    "convolution",
    "linear",
    "statistics",
    "other",
    "head",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
THIRDS: tuple[Kind, ...] = ("query", "key", "value")


class NamedTensor(NamedTuple):
    """A tensor of a network and its place; a third of joint queries, keys and values has its kind in the name."""

    name: str
    kind: Kind
    level: int | None
    """None outside the levels."""
    branch: str | None
    """attn1, ffn1, ..."""
    values: Tensor


class LayerScale(NamedTuple):
    """The LayerScale of a branch."""

    level: int
    branch: str
    values: Tensor


class Spectrum(NamedTuple):
    """The singular values of a matrix, or of its change."""

    name: str
    kind: Kind
    level: int | None
    branch: str | None
    values: Tensor
    """Largest first."""

    @property
    def effective_rank(self) -> float:
        """Exp of the entropy of the singular values as shares of their sum (Roy and Vetterli, 2007); 0 for zeros."""
        total = self.values.sum()
        return float(torch.special.entr(self.values / total).sum().exp()) if total else 0.0

    @property
    def stable_rank(self) -> float:
        """The sum of the squared singular values over the largest one's square; 0 for zeros."""
        largest = self.values[0]
        return float((self.values / largest).square().sum()) if largest else 0.0


def network_tensors(network: AnyNetwork) -> Iterator[NamedTensor]:
    """Yield the tensors of a network, in the order of its state; counters are left out."""
    if isinstance(network, ViT):
        yield from named_tensors(network.state_dict())
        return
    for name, values in network.state_dict().items():
        if not values.is_floating_point():
            continue
        if name.startswith(network.head_name):
            yield NamedTensor(name, "head", None, None, values)
            continue
        level = network.stage_number(name.removeprefix("body.")) or 0
        match name.split("."):
            case [*_, "attn", "qkv", _]:  # of Swin
                for kind, third in zip(THIRDS, values.chunk(3), strict=True):
                    yield NamedTensor(f"{name} ({kind})", kind, level, None, third)
            case parts:
                yield NamedTensor(name, _kind_in_stage(network, parts), level, None, values)


def _kind_in_stage(network: OtherNetwork, parts: list[str]) -> Kind:
    match parts:
        case [*_, "running_mean" | "running_var"]:
            return "statistics"
        case [*_, "class_token"]:
            return "class_token"
        case [*_, "pos_embedding" | "relative_position_bias_table" | "relative_coords_table"]:
            return "positions"
        case [*_, "cpb_mlp", _, _]:
            return "positions"
        case [*_, "layer_scale"]:
            return "layerscale"
        case [*_, "attn", "proj", _]:
            return "output"
        case [*_, "mlp", "0", _]:
            return "up"
        case [*_, "mlp", "3", _]:
            return "down"
    match network.get_submodule(".".join(parts[:-1])):
        case nn.Conv2d():
            return "convolution"
        case nn.Linear():
            return "linear"
        case module:
            return "norm" if isinstance(module, NORMS) else "other"


def named_tensors(state: Mapping[str, Tensor]) -> Iterator[NamedTensor]:
    """Yield the tensors of a network's state, in its order; counters are left out."""
    for name, values in state.items():
        if not values.is_floating_point():
            continue
        match name.split("."):
            case ["blocks", level, branch, "qkv", _]:
                for kind, third in zip(THIRDS, values.chunk(3), strict=True):
                    yield NamedTensor(f"{name} ({kind})", kind, int(level), branch, third)
            case ["blocks", level, branch, *rest]:
                yield NamedTensor(name, _kind_in_level(rest[0]), int(level), branch, values)
            case [
                "stem" | "class_token" | "distillation_token" | "registers" | "positions" | "norm" | "head" as kind,
                *_,
            ]:
                yield NamedTensor(name, kind, None, None, values)
            case ["level_positions", *_]:
                yield NamedTensor(name, "positions", None, None, values)
            case _:
                raise AssertionError(f"tensor {name} has no kind")


def _kind_in_level(part: str) -> Kind:
    match part:
        case "norm" | "up" | "down" | "adapter":
            return part
        case "q_norm" | "k_norm":
            return "norm"
        case "relative":
            return "positions"
        case "out":
            return "output"
        case "scale":
            return "layerscale"
        case _:
            raise AssertionError(f"{part} is no part of a level")


def layerscales(vit: ViT) -> list[LayerScale] | None:
    """Return the LayerScale of every branch, or None for a network without it."""
    found = [
        LayerScale(each.level, each.branch, each.values)
        for each in named_tensors(vit.state_dict())
        if each.kind == "layerscale" and each.level is not None and each.branch is not None
    ]
    return found or None


def spectra(vit: AnyNetwork, base: AnyNetwork | None = None) -> list[Spectrum]:
    """Return the singular values of every matrix of the levels; with a base, those of the changes from it.

    With a base, matrices are left out that are equal in both, or that either network lacks. The kernel of a convolution
    is a matrix with a row for each output channel.
    """
    if isinstance(base, ViT) and isinstance(vit, ViT):
        base = aligned(base, vit)
    before = {} if base is None else {each.name: each.values for each in network_tensors(base)}
    found = []
    for name, kind, level, branch, values in network_tensors(vit):
        if level is None or (values.ndim != 2 and (kind != "convolution" or values.ndim < 2)):
            continue
        matrix = values.double()
        if base is not None:
            old = before.get(name)
            if old is None or old.shape != values.shape or torch.equal(old, values):
                continue
            matrix = matrix - old.double()
        found.append(Spectrum(name, kind, level, branch, torch.linalg.svdvals(matrix.flatten(1))))
    return found


def aligned(base: ViT, other: ViT) -> ViT:
    """Return the base with its layers grouped as those of the other network, if both have equally many."""
    old, new = base.model.shape, other.model.shape
    has_other_layers = old.depth * old.branches != new.depth * new.branches
    # A level with positions or an axis of its own is no branch of another.
    if (
        old.branches == new.branches
        or has_other_layers
        or base.positions_added_at == "levels"
        or base.model.attention == "axial"
    ):
        return base
    return regroup(base, new.branches)
