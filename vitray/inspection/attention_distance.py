"""Attention distance: the mean distance in pixels between a query patch and the patches it attends to (ViT paper, D.7).

Shapes: B images, C colors, H x W pixels, N tokens, M patches, L levels, P branches of a level; of attention weights
(BHNN) and results (LPHB), H heads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitray.inspection.levels import check_levels, grid_of, images_at_once, run_levels
from vitray.models.vit import ViT


class AttentionSpread(NamedTuple):
    """The spread of each head's attention, averaged over queries, for each image: LPHB."""

    distance: Tensor
    """In pixels. The rows and columns of all tokens before the patches are cut, and the rest is not renormalized."""
    renormalized: Tensor
    """In pixels, each query's attention to the patches divided by its sum; differs only with tokens before them."""
    entropy: Tensor
    """In nats, of all rows and columns: log N for uniform attention, 0 for attention to one token."""


@torch.no_grad()
def attention_distances(vit: ViT, images_BCHW: Tensor, chosen: Sequence[int] | None = None) -> AttentionSpread:
    """Return attention distance in both conventions, and entropy, of every head for a batch of normalized images.

    `chosen` are the levels that are inspected, counted from 0, in ascending order; by default all.
    """
    chosen = range(len(vit.blocks)) if chosen is None else check_levels(vit, chosen)
    grid, prefix = grid_of(vit, images_BCHW), vit.num_prefix
    distances_MM = patch_distances(grid, vit.stem.patch).to(images_BCHW)
    chunks = [
        [
            torch.stack([spread_of(weights_BHNN, distances_MM, prefix) for weights_BHNN in level.attention()])
            for level in run_levels(vit, chunk)
            if level.number in chosen
        ]
        for chunk in images_BCHW.split(images_at_once(vit, images_BCHW))
    ]
    spread_LP3HB = torch.cat([torch.stack(chunk) for chunk in chunks], dim=-1)
    return AttentionSpread(*spread_LP3HB.unbind(2))


def spread_of(weights_BHNN: Tensor, distances_MM: Tensor, prefix: int) -> Tensor:
    """Return distance, renormalized distance and entropy of one branch, 3HB."""
    patches_BHMM = weights_BHNN[..., prefix:, prefix:]
    distance_BHM = torch.einsum("bhij,ij->bhi", patches_BHMM, distances_MM)
    # A query that attends to no patch has no distance: 0 / 0, left out of the mean.
    renormalized_BH = (distance_BHM / patches_BHMM.sum(dim=-1)).nanmean(dim=-1)
    entropy_BH = torch.special.entr(weights_BHNN).sum(dim=-1).mean(dim=-1)
    return torch.stack([distance_BHM.mean(dim=-1), renormalized_BH, entropy_BH]).mT


def patch_distances(grid: tuple[int, int], patch: int) -> Tensor:
    """Return the distance in pixels between the centers of any two patches of a grid, MM, in float64."""
    rows, columns = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    centers_M2 = torch.stack([rows.flatten(), columns.flatten()], dim=1) * patch
    return torch.cdist(centers_M2, centers_M2, compute_mode="donot_use_mm_for_euclid_dist")
