"""Similarity of representations: linear CKA between the levels of one network or of two, over mini-batches of images.

The estimate of Nguyen et al. (2021): unbiased HSIC averaged over mini-batches, then the ratio of CKA. It does not
depend on the size of the mini-batches, up to noise. Kornblith et al., 2019; unbiased HSIC: Song et al., 2007.

Shapes: B images, N tokens, D width, F features, J and K states of two networks.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from vitray.inspection.tokens import chunks, run_states
from vitray.models.network import AnyNetwork
from vitray.models.other_networks import OtherNetwork

# Unbiased HSIC is estimated from at least this many images.
FEWEST_IMAGES = 4
# Tokens are turned to float64 in slices of this many.
TOKENS_AT_ONCE = 64
# Features that vary by less than rounding, relative to their length, are constant.
ROUNDING = 1e-6

Reading = Literal["tokens", "pooled"]


@torch.no_grad()
def level_grams(vit: AnyNetwork, images_BCHW: Tensor, reading: Reading = "tokens", batch: int = 64) -> list[Tensor]:
    """Return the centered Gram matrices of the states, JBB, of each mini-batch of about `batch` images, at least 4.

    A representation is all tokens of an image as one vector, or only the vector that the network pools. The lists of
    several calls may be joined.
    """
    return [_grams_of_batch(vit, each, reading) for each in mini_batches(images_BCHW, batch)]


def mini_batches(images_BCHW: Tensor, batch: int) -> Sequence[Tensor]:
    """Return images in even mini-batches of at most `batch`, or refuse too few."""
    parts = images_BCHW.tensor_split(math.ceil(len(images_BCHW) / batch) or 1)
    if len(parts[-1]) < FEWEST_IMAGES:
        got = f"got {len(images_BCHW)} images in {len(parts)} mini-batches"
        raise ValueError(f"{got}, expected at least {FEWEST_IMAGES} in each")
    return parts


def cka(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Return the linear CKA between every two states, JK, of a network and itself, or of two.

    Both lists hold the Gram matrices of the same mini-batches. CKA is at most 1 in absolute value, and nan for a state
    that is the same for all images.
    """
    pairs = list(zip(first, second, strict=True))
    cross_JK = torch.stack([hsic(*pair) for pair in pairs]).mean(dim=0)
    first_J, second_K = (
        torch.stack([hsic(each, each).diagonal() for each in grams]).mean(dim=0) for grams in (first, second)
    )
    return cross_JK / (first_J[:, None] * second_K).sqrt()


def _grams_of_batch(vit: AnyNetwork, images_BCHW: Tensor, reading: Reading) -> Tensor:
    grams = []
    # All parts of the batch advance by a level at a time, so that one state of the batch exists.
    for parts in zip(*(run_states(vit, chunk) for chunk in chunks(vit, images_BCHW)), strict=True):
        if reading == "pooled":
            parts = [_pooled(vit, x_BND) for x_BND in parts]
        grams.append(u_centered(gram(parts)))
    return torch.stack(grams)


def _pooled(vit: AnyNetwork, x_BND: Tensor) -> Tensor:
    """The class token or the mean of the patches, B1D, before the norm."""
    if isinstance(vit, OtherNetwork):
        return x_BND.mean(dim=1, keepdim=True)
    if vit.model.pool == "token":
        return x_BND[:, :1]
    return x_BND[:, vit.num_prefix :].mean(dim=1, keepdim=True)


def gram(parts: Sequence[Tensor]) -> Tensor:
    """Return the linear Gram matrix, BB, of the centered tokens of a batch in parts, BND."""
    images, tokens = sum(len(part) for part in parts), parts[0].shape[1]
    gram_BB = torch.zeros(images, images, dtype=torch.float64, device=parts[0].device)
    for start in range(0, tokens, TOKENS_AT_ONCE):
        rows_BF = torch.cat([part[:, start : start + TOKENS_AT_ONCE].double().flatten(1) for part in parts])
        centered_BF = rows_BF - rows_BF.mean(dim=0)
        if centered_BF.norm() > ROUNDING * rows_BF.norm():
            gram_BB += centered_BF @ centered_BF.T
    return gram_BB


def u_centered(gram_BB: Tensor) -> Tensor:
    """Return a Gram matrix without its diagonal, centered so that every row sums to 0."""
    images = len(gram_BB)
    gram_BB = gram_BB - gram_BB.diag().diag()
    rows_B = gram_BB.sum(dim=1) / (images - 2)
    centered_BB = gram_BB - rows_B[:, None] - rows_B + rows_B.sum() / (images - 1)
    return centered_BB - centered_BB.diag().diag()


def hsic(first_JBB: Tensor, second_KBB: Tensor) -> Tensor:
    """Return the unbiased HSIC, JK, of U-centered Gram matrices of at least 4 images."""
    images = first_JBB.shape[1]
    return first_JBB.flatten(1) @ second_KBB.flatten(1).T / (images * (images - 3))
