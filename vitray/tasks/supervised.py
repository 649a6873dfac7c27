"""Supervised training: a module whose forward is the classification loss.

Shapes: B images, C colours, H x W pixels, K classes.
"""

from typing import assert_never

import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config import Run
from vitray.config.training import Finetune, SupervisedSettings
from vitray.models.network import build_network


class Supervised(nn.Module):
    """A network that learns classes from labels."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        assert isinstance(run.task, SupervisedSettings | Finetune)
        self.settings = run.task
        self.vit = build_network(run.model)

    def forward(self, images_BCHW: Tensor, targets_BK: Tensor) -> Tensor:
        """Return the mean loss over the batch."""
        logits_BK = self.vit(images_BCHW)
        match self.settings.loss:
            case "softmax":
                return soft_cross_entropy(logits_BK, targets_BK, self.settings.smoothing)
            case "bce":
                return binary_cross_entropy(logits_BK, targets_BK, self.settings.smoothing)
            case _:
                assert_never(self.settings.loss)


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
