"""Positions: added to the patches (learned, sin-cos), or inside attention (rotary, relative).

Shapes: B images, N patches (row by row) or tokens, D width, M selected patches, H heads, P branches whose heads are one
after another, K offsets, d channels of a head.
"""

from collections.abc import Callable
from typing import NamedTuple, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config import Learned, Learned2d, NoPositions, Relative, Rope, SinCos2d
from vitray.config import Positions as Kind

Grid = tuple[int, int]

# The results differ by more than 1 on a unit-variance table resized from 14 x 14 to 24 x 24 (prior work). So the
# original library's method is recorded with the weights (`model.positions.resample`) and never guessed.
RESAMPLE: dict[str, dict[str, bool | str]] = {
    "google": {"mode": "bilinear", "align_corners": True},
    "deit": {"mode": "bicubic", "align_corners": False},
    "timm": {"mode": "bicubic", "align_corners": False, "antialias": True},
    "torchvision": {"mode": "bicubic", "align_corners": True},
}


class VisiblePatches(NamedTuple):
    """The patches that a network sees: all of a grid, or some of it."""

    grid: Grid
    chosen: Tensor | None = None
    """The patches of each image, BM; None for all."""


class AttentionPositions(NamedTuple):
    """The positions that act inside attention, the same for every level."""

    rotation: Tensor | None = None
    """Of axial rotary positions: the cosines and sines of each token, 2(1 or B)1Nd."""
    offset: Tensor | None = None
    """Of relative positions: the row of the table for each pair of patches, (1 or B)1NN."""
    grid: Grid | None = None
    """Of axial attention: the rows and columns of the patches, all of which are there."""

    def of(self, rows_K: Tensor | None) -> "AttentionPositions":
        """Return the positions of some images; None for all."""
        if rows_K is None:
            return self
        rotation, offset = self.rotation, self.offset
        if rotation is not None and rotation.shape[1] > 1:
            rotation = rotation.index_select(1, rows_K)
        if offset is not None and offset.shape[0] > 1:
            offset = offset.index_select(0, rows_K)
        return self._replace(rotation=rotation, offset=offset)


NO_POSITIONS = AttentionPositions()


def resample(table_ND: Tensor, old: Grid, new: Grid, convention: str) -> Tensor:
    """Return a table of the `old` grid resized to the `new` one; the table itself for equal grids."""
    if old == new:
        return table_ND
    image_1DHW = table_ND.float().T.reshape(1, -1, *old)
    return F.interpolate(image_1DHW, size=new, **RESAMPLE[convention]).flatten(2)[0].T.to(table_ND.dtype)  # pyright: ignore[reportArgumentType]


def sincos2d(grid: Grid, width: int, frequencies: str) -> Tensor:
    """Return [sin x, cos x, sin y, cos y] of each patch, a quarter of the width each."""
    quarter = width // 4
    # big_vision's slowest frequency is exactly 1 / 10000, MAE's one step short of it.
    steps = quarter - 1 if frequencies == "big_vision" else quarter
    omega = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / max(steps, 1))
    rows, columns = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    x, y = columns.reshape(-1, 1) * omega, rows.reshape(-1, 1) * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float()


def fixed_table(compute: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Return a table of a new network, computed on the CPU and moved to the default device.

    On meta, where sizes and costs are counted, its operations would import torch.compile, which takes two seconds.
    """
    with torch.device("cpu"):
        table = compute(*arguments)
    return table.to(torch.get_default_device())


class Positions(nn.Module):
    """Adds a position embedding to each patch, on the original grid or another one."""

    table: Tensor
    x: Tensor
    y: Tensor

    def __init__(self, kind: Kind, grid: Grid, width: int) -> None:
        super().__init__()
        self.kind, self.grid, self.width = kind, grid, width
        match kind:
            case Learned():
                self.table = _learned(grid[0] * grid[1], width)
            case Learned2d():
                self.x, self.y = _learned(grid[1], width // 2), _learned(grid[0], width // 2)
            case SinCos2d():
                table = fixed_table(sincos2d, grid, width, kind.frequencies)
                self.register_buffer("table", table, persistent=False)
            case NoPositions() | Relative() | Rope():
                pass
            case _:
                assert_never(kind)

    def forward(self, x_BND: Tensor, grid: Grid, chosen: Tensor | None = None, num_prefix: int = 0) -> Tensor:
        """Return tokens with the embeddings added to the patches, all of a grid or the chosen, after the prefix."""
        table_ND = self.embedding(grid)
        if table_ND is None:
            return x_BND
        if chosen is not None:
            table_ND = table_ND[chosen]
        return x_BND + (F.pad(table_ND, (0, 0, num_prefix, 0)) if num_prefix else table_ND)

    def embedding(self, grid: Grid) -> Tensor | None:
        """Return the embeddings of a grid, ND; None without any."""
        match self.kind:
            case Learned():
                return self.resized(grid)["table"]
            case Learned2d():
                x_XK, y_YK = self.resized(grid).values()
                return torch.cat([x_XK.repeat(grid[0], 1), y_YK.repeat_interleave(grid[1], 0)], dim=1)
            case SinCos2d(frequencies=frequencies):
                return self.table if grid == self.grid else sincos2d(grid, self.width, frequencies).to(self.table)
            case _:
                return None

    def resized(self, grid: Grid) -> dict[str, Tensor]:
        """Return the learned tables at another grid, by name."""
        match self.kind:
            case Learned(resample=convention):
                return {"table": resample(self.table, self.grid, grid, convention)}
            case Learned2d(resample=convention):
                # Both as a row: torch 2.15 resizes a single column wrongly where it antialiases.
                sides = {"x": (self.x, self.grid[1], grid[1]), "y": (self.y, self.grid[0], grid[0])}
                return {
                    name: resample(table, (1, old), (1, new), convention) for name, (table, old, new) in sides.items()
                }
            case _:
                return {}


def _learned(rows: int, width: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(rows, width), std=0.02))


# ---- axial rotary positions ------------------------------------------------------------------------------------------

# Queries and keys turn by angles of column and row, so that logits depend on offsets. Of the d channels of a head,
# pairs k of the first half turn by column * w_k and those of the second by row * w_k, with w_k = base^(-4k / d). Tokens
# before the patches do not turn. On a larger grid the angles continue.


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


# ---- relative positions (ViT paper, D.4) -----------------------------------------------------------------------------

# A second attention of the same queries, with learned keys for offsets. The offset of a query and a key is the
# difference of their places in raster order, so that N patches have 2N - 1. A branch has one key of a head's size for
# each, which its heads share. The product with the scaled query is added to the logit.


def num_offsets(patches: int) -> int:
    """Return the number of offsets of patches in raster order."""
    return 2 * patches - 1


def offset_index(places: VisiblePatches, device: torch.device) -> Tensor:
    """Return the row of the table for each query and key, (1 or B)1NN."""
    patches = places.grid[0] * places.grid[1]
    place_BN = torch.arange(patches, device=device)[None] if places.chosen is None else places.chosen
    return (place_BN[:, :, None] - place_BN[:, None, :] + patches - 1)[:, None]


def relative_bias(q_BHNd: Tensor, tables_PKd: Tensor, offset: Tensor) -> Tensor:
    """Return the terms that are added to the scaled logits, BHNN; the tables may differ between images, BPKd."""
    q_BPHNd = (q_BHNd * q_BHNd.shape[-1] ** -0.5).unflatten(1, (tables_PKd.shape[-3], -1))
    terms_BHNK = (q_BPHNd @ tables_PKd.unsqueeze(-3).mT).flatten(1, 2)
    return terms_BHNK.gather(3, offset.expand(*terms_BHNK.shape[:3], -1))
