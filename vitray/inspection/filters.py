"""The filters of a stem, and their leading principal components (ViT paper, figure 7).

A linear stem has a filter for each channel of a token. A stem with nonlinear layers has none, so its effective filters
stand for them: the derivatives of a token with respect to the pixels that it reads, at an image of one color.

Shapes: D channels of a token, K components, B images, N patches, C colors, H x W pixels.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.errors import ConfigError
from vitray.inspection.levels import check_network
from vitray.inspection.tokens import chunks
from vitray.models.network import AnyNetwork
from vitray.models.vit import ViT

# Filters whose derivatives are computed in one backward pass.
FILTERS_AT_ONCE = 64


class ReceptiveField(NamedTuple):
    """The pixels that a token reads along either axis: the first, relative to its patch's first, and their number."""

    start: int
    size: int


class EffectiveStem(NamedTuple):
    """The linearization of a stem at an image of one color: an affine map from pixels to tokens."""

    filters: Tensor
    bias: Tensor
    field: ReceptiveField


class Components(NamedTuple):
    """The leading principal components of filters, largest variance first."""

    components: Tensor
    """Of length 1; the sign makes the largest entry positive."""
    shares: Tensor
    """Of the variance of the filters around their mean."""


class StemFilters(NamedTuple):
    """The leading components of a stem's effective filters."""

    components: Components
    color: Tensor
    """The normalized color around which the filters are taken; those of a linear stem do not depend on it."""
    linear_share: float | None
    """Of the variance of tokens, predicted by the effective filters; None without images."""


def first_filters(network: AnyNetwork) -> Tensor | None:
    """Return the filters of the first convolution of a network, DCHW; None without one."""
    return next((layer.weight.detach() for layer in network.modules() if isinstance(layer, nn.Conv2d)), None)


def stem_filters(vit: ViT, images_BCHW: Tensor | None = None, number: int = 28) -> StemFilters:
    """Return the leading components of a stem's filters around the mean color of normalized images.

    Without images, they are taken around 0, the mean color of the normalization.
    """
    color_C = torch.zeros(3) if images_BCHW is None else images_BCHW.mean(dim=(0, 2, 3))
    stem = effective_stem(vit, color_C)
    share = None if images_BCHW is None else linear_share(vit, images_BCHW, stem)
    return StemFilters(principal_components(stem.filters, number), color_C, share)


def receptive_field(vit: ViT) -> ReceptiveField:
    """Return the pixels that a token reads."""
    start, size, step = 0, 1, 1
    for kernel, stride, padding, _, pool in vit.model.shape.convolutions:
        start, size, step = start - padding * step, size + (kernel - 1) * step, step * stride
        size, step = size + (pool - 1) * step, step * pool
    return ReceptiveField(start, size)


def effective_stem(vit: ViT, color_C: Tensor) -> EffectiveStem:
    """Return the effective filters of a stem around a normalized color; those of a linear stem are its weights."""
    check_network(vit)
    if vit.model.shape.is_hybrid:
        raise ConfigError(f"{vit.model.name}: a token of its ResNet reads the whole image, so its stem has no filters")
    if vit.model.shape.has_pools:
        raise ConfigError(
            f"{vit.model.name}: at an image of one color its max pools choose among equal values, so its stem has no"
            " derivative there; first_filters are those of its first convolution"
        )
    field, patch, width = receptive_field(vit), vit.stem.patch, vit.model.shape.size
    # The middle token of an image so large that its receptive field does not reach the padding.
    margin = math.ceil(max(-field.start, field.start + field.size - patch, 0) / patch)
    side, first = (2 * margin + 1) * patch, margin * patch + field.start
    token = margin * (2 * margin + 1) + margin
    image_CHW = color_C.to(vit.norm.weight)[:, None, None].expand(3, side, side)
    filters = []
    for channels in torch.arange(width).split(FILTERS_AT_ONCE):
        # A copy of the image for each channel: the derivatives of all of them are one backward pass.
        with torch.enable_grad():
            copies_DCHW = image_CHW.repeat(len(channels), 1, 1, 1).requires_grad_()
            tokens_DND, _ = vit.stem(copies_DCHW)
            response = tokens_DND[torch.arange(len(channels)), token, channels].sum()
            (gradient_DCHW,) = torch.autograd.grad(response, copies_DCHW)
        filters.append(gradient_DCHW[..., first : first + field.size, first : first + field.size])
    filters_DCHW = torch.cat(filters)
    with torch.no_grad():
        token_D = vit.stem(image_CHW[None])[0][0, token]
        bias_D = token_D - filters_DCHW.sum(dim=(2, 3)) @ image_CHW[:, 0, 0]
    return EffectiveStem(filters_DCHW, bias_D, field)


def principal_components(filters_DCHW: Tensor, number: int = 28) -> Components:
    """Return up to `number` principal components of filters, in float64: pixel directions, centered over filters."""
    flat_DP = filters_DCHW.double().flatten(1)
    _, values_K, rows_KP = torch.linalg.svd(flat_DP - flat_DP.mean(dim=0), full_matrices=False)
    largest_K1 = rows_KP.gather(1, rows_KP.abs().argmax(dim=1, keepdim=True))
    components_KCHW = (rows_KP * largest_K1.sign()).unflatten(1, filters_DCHW.shape[1:])
    shares_K = values_K.square() / values_K.square().sum()
    return Components(components_KCHW[:number], shares_K[:number])


@torch.no_grad()
def linear_share(vit: ViT, images_BCHW: Tensor, stem: EffectiveStem) -> float:
    """Return the share of the variance of tokens that an effective stem predicts on images: 1 for a linear stem.

    It is negative for a prediction that is worse than the mean token.
    """
    count, error = 0, 0.0
    sum_D = square_D = torch.zeros(vit.model.shape.size, dtype=torch.float64, device=images_BCHW.device)
    for chunk_BCHW in chunks(vit, images_BCHW):
        tokens_BND = vit.stem(chunk_BCHW)[0].double()
        # Zeros around the image, as the stem's own padding; behind its last pixel only as far as the fields reach.
        before, after = -stem.field.start, max(stem.field.start + stem.field.size - vit.stem.patch, 0)
        padded_BCHW = F.pad(chunk_BCHW, (before, after, before, after))
        predicted_BDHW = F.conv2d(padded_BCHW, stem.filters, stem.bias, stride=vit.stem.patch)
        error += float((tokens_BND - predicted_BDHW.flatten(2).mT).square().sum())
        count += tokens_BND.shape[0] * tokens_BND.shape[1]
        sum_D = sum_D + tokens_BND.sum(dim=(0, 1))
        square_D = square_D + tokens_BND.square().sum(dim=(0, 1))
    return 1 - error / float((square_D - sum_D.square() / count).sum())
