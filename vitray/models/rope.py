"""Axial rotary positions: queries and keys turn by angles of column and row, so that logits depend on offsets.

Of the d channels of a head, pairs k of the first half turn by column * w_k and those of the second by row * w_k, with
w_k = base^(-4k / d). Tokens before the patches do not turn. On a larger grid the angles continue.

Shapes: B images, H heads, N tokens, d channels of a head.
"""

import torch
from torch import Tensor, nn

from vitray.models.positions import Grid, VisiblePatches, fixed_table


def axial_rotation(grid: Grid, head_size: int, base: float) -> Tensor:
    """Return the cosines and sines of each patch and channel, 2Nd."""
    omega = base ** (-torch.arange(head_size // 4, dtype=torch.float64) / (head_size // 4))
    rows, columns = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    angles = torch.cat([columns.reshape(-1, 1) * omega, rows.reshape(-1, 1) * omega], dim=1).repeat_interleave(2, dim=1)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x_BHNd: Tensor, rotation: Tensor) -> Tensor:
    """Return heads with neighboring channels turned: (a, b) becomes (a cos - b sin, b cos + a sin)."""
    cos, sin = rotation
    turned_BHNd = torch.stack((-x_BHNd[..., 1::2], x_BHNd[..., ::2]), dim=-1).flatten(-2)
    return (x_BHNd * cos + turned_BHNd * sin).type_as(x_BHNd)


class AxialRope(nn.Module):
    """The rotation of the tokens of an image."""

    own: Tensor

    def __init__(self, grid: Grid, head_size: int, base: float) -> None:
        super().__init__()
        self.grid, self.head_size, self.base = grid, head_size, base
        self.register_buffer("own", fixed_table(axial_rotation, grid, head_size, base), persistent=False)

    def forward(self, places: VisiblePatches, num_prefix: int) -> Tensor:
        """Return the rotation of the prefix, which is none, and of the patches: 2(1 or B)1Nd."""
        rotation = self.own
        if places.grid != self.grid:
            rotation = axial_rotation(places.grid, self.head_size, self.base).to(self.own)
        rotation = rotation[:, None] if places.chosen is None else rotation[:, places.chosen]
        # The prefix keeps its direction: cosine 1, sine 0.
        still = torch.zeros_like(rotation[:, :, :1]).expand(-1, -1, num_prefix, -1).clone()
        still[0] = 1
        return torch.cat([still, rotation], dim=2)[:, :, None]
