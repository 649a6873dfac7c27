"""The tensors of a network by level, branch and kind: LayerScale and the spectra of weights.

Queries, keys and values are tensors of their own here. Shapes: D width, K singular values.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

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


def spectra(vit: ViT, base: ViT | None = None) -> list[Spectrum]:
    """Return the singular values of every matrix of the levels; with a base, those of the changes from it.

    With a base, matrices are left out that are equal in both, or that either network lacks.
    """
    state = {} if base is None else aligned(base, vit).state_dict()
    before = {each.name: each.values for each in named_tensors(state)}
    found = []
    for name, kind, level, branch, values in named_tensors(vit.state_dict()):
        if level is None or values.ndim != 2:
            continue
        matrix = values.double()
        if base is not None:
            old = before.get(name)
            if old is None or old.shape != values.shape or torch.equal(old, values):
                continue
            matrix = matrix - old.double()
        found.append(Spectrum(name, kind, level, branch, torch.linalg.svdvals(matrix)))
    return found


def aligned(base: ViT, other: ViT) -> ViT:
    """Return the base with its layers grouped as those of the other network, if both have equally many."""
    old, new = base.model.shape, other.model.shape
    has_other_layers = old.depth * old.branches != new.depth * new.branches
    if old.branches == new.branches or has_other_layers or base.where == "levels":  # a level has positions of its own
        return base
    return regroup(base, new.branches)
