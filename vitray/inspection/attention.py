"""Attention: the patches that a network's output attends to, and how far each head looks.

Rollout multiplies the maps of all levels (Abnar and Zuidema, 2020; ViT paper, D.7). The map of a level is the identity,
for the residual stream, plus the mean over heads of its attention, row-normalized. The branches of a parallel level all
add to one residual stream, so that its map is row-normalize(I + sum over branches of the mean over heads). Attention
distance is the mean distance in pixels between a query patch and the patches it attends to (ViT paper, D.7).

Shapes: B images, C colors, H x W pixels, N tokens, M patches, R x Q rows and columns of patches, K classes, L levels, P
branches of a level; of attention weights (BHNN) and results (LPHB), H heads.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitray.inspection.levels import blocks, check_levels, check_network, grid_of, images_at_once, run_levels
from vitray.models.branches import Trace
from vitray.models.vit import ViT

# ---- attention maps --------------------------------------------------------------------------------------------------


class AttentionMaps(NamedTuple):
    """The attention from a network's output to the patches of each image."""

    logits: Tensor
    """BK; features instead, for a network without a head."""
    rollout: Tensor
    """BRQ."""
    last_level: Tensor
    """BRQ: the attention of the last level alone, averaged over heads and branches."""


@torch.no_grad()
def attention_maps(vit: ViT, images_BCHW: Tensor) -> AttentionMaps:
    """Return attention rollout, the attention of the last level and the logits of a batch of normalized images."""
    parts = [_maps_of_chunk(vit, chunk) for chunk in images_BCHW.split(images_at_once(vit, images_BCHW))]
    return AttentionMaps(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _maps_of_chunk(vit: ViT, images_BCHW: Tensor) -> AttentionMaps:
    grid, rollout_BNN, last_BNN, x_BND = grid_of(vit, images_BCHW), None, images_BCHW, images_BCHW
    for level in run_levels(vit, images_BCHW):
        sum_BNN = sum_of_branches(level.attention())
        rollout_BNN = rollout_through(rollout_BNN, sum_BNN)
        last_BNN, x_BND = sum_BNN / level.block.branches, level.output
    assert rollout_BNN is not None, "a network has at least one level"
    query_N = output_query(vit, rollout_BNN)
    rollout_BRQ, last_BRQ = (_on_grid(vit, query_N @ each_BNN, grid) for each_BNN in (rollout_BNN, last_BNN))
    return AttentionMaps(vit.head(vit.pooled(x_BND)), rollout_BRQ, last_BRQ)


def sum_of_branches(weights: Iterable[Tensor]) -> Tensor:
    """Return the sum over branches of the mean over heads, BNN, of attention weights (BHNN) of each branch."""
    means = (weights_BHNN.mean(dim=1) for weights_BHNN in weights)
    return functools.reduce(torch.add, means)


def rollout_through(rollout_BNN: Tensor | None, sum_BNN: Tensor) -> Tensor:
    """Return the rollout through one more level, from the rollout before it and the level's sum; rows sum to one."""
    map_BNN = sum_BNN + torch.eye(sum_BNN.shape[-1], dtype=sum_BNN.dtype, device=sum_BNN.device)
    map_BNN = map_BNN / map_BNN.sum(dim=-1, keepdim=True)
    return map_BNN if rollout_BNN is None else map_BNN @ rollout_BNN


def output_query(vit: ViT, like: Tensor) -> Tensor:
    """Return the share of each token in the pooled output, N: the class token alone, or the mean of the patches."""
    tokens, first = like.shape[-1], vit.num_prefix
    query_N = torch.zeros(tokens, dtype=like.dtype, device=like.device)
    if vit.model.pool == "token":
        query_N[0] = 1
    else:
        query_N[first:] = 1 / (tokens - first)
    return query_N


def gradient_rollout(vit: ViT, images_BCHW: Tensor, classes_B: Tensor | None = None) -> Tensor:
    """Return the gradient-weighted maps, BRQ, that explain a class of each image: by default the predicted one.

    Each level adds to the relevance R the mean over heads of the positive part of attention times the gradient of the
    class's logit with respect to it: R <- R + A R (Chefer et al., 2021); branches are summed.
    """
    check_network(vit)
    if vit.model.num_classes is None:
        raise ValueError("gradient-weighted maps explain a class, and the network has no head")
    if classes_B is None:
        classes_B = predicted(vit, images_BCHW)
    at_once = max(1, images_at_once(vit, images_BCHW) // (2 * blocks(vit)[0].branches))
    chunks = zip(images_BCHW.split(at_once), classes_B.split(at_once), strict=True)
    return torch.cat([_gradient_of_chunk(vit, *chunk) for chunk in chunks])


@torch.no_grad()
def predicted(vit: ViT, images_BCHW: Tensor) -> Tensor:
    """Return the class with the largest logit of each image, B."""
    return vit(images_BCHW).argmax(dim=1)


def _gradient_of_chunk(vit: ViT, images_BCHW: Tensor, classes_B: Tensor) -> Tensor:
    """The maps of a chunk. The backward pass recomputes one level at a time, so that one level's graph exists."""
    with torch.no_grad():
        passed = list(run_levels(vit, images_BCHW))
    with torch.enable_grad():
        x_BND = passed[-1].output.detach().requires_grad_()
        logits_BK = vit.head(vit.pooled(x_BND))
        chosen = logits_BK.gather(1, classes_B.to(logits_BK.device)[:, None]).sum()
        (gradient_BND,) = torch.autograd.grad(chosen, x_BND)
    relevance_BN = output_query(vit, x_BND[..., 0]).expand(len(x_BND), -1)
    for level in reversed(passed):
        with torch.enable_grad():
            trace: Trace = {}
            x_BND = level.input.detach().requires_grad_()
            output_BND = level.block(x_BND, trace, "block", level.positions)
            gradient_BND, *gradients = torch.autograd.grad(output_BND, [x_BND, *trace.values()], gradient_BND)
        pairs = zip(trace.values(), gradients, strict=True)
        sum_BNN = sum_of_branches((weights.detach() * gradient).relu() for weights, gradient in pairs)
        relevance_BN = relevance_BN + (relevance_BN[:, None] @ sum_BNN)[:, 0]
    return _on_grid(vit, relevance_BN, grid_of(vit, images_BCHW))


def _on_grid(vit: ViT, map_BN: Tensor, grid: tuple[int, int]) -> Tensor:
    return map_BN[:, vit.num_prefix :].unflatten(1, grid)


# ---- attention distance ----------------------------------------------------------------------------------------------


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
