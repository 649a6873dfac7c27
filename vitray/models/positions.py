"""Position embeddings: learned, fixed sin-cos or none, and the four published ways to resize a learned table.

Shapes: B images, N patches (row by row), D width.
"""

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config import Learned, NoPositions, SinCos2d

Grid = tuple[int, int]

# The methods differ by more than 1 on unit-variance tables (prior work measured 14 -> 24). So the original library's
# method is recorded with the weights (`model.positions.resample`) and never guessed.
RESAMPLE: dict[str, dict[str, bool | str]] = {
    "google": {"mode": "bilinear", "align_corners": True},
    "deit": {"mode": "bicubic", "align_corners": False},
    "timm": {"mode": "bicubic", "align_corners": False, "antialias": True},
    "torchvision": {"mode": "bicubic", "align_corners": True},
}


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


class Positions(nn.Module):
    """Adds a position embedding to each patch, on the original grid or another one."""

    def __init__(self, kind: Learned | SinCos2d | NoPositions, grid: Grid, width: int) -> None:
        super().__init__()
        self.kind, self.grid, self.width = kind, grid, width
        match kind:
            case Learned():
                self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(grid[0] * grid[1], width), std=0.02))
            case SinCos2d():
                self.register_buffer("table", sincos2d(grid, width, kind.frequencies), persistent=False)
            case NoPositions():
                pass
            case _:
                assert_never(kind)

    def forward(self, x_BND: Tensor, grid: Grid) -> Tensor:
        if isinstance(self.kind, NoPositions):
            return x_BND
        if grid == self.grid:
            return x_BND + self.table
        if isinstance(self.kind, Learned):
            return x_BND + resample(self.table, self.grid, grid, self.kind.resample)
        return x_BND + sincos2d(grid, self.width, self.kind.frequencies).to(x_BND)
