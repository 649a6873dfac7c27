"""Losses of classes, a row each: by labels, and by the logits of another network.

Shapes: B images, K classes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


def soft_cross_entropy(logits_BK: Tensor, targets_BK: Tensor, smoothing: float) -> Tensor:
    """Return the mean cross-entropy with soft targets, computed in float32."""
    return F.cross_entropy(logits_BK.float(), targets_BK.float(), label_smoothing=smoothing)


def binary_cross_entropy(logits_BK: Tensor, targets_BK: Tensor, smoothing: float) -> Tensor:
    """Return the mean binary cross-entropy over images and classes, computed in float32.

    Every class with a share of a mixed target counts as present. Smoothing is applied afterwards. DeiT's code applies
    it before, so that every class counts as present (`--bce-loss --smoothing 0.1`).
    """
    present_BK = (targets_BK > 0).float()
    smoothed_BK = (1 - smoothing) * present_BK + smoothing / present_BK.shape[1]
    return F.binary_cross_entropy_with_logits(logits_BK.float(), smoothed_BK)


def softmax_of_peer(logits_BK: Tensor, peer_logits_BK: Tensor) -> Tensor:
    """Return -sum_k q(k) log p(k), the mean over images, with q and p the softmax of the other's and the own logits."""
    return F.cross_entropy(logits_BK.float(), peer_logits_BK.float().softmax(dim=1))


def sigmoids_of_peer(logits_BK: Tensor, peer_logits_BK: Tensor) -> Tensor:
    """Return the binary cross-entropy with the other's sigmoids, the mean over images and classes."""
    return F.binary_cross_entropy_with_logits(logits_BK.float(), peer_logits_BK.float().sigmoid())


class Loss(NamedTuple):
    """The functions of a loss, each computed in float32."""

    of_labels: Callable[[Tensor, Tensor, float], Tensor]
    """Of logits, soft targets and label smoothing."""
    of_peer: Callable[[Tensor, Tensor], Tensor]
    """Of logits and another network's logits, which have no gradient, without label smoothing."""


LOSSES = {
    "softmax": Loss(soft_cross_entropy, softmax_of_peer),
    "bce": Loss(binary_cross_entropy, sigmoids_of_peer),
}
