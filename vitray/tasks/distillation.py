"""Distillation (DeiT): the teacher, and the loss with its logits as targets.

Shapes: B images, C colors, H x W pixels, K classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitray.config.augmentation import Normalize
from vitray.config.classification import Distillation
from vitray.models.network import AnyNetwork


class Teacher:
    """A trained network beside a task. The class is no module, so that the task neither trains nor saves it."""

    def __init__(self, network: AnyNetwork, normalize: Normalize) -> None:
        self.network, self.normalize = network.eval().requires_grad_(False), normalize

    def to(self, device: torch.device) -> "Teacher":
        """Move the network to a device, and return the teacher."""
        self.network.to(device)
        return self

    @torch.no_grad()
    def logits(self, images_BCHW: Tensor, normalize: Normalize) -> Tensor:
        """Return the teacher's logits, computed in bfloat16; `normalize` is the normalization of the images."""
        images_BCHW = renormalize(images_BCHW, normalize, self.normalize)
        with torch.autocast(images_BCHW.device.type, torch.bfloat16):
            return self.network(images_BCHW).float()


def renormalize(images_BCHW: Tensor, before: Normalize, after: Normalize) -> Tensor:
    """Return normalized images under another normalization."""
    if before == after:
        return images_BCHW
    old_mean, old_std, new_mean, new_std = (
        torch.tensor(values, device=images_BCHW.device).view(3, 1, 1)
        for values in (before.mean, before.std, after.mean, after.std)
    )
    return (images_BCHW * old_std + old_mean - new_mean) / new_std


def distillation_loss(logits_BK: Tensor, teacher_BK: Tensor, settings: Distillation) -> Tensor:
    """Return the mean loss with the teacher's answers as targets, computed in float32.

    Hard: -log p(k), k the teacher's most probable class. Soft: T^2 sum_k q(k) log(q(k) / p(k)), with q and p the
    softmax of the teacher's and the network's logits / T.
    """
    logits_BK, teacher_BK = logits_BK.float(), teacher_BK.float()
    if settings.target == "hard":
        return F.cross_entropy(logits_BK, teacher_BK.argmax(dim=1))
    log_p_BK = F.log_softmax(logits_BK / settings.temperature, dim=1)
    log_q_BK = F.log_softmax(teacher_BK / settings.temperature, dim=1)
    return settings.temperature**2 * F.kl_div(log_p_BK, log_q_BK, reduction="batchmean", log_target=True)
