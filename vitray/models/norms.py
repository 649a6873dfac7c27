"""The norms of the blocks: LayerNorm or RMSNorm, with or without a bias.

Shapes: B images, N tokens, D width, H heads, P branches whose heads are one after another, d channels of a head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = nn.LayerNorm | nn.RMSNorm


class RMSNorm(nn.RMSNorm):
    """RMSNorm that computes at least in the type of its weight.

    Under autocast the queries and keys that qk_norm normalizes are bfloat16. torch has no fused kernel for an input and
    a weight of different types: it would warn, and round to bfloat16 before the weight.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input."""
        return super().forward(x.to(torch.promote_types(x.dtype, self.weight.dtype)))


def build_norm(kind: str, width: int, eps: float, bias: bool) -> Norm:
    """Return a norm over `width` channels; an rmsnorm has no bias."""
    return RMSNorm(width, eps=eps) if kind == "rmsnorm" else nn.LayerNorm(width, eps=eps, bias=bias)


def bias_of(norm: Norm) -> Tensor | None:
    """Return the bias of a norm, if it has one."""
    return norm.bias if isinstance(norm, nn.LayerNorm) else None


def normalize(x_BND: Tensor, norm: Norm) -> Tensor:
    """Return the output of a norm without its weight and bias."""
    if isinstance(norm, nn.RMSNorm):
        x_BND = x_BND.to(torch.promote_types(x_BND.dtype, norm.weight.dtype))
        return F.rms_norm(x_BND, norm.normalized_shape, eps=norm.eps)
    return F.layer_norm(x_BND, norm.normalized_shape, eps=norm.eps)


def normalize_heads(x_BHNd: Tensor, norms: Sequence[Norm]) -> Tensor:
    """Return the normalized heads of several branches, each by the weight and bias of its own branch."""
    x_BPHNd = normalize(x_BHNd, norms[0]).unflatten(1, (len(norms), -1))
    x_BPHNd = x_BPHNd * torch.stack([norm.weight for norm in norms])[:, None, None]
    biases = [bias for norm in norms if (bias := bias_of(norm)) is not None]
    if biases:
        x_BPHNd = x_BPHNd + torch.stack(biases)[:, None, None]
    return x_BPHNd.flatten(1, 2)
