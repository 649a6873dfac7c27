"""The parallel branches of a level: how alike their outputs are, and the share of the level's update that each makes.

Chance is measured by permutations that give one branch the outputs of other images. Likeness that survives them is a
property of the branches; likeness above it depends on the image.

Shapes: B images of a mini-batch, C colors, H x W pixels, N tokens, D width, P branches.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitray.inspection.levels import Level, blocks, run_levels
from vitray.inspection.similarity import gram, hsic, mini_batches, u_centered
from vitray.inspection.tokens import chunks
from vitray.models.vit import ViT

Half = Literal["attn", "ffn"]
HALVES: tuple[Half, ...] = get_args(Half)
PERMUTATIONS = 999


class Likeness(NamedTuple):
    """One measure of likeness of two branches, against chance."""

    value: float
    chance: float
    """The mean over permutations of the images."""
    p_value: float
    """The share of permutations at least as far from chance, the unpermuted order counted among them."""


class BranchPair(NamedTuple):
    """The likeness of two branches of one half of a level; branches count from 1."""

    level: int
    half: Half
    first: int
    second: int
    cka: Likeness
    """Linear, unbiased, of all tokens of an image as one vector."""
    cosine: Likeness
    """Between the outputs for the same token, averaged over tokens and images."""


class BranchShare(NamedTuple):
    """The share of one branch in the update of one half of a level: u its sum, h its output, <h, u> / <u, u>."""

    level: int
    half: Half
    branch: int
    share: float
    """The mean over images; the shares of a level's branches sum to 1, and one may be negative."""
    deviation: float
    """The standard deviation over images."""


class BranchReport(NamedTuple):
    """The branches of every level."""

    pairs: list[BranchPair]
    shares: list[BranchShare]


class HalfSums(NamedTuple):
    """The values of one half of a level for a mini-batch, on the CPU."""

    grams: Tensor
    """PBB, U-centered."""
    cosines: list[Tensor]
    """BB of each pair of branches: of the first's images with the second's."""
    shares: Tensor
    """PB."""


BranchSums = list[tuple[HalfSums, ...]]


def compare_branches(vit: ViT, images_BCHW: Tensor, batch: int = 32, seed: int = 0) -> BranchReport:
    """Return the likeness of the branches of every level, and their shares, over mini-batches of about `batch` images.

    CKA needs at least 4 images in each.
    """
    return branch_report([branch_sums(vit, part) for part in mini_batches(images_BCHW, batch)], seed)


def branch_report(sums: Sequence[BranchSums], seed: int = 0) -> BranchReport:
    """Return the likeness and the shares of branches, from the sums of mini-batches.

    The permutations are drawn within mini-batches.
    """
    branches, depth = len(sums[0][0][0].grams), len(sums[0])
    generator = torch.Generator().manual_seed(seed)
    sizes = [each[0][0].grams.shape[-1] for each in sums]
    orders = [torch.stack([torch.randperm(size, generator=generator) for _ in range(PERMUTATIONS)]) for size in sizes]
    pairs, shares = [], []
    for level, half in itertools.product(range(depth), range(len(HALVES))):
        of_batches = [each[level][half] for each in sums]
        for place, (first, second) in enumerate(itertools.combinations(range(branches), 2)):
            grams = [(each.grams[first], each.grams[second]) for each in of_batches]
            likeness = _cka(grams, orders), _cosine([each.cosines[place] for each in of_batches], orders)
            pairs.append(BranchPair(level, HALVES[half], first + 1, second + 1, *likeness))
        shares_PI = torch.cat([each.shares for each in of_batches], dim=1)
        for branch, values in enumerate(shares_PI, start=1):
            mean, deviation = values.mean().item(), values.std().item()
            shares.append(BranchShare(level, HALVES[half], branch, mean, deviation))
    return BranchReport(pairs, shares)


@torch.no_grad()
def branch_sums(vit: ViT, images_BCHW: Tensor) -> BranchSums:
    """Return the sums of one mini-batch of at least 4 images, by level and half."""
    if blocks(vit)[0].branches < 2:
        raise ValueError("the levels of the network have one branch each, expected at least 2 to compare")
    mini_batches(images_BCHW, max(len(images_BCHW), 1))  # refuses too few
    # All parts of the batch advance by a level at a time, so that the outputs of one level exist.
    walks = (run_levels(vit, part) for part in chunks(vit, images_BCHW))
    return [tuple(_sums_of_half(half) for half in _outputs(passed)) for passed in zip(*walks, strict=True)]


def _outputs(passed: Sequence[Level]) -> Iterator[list[list[Tensor]]]:
    """Yield, for each half of a level, the outputs (BND) of each branch in parts of the batch."""
    block = passed[0].block
    inputs, positions = [level.input for level in passed], passed[0].positions
    outputs = [[branch(x_BND, 0.0, positions) for x_BND in inputs] for branch in block.attentions]
    yield outputs
    inputs = [x_BND + sum(parts) for x_BND, *parts in zip(inputs, *outputs, strict=True)]
    yield [[branch(x_BND, 0.0) for x_BND in inputs] for branch in block.feedforwards]


def _sums_of_half(outputs: list[list[Tensor]]) -> HalfSums:
    grams = torch.stack([u_centered(gram(parts)) for parts in outputs])
    units = [F.normalize(torch.cat(parts).double(), dim=2).flatten(1) for parts in outputs]
    tokens = outputs[0][0].shape[1]
    cosines = [first @ second.T / tokens for first, second in itertools.combinations(units, 2)]
    shares = [update_shares(torch.stack(parts)) for parts in zip(*outputs, strict=True)]
    return HalfSums(grams.cpu(), [each.cpu() for each in cosines], torch.cat(shares, dim=1).cpu())


def update_shares(outputs_PBND: Tensor) -> Tensor:
    """Return the share of each branch in the sum of all, PB: <h, u> / <u, u> over the tokens of an image."""
    outputs_PBK = outputs_PBND.double().flatten(2)
    update_BK = outputs_PBK.sum(dim=0)
    return (outputs_PBK * update_BK).sum(dim=2) / update_BK.square().sum(dim=1)


# ---- likeness and chance ---------------------------------------------------------------------------------------------


def _cka(grams: Sequence[tuple[Tensor, Tensor]], orders: Sequence[Tensor]) -> Likeness:
    """Linear CKA of two branches, and of all permutations of the second, over mini-batches of U-centered grams."""
    own = [torch.stack([hsic(each[None], each[None])[0, 0] for each in pair]) for pair in grams]
    scale = torch.stack(own).mean(dim=0).prod().sqrt()
    observed = [hsic(first[None], second[None])[0, 0] for first, second in grams]
    chance = []
    for (first, second), order in zip(grams, orders, strict=True):
        permuted = torch.stack([second[places][:, places] for places in order])
        chance.append(hsic(first[None], permuted)[0])
    return likeness(torch.stack(observed).mean() / scale, torch.stack(chance).mean(dim=0) / scale)


def _cosine(cosines: Sequence[Tensor], orders: Sequence[Tensor]) -> Likeness:
    """The mean cosine of two branches, and of all permutations of the second's images."""
    images = sum(len(each) for each in cosines)
    observed = torch.stack([each.diagonal().sum() for each in cosines]).sum() / images
    chance = [each[torch.arange(len(each)), order].sum(dim=1) for each, order in zip(cosines, orders, strict=True)]
    return likeness(observed, torch.stack(chance).sum(dim=0) / images)


def likeness(observed: Tensor, permuted: Tensor) -> Likeness:
    """Return an observed value against its values under permutations, by a two-sided test."""
    mean = permuted.mean()
    # Rounding must not make the identical permutation look less far away.
    is_as_far = (permuted - mean).abs() >= (observed - mean).abs() - 1e-12
    return Likeness(observed.item(), mean.item(), (1 + is_as_far.sum().item()) / (1 + len(permuted)))
