"""The similarity of position embeddings (ViT paper, figures 7 and 10).

Shapes: R x Q rows and columns of patches, N patches row by row, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitray.models.vit import ViT


@torch.no_grad()
def position_similarity(vit: ViT, grid: tuple[int, int] | None = None) -> Tensor | None:
    """Return the cosine of every pair of position embeddings, RQRQ, or None for a network without them.

    Of a network that adds others before every level, those of the stem.

    By default on the network's own grid; on another grid, those that the network adds there.
    """
    rows, columns = grid or vit.model.grid
    table_ND = vit.positions.embedding((rows, columns))
    if table_ND is None:
        return None
    units_ND = F.normalize(table_ND.double(), dim=1)
    return (units_ND @ units_ND.T).view(rows, columns, rows, columns)
