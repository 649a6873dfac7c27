"""Relative positions of the ViT paper, D.4: a second attention of the same queries, with learned keys for offsets.

The offset of a query and a key is the difference of their places in raster order, so that N patches have 2N - 1. A
branch has one key of a head's size for each, which its heads share. The product with the scaled query is added to the
logit.

Shapes: B images, H heads, P branches whose heads are one after another, N patches, K offsets, d channels of a head.
"""

import torch
from torch import Tensor

from vitray.models.positions import VisiblePatches


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
