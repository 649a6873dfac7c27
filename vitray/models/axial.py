"""Axial self-attention of the ViT paper, D.6: patches attend along one axis, within their row or their column.

A line is a row or a column: a sequence of its own, of L patches.
Shapes: B images, H heads, R rows, C columns, S lines, N = R * C patches row by row, d channels of a head.
"""

from typing import Literal

import torch
from torch import Tensor

from vitray.models.positions import Grid

Axis = Literal["rows", "columns"]
AXES: tuple[Axis, Axis] = ("rows", "columns")
"""The axes of a network's levels, in turn."""


def split_lines(x_BHNd: Tensor, axis: Axis, grid: Grid) -> Tensor:
    """Return the patches of each line as a sequence, (B S)HLd."""
    x_BHRCd = x_BHNd.unflatten(2, grid)
    return (x_BHRCd.transpose(1, 2) if axis == "rows" else x_BHRCd.permute(0, 3, 1, 2, 4)).flatten(0, 1)


def join_lines(x_XHLd: Tensor, axis: Axis, grid: Grid) -> Tensor:
    """Return the patches of all lines row by row, BHNd."""
    x_BSHLd = x_XHLd.unflatten(0, (-1, grid[0] if axis == "rows" else grid[1]))
    return (x_BSHLd.transpose(1, 2) if axis == "rows" else x_BSHLd.permute(0, 2, 3, 1, 4)).flatten(2, 3)


def spread_weights(weights_XHLL: Tensor, axis: Axis, grid: Grid) -> Tensor:
    """Return the attention weights between all patches, BHNN: zero between lines."""
    lines = grid[0] if axis == "rows" else grid[1]
    own = torch.eye(lines, dtype=weights_XHLL.dtype, device=weights_XHLL.device)
    order = "bshlm,st->bhsltm" if axis == "rows" else "bshlm,st->bhlsmt"
    return torch.einsum(order, weights_XHLL.unflatten(0, (-1, lines)), own).flatten(4, 5).flatten(2, 3)
