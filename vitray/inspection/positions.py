"""Positions: the similarity of their embeddings (ViT paper, figures 7 and 10), and the learned terms of offsets.

Shapes: R x Q rows and columns of patches, N patches row by row, D width, B images, C colors, H x W pixels, L levels,
P branches; of terms (LPHK), H heads, K offsets; d channels of a head.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitray.config import Rope
from vitray.inspection.levels import Level, images_at_once, run_levels
from vitray.models.branches import Attention, split_heads
from vitray.models.network import AnyNetwork
from vitray.models.positions import Positions, axial_rotation, relative_bias, rotate
from vitray.models.vit import ViT


class WindowTerms(NamedTuple):
    """The learned terms of one attention in windows, by offset."""

    name: str
    level: int | None
    """The stage."""
    values: Tensor
    """Of each head, by the offset of rows and of columns, query minus key, from the most negative on."""


@torch.no_grad()
def position_similarity(vit: AnyNetwork, grid: tuple[int, int] | None = None, level: int = 0) -> Tensor | None:
    """Return the cosine of every pair of position embeddings, RQRQ, or None for a network without them.

    Of a network with a table for each level, those added before `level`. Of rotary positions, the cosine between a
    query and a key whose channels are all 1, after their rotation: the same for every level and head.

    By default on the network's own grid; on another grid, those that the network adds there.
    """
    if not isinstance(vit, ViT):
        return _similarity(*table) if (table := _table_of_torchvision(vit)) else None
    rows, columns = grid or vit.model.grid
    table_ND = _added_before(vit, level).embedding((rows, columns))
    if isinstance(vit.model.positions, Rope):
        rotation_2Nd = axial_rotation((rows, columns), vit.model.head_size, vit.model.positions.base)
        table_ND = rotate(torch.ones_like(rotation_2Nd[0]), rotation_2Nd)
    return None if table_ND is None else _similarity(table_ND, (rows, columns))


def _added_before(vit: ViT, level: int) -> Positions:
    if not 0 <= level < len(vit.blocks):
        raise ValueError(f"got level {level}, expected 0 to {len(vit.blocks) - 1}")
    own: Any = [vit.positions, *vit.level_positions]
    return own[level] if vit.positions_added_at == "levels" else vit.positions


def _similarity(table_ND: Tensor, grid: tuple[int, int]) -> Tensor:
    units_ND = F.normalize(table_ND.double(), dim=1)
    return (units_ND @ units_ND.T).view(*grid, *grid)


def _table_of_torchvision(network: AnyNetwork) -> tuple[Tensor, tuple[int, int]] | None:
    """The learned positions of the patches, and their grid, of torchvision's Vision Transformers."""
    state = network.state_dict()
    if (table_1ND := state.get("body.encoder.pos_embedding")) is None:
        return None
    patch = state["body.conv_proj.weight"].shape[-1]
    height, width = network.model.image_shape
    return table_1ND[0, 1:], (height // patch, width // patch)


@torch.no_grad()
def relative_terms(vit: ViT, images_BCHW: Tensor) -> Tensor | None:
    """Return the term that relative positions add to a logit, LPHK, or None for a network without them.

    It is the product of a query with the learned key of the offset: here the mean over the images and all pairs of
    patches with that offset. Offsets are differences of places in raster order, the most negative first.
    """
    if vit.model.positions.kind != "relative":
        return None
    at_once = images_at_once(vit, images_BCHW)
    sums = [
        torch.stack(
            [torch.stack([_sum_of_terms(branch, level) for branch in level.block.attentions]) for level in walk]
        )
        for walk in (run_levels(vit, chunk) for chunk in images_BCHW.split(at_once))
    ]
    patches = vit.model.grid[0] * vit.model.grid[1]
    pairs_K = patches - torch.arange(1 - patches, patches, device=images_BCHW.device).abs()
    return torch.stack(sums).sum(dim=0) / (pairs_K * len(images_BCHW))


def _sum_of_terms(branch: Attention, level: Level) -> Tensor:
    """The terms of one branch, summed over images and pairs of patches: HK."""
    offset, table_Kd = level.positions.offset, branch.relative
    assert offset is not None
    assert table_Kd is not None
    q_BHNd = split_heads(branch.qkv(branch.norm(level.input)), branch.heads)[0]
    if branch.q_norm is not None:
        q_BHNd = branch.q_norm(q_BHNd)
    terms_HX = relative_bias(q_BHNd, table_Kd[None], offset).double().sum(dim=0).flatten(1)
    return terms_HX.new_zeros(branch.heads, len(table_Kd)).index_add_(1, offset.flatten(), terms_HX)


def relative_lengths(vit: ViT) -> Tensor | None:
    """Return the length of the learned key of each offset, LPK, which the heads of a branch share; None without any."""
    if vit.model.positions.kind != "relative":
        return None
    tables = [[branch.relative for branch in block.attentions] for block in vit.blocks]  # pyright: ignore
    return torch.stack([torch.stack(each) for each in tables]).detach().double().norm(dim=-1)


@torch.no_grad()
def window_terms(network: AnyNetwork) -> list[WindowTerms]:
    """Return the terms that each attention of torchvision's Swin or MaxViT adds to its logits; of others, none."""
    if isinstance(network, ViT):
        return []
    terms = []
    for name, bias_HRQRQ in network.window_biases().items():
        height, width = bias_HRQRQ.shape[1:3]
        rows, columns = torch.arange(1 - height, height)[:, None], torch.arange(1 - width, width)[None]
        # The key of a positive offset is at the first place, the query of a negative one.
        query, key = (rows.clamp(min=0), columns.clamp(min=0)), ((-rows).clamp(min=0), (-columns).clamp(min=0))
        terms.append(WindowTerms(name, network.stage_number(name), bias_HRQRQ[:, *query, *key]))
    return terms
