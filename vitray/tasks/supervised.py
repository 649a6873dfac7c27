"""Supervised training: a module whose forward is the classification loss, from labels, a teacher or two submodels.

Shapes: B images, S images of both submodels, C colors, H x W pixels, K classes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config import Run
from vitray.config.augmentation import Normalize
from vitray.config.classification import Asymmetric, Distillation, Finetune, Supervised
from vitray.models.network import AnyNetwork, build_network
from vitray.models.products import Products
from vitray.models.vit import TwoHeads, ViT
from vitray.weights.pretrained import TeacherSource


class Classification(nn.Module):
    """A network that learns classes from labels, and from a teacher where the run names one."""

    def __init__(self, run: Run, teacher: "Teacher | None" = None) -> None:
        super().__init__()
        assert isinstance(run.task, Supervised | Finetune)
        self.settings, self.normalize, self.teacher = run.task, run.data.normalize, teacher
        self.loss = LOSSES[run.task.loss]
        self.vit = build_network(run.model)
        weights = self.settings.class_weights
        self.class_weights: Tensor | None
        """The weight of each class (K), where they differ."""
        has_weights = isinstance(weights, tuple)
        self.register_buffer("class_weights", torch.tensor(weights) if has_weights else None, persistent=False)

    def forward(self, images_BCHW: Tensor, targets_BK: Tensor) -> Tensor:
        """Return the mean loss over the batch."""
        distill, cosub = self.settings.distill, self.settings.cosub
        if cosub is not None:
            return self.cosub_loss(images_BCHW, targets_BK, cosub.weight)
        if distill is None:
            return self.label_loss(self.vit(images_BCHW), targets_BK)
        assert self.teacher is not None, "a task without its teacher only evaluates"
        if isinstance(self.vit, ViT) and isinstance(self.vit.head, TwoHeads):
            logits_BK, distilled_logits_BK = self.vit.head.both(self.vit.pooled(self.vit.tokens(images_BCHW)))
        else:
            logits_BK = distilled_logits_BK = self.vit(images_BCHW)
        teacher_logits_BK = self.teacher.logits(images_BCHW, self.normalize)
        label_loss = self.label_loss(logits_BK, targets_BK)
        taught_loss = distillation_loss(distilled_logits_BK, teacher_logits_BK, distill)
        return (1 - distill.weight) * label_loss + distill.weight * taught_loss

    def before_step(self, step: int, epoch: int, total: int) -> None:
        """Follow no schedule."""

    def after_backward(self) -> None:
        """Keep all gradients."""

    def after_step(self) -> None:
        """Change nothing but what the optimizer has."""

    def read_metrics(self, *, training: bool) -> dict[str, float]:
        """Return further numbers since the last call, in one mode: none."""
        del training
        return {}

    def count(self, products: Products) -> None:
        """Count the products of a training step for an image, with those of its second submodel or of its teacher."""
        self.vit.count(products)
        if self.settings.cosub is not None:
            products.forward, products.backward = 2 * products.forward, 2 * products.backward
        if self.teacher is not None:
            products.frozen(self.teacher.network.count)

    def cosub_loss(self, images_BCHW: Tensor, targets_BK: Tensor, weight: float) -> Tensor:
        """Return the mean loss of two submodels: drop path is drawn anew for the second copy of each image."""
        logits_SK = self.vit(images_BCHW.repeat(2, 1, 1, 1))
        peer_logits_SK = logits_SK.roll(len(images_BCHW), dims=0)
        label_loss = self.label_loss(logits_SK, targets_BK.repeat(2, 1))
        return (1 - weight) * label_loss + weight * self.loss.of_peer(logits_SK, peer_logits_SK.detach())

    def label_loss(self, logits_BK: Tensor, targets_BK: Tensor) -> Tensor:
        """Return the mean loss of logits by the labels."""
        return self.loss.of_labels(logits_BK, targets_BK, self.settings, self.class_weights)


# ---- losses of classes, a row each -----------------------------------------------------------------------------------


Labeled = Supervised | Finetune


def soft_cross_entropy(logits_BK: Tensor, targets_BK: Tensor, task: Labeled, weights_K: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy with soft targets, computed in float32; each class's term has its weight.

    Of several labels, the present classes have equal shares of the target, an unknown class is none of the softmax's,
    and an image without a label has no loss. The mean is over all images.
    """
    logits_BK, targets_BK = logits_BK.float(), targets_BK.float()
    if task.labels == "one":
        return F.cross_entropy(logits_BK, targets_BK, weights_K, label_smoothing=task.smoothing)
    is_known_BK = ~targets_BK.isnan()
    targets_BK = targets_BK.nan_to_num(0.0)
    total_B1 = targets_BK.sum(1, keepdim=True)
    even_BK = is_known_BK / is_known_BK.sum(1, keepdim=True).clamp(min=1)
    shares_BK = (1 - task.smoothing) * targets_BK / total_B1.clamp(min=1e-12) + task.smoothing * even_BK
    # Finite, as infinity times a share of zero would be NaN.
    log_p_BK = logits_BK.masked_fill(~is_known_BK, torch.finfo(torch.float32).min / 2).log_softmax(1)
    if weights_K is not None:
        log_p_BK = log_p_BK * weights_K
    return -((shares_BK * log_p_BK).masked_fill(~is_known_BK, 0.0).sum(1) * (total_B1[:, 0] > 0)).mean()


def smoothed_presence(targets_BK: Tensor, task: Labeled) -> tuple[Tensor, Tensor]:
    """Return the targets of a loss of each class, and weights that are 0 where a class is unknown.

    Every class with a share of a mixed target counts as present. Smoothing is applied afterwards. DeiT's code applies
    it before, so that every class counts as present (`--bce-loss --smoothing 0.1`).
    """
    present_BK = (targets_BK > 0).float()
    return (1 - task.smoothing) * present_BK + task.smoothing / present_BK.shape[1], (~targets_BK.isnan()).float()


def binary_cross_entropy(
    logits_BK: Tensor, targets_BK: Tensor, task: Labeled, weights_K: Tensor | None = None
) -> Tensor:
    """Return the mean binary cross-entropy over all images and classes, computed in float32; a present class has its
    weight.

    An unknown class adds nothing to the sum: the number that divides it is the same in every batch.
    """
    smoothed_BK, known_BK = smoothed_presence(targets_BK, task)
    return F.binary_cross_entropy_with_logits(logits_BK.float(), smoothed_BK, known_BK, pos_weight=weights_K)


def asymmetric_loss(logits_BK: Tensor, targets_BK: Tensor, task: Labeled, weights_K: Tensor | None = None) -> Tensor:
    """Return the mean asymmetric loss over all images and classes, computed in float32; unknown ones add nothing, and a
    present class has its weight."""
    settings, logits_BK = task.asymmetric or Asymmetric(), logits_BK.float()
    smoothed_BK, known_BK = smoothed_presence(targets_BK, task)
    log_p_BK, log_not_p_BK = F.logsigmoid(logits_BK), F.logsigmoid(-logits_BK)
    present_BK = -(settings.focus_present * log_not_p_BK).exp() * log_p_BK
    if weights_K is not None:
        present_BK = present_BK * weights_K
    if settings.shift:
        q_BK = (logits_BK.sigmoid() - settings.shift).clamp(min=1e-8)  # a power of 0 has no gradient
        absent_BK = -(q_BK**settings.focus_absent) * (1 - q_BK).log()
    else:
        absent_BK = -(settings.focus_absent * log_p_BK).exp() * log_not_p_BK
    return ((smoothed_BK * present_BK + (1 - smoothed_BK) * absent_BK) * known_BK).mean()


def softmax_of_peer(logits_BK: Tensor, peer_logits_BK: Tensor) -> Tensor:
    """Return -sum_k q(k) log p(k), the mean over images, with q and p the softmax of the other's and the own logits."""
    return F.cross_entropy(logits_BK.float(), peer_logits_BK.float().softmax(dim=1))


def sigmoids_of_peer(logits_BK: Tensor, peer_logits_BK: Tensor) -> Tensor:
    """Return the binary cross-entropy with the other's sigmoids, the mean over images and classes."""
    return F.binary_cross_entropy_with_logits(logits_BK.float(), peer_logits_BK.float().sigmoid())


class Loss(NamedTuple):
    """The functions of a loss, each computed in float32."""

    of_labels: Callable[[Tensor, Tensor, Labeled, Tensor | None], Tensor]
    """Of logits, and of soft targets, which are NaN for an unknown class; by the settings of the task, and by the
    weights of the classes, if they differ."""
    of_peer: Callable[[Tensor, Tensor], Tensor]
    """Of logits and another network's logits, which have no gradient, without label smoothing."""


LOSSES = {
    "softmax": Loss(soft_cross_entropy, softmax_of_peer),
    "bce": Loss(binary_cross_entropy, sigmoids_of_peer),
    "asymmetric": Loss(asymmetric_loss, sigmoids_of_peer),
}


# ---- distillation (DeiT) ---------------------------------------------------------------------------------------------


class Teacher:
    """A trained network beside a task. The class is no module, so that the task neither trains nor saves it."""

    def __init__(self, network: AnyNetwork, normalize: Normalize) -> None:
        self.network, self.normalize = network.eval().requires_grad_(False), normalize

    @classmethod
    def of(cls, source: TeacherSource) -> "Teacher":
        """Return the teacher of a source."""
        return cls(source.network, source.normalize)

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
