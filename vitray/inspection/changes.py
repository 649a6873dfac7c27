"""The change from one network to another: of every tensor, and of the tokens of images at every level.

Made for a base and a network fine-tuned from it. Shapes: S states (before the first level, then after each), B images,
N tokens, D width.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitray.inspection.levels import grid_of
from vitray.inspection.tensors import Kind, NamedTensor, aligned, named_tensors, network_tensors
from vitray.inspection.tokens import chunks, run_states
from vitray.models.network import AnyNetwork
from vitray.models.other_networks import OtherNetwork
from vitray.models.vit import ViT

Status = Literal["equal", "changed", "new", "gone", "reshaped"]


class TensorChange(NamedTuple):
    """The change of one tensor; lengths are the root of the sum of squares."""

    name: str
    kind: Kind
    level: int | None
    branch: str | None
    status: Status
    base: float
    """The length in the base; 0 for a new tensor."""
    change: float
    """The length of the difference; 0 for tensors that cannot be compared."""

    @property
    def relative(self) -> float | None:
        """The change over the base; None where the base is zero and the tensor is not, or nothing can be compared."""
        if self.status == "equal":
            return 0.0
        return self.change / self.base if self.status == "changed" and self.base else None


class FeatureChange(NamedTuple):
    """The change of the tokens of each image at every state."""

    relative: Tensor
    """The length of the difference over that of the base's tokens, all tokens of an image as one vector."""
    cosine: Tensor
    """Between the tokens of both networks, averaged over tokens."""


@torch.no_grad()
def tensor_changes(base: AnyNetwork, other: AnyNetwork) -> list[TensorChange]:
    """Return the change of every tensor that either network has, in the order of the second, then of the base.

    A learned table of positions of another grid is first resized as the base would do it. A base with the same layers
    in another number of branches is first regrouped: level 3 of 36x1 is branch 2 of level 1 of 18x2.
    """
    before = {each.name: each for each in _comparable_tensors(base, other)}
    after = {each.name: each for each in network_tensors(other)}
    changes = []
    for name, each in after.items():
        old = before.get(name)
        status, length, change = "new", 0.0, 0.0
        if old is not None:
            status, length = "reshaped", float(old.values.double().norm())
            if old.values.shape == each.values.shape:
                change = float((each.values.double() - old.values.double()).norm())
                status = "changed" if change else "equal"
        changes.append(TensorChange(name, each.kind, each.level, each.branch, status, length, change))
    gone = [each for name, each in before.items() if name not in after]
    return changes + [TensorChange(*each[:4], "gone", float(each.values.double().norm()), 0.0) for each in gone]


def _comparable_tensors(base: AnyNetwork, other: AnyNetwork) -> Iterator[NamedTensor]:
    if not (isinstance(base, ViT) and isinstance(other, ViT)):
        return network_tensors(base)
    base = aligned(base, other)
    is_same_kind = base.model.positions.kind == other.model.positions.kind
    return named_tensors(base.state_dict() | (base.positions_at(other.model.grid) if is_same_kind else {}))


@torch.no_grad()
def feature_changes(
    base: AnyNetwork, other: AnyNetwork, images_BCHW: Tensor, images_of_other: Tensor | None = None
) -> FeatureChange:
    """Return the change of the tokens of images at every state, for two networks with the same levels and tokens.

    `images_of_other` are the same images in the second network's normalization, where it differs.
    """
    images_of_other = images_BCHW if images_of_other is None else images_of_other
    if (first := tokens_of(base, images_BCHW)) != (second := tokens_of(other, images_of_other)):
        raise ValueError(f"got {first} and {second}, expected two networks with the same tokens; CKA compares any two")
    relatives, cosines = [], []
    for chunk, chunk_of_other in zip(chunks(base, images_BCHW), chunks(other, images_of_other), strict=True):
        relatives_SB, cosines_SB = [], []
        for old_BND, new_BND in zip(run_states(base, chunk), run_states(other, chunk_of_other), strict=True):
            relatives_SB.append((new_BND - old_BND).flatten(1).norm(dim=1) / old_BND.flatten(1).norm(dim=1))
            cosines_SB.append(F.cosine_similarity(old_BND, new_BND, dim=2).mean(dim=1))
        relatives.append(torch.stack(relatives_SB))
        cosines.append(torch.stack(cosines_SB))
    return FeatureChange(torch.cat(relatives, dim=1), torch.cat(cosines, dim=1))


def tokens_of(vit: AnyNetwork, images_BCHW: Tensor) -> str:
    """Return the number and the kind of a network's tokens for images, in words."""
    if isinstance(vit, OtherNetwork):
        height, width = images_BCHW.shape[-2:]
        return f"{len(vit.stages) or 'no'} stages of {vit.model.name} at {height} x {width} pixels"
    rows, columns = grid_of(vit, images_BCHW)
    token = "" if vit.class_token is None else "a class token and "
    token += "a distillation token and " if vit.model.distillation_token else ""
    registers = f"{vit.model.registers} registers and " if vit.model.registers else ""
    return f"{len(vit.blocks)} levels with {token}{registers}{rows} x {columns} patches of width {vit.model.shape.size}"
