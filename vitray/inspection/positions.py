"""The similarity of position embeddings (ViT paper, figures 7 and 10).

Shapes: R x Q rows and columns of patches, N patches row by row, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitray.config import NoPositions
from vitray.models.vit import ViT


@torch.no_grad()
def position_similarity(vit: ViT, grid: tuple[int, int] | None = None) -> Tensor | None:
    """Return the cosine of every pair of position embeddings, RQRQ, or None for a network without them.

    By default on the network's own grid; on another grid, those that the network adds there.
    """
    if isinstance(vit.positions.kind, NoPositions):
        return None
    rows, columns = grid or vit.model.grid
    nothing_1ND = vit.norm.weight.new_zeros(1, rows * columns, vit.model.shape.size)
    units_ND = F.normalize(vit.positions(nothing_1ND, (rows, columns))[0].double(), dim=1)
    return (units_ND @ units_ND.T).view(rows, columns, rows, columns)
