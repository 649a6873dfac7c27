"""Supervised training: a module whose forward is the classification loss, from labels, a teacher or two submodels.

Shapes: B images, S images of both submodels, C colors, H x W pixels, K classes.
"""

from torch import Tensor, nn

from vitray.config import Run
from vitray.config.classification import Finetune, Supervised
from vitray.models.network import build_network
from vitray.models.products import Products
from vitray.models.vit import TwoHeads, ViT
from vitray.tasks.distillation import Teacher, distillation_loss
from vitray.tasks.losses import LOSSES


class Classification(nn.Module):
    """A network that learns classes from labels, and from a teacher where the run names one."""

    def __init__(self, run: Run, teacher: Teacher | None = None) -> None:
        super().__init__()
        assert isinstance(run.task, Supervised | Finetune)
        self.settings, self.normalize, self.teacher = run.task, run.data.normalize, teacher
        self.loss = LOSSES[run.task.loss]
        self.vit = build_network(run.model)

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
        label_loss, taught_loss = (
            self.label_loss(logits_BK, targets_BK),
            distillation_loss(distilled_logits_BK, teacher_logits_BK, distill),
        )
        return (1 - distill.weight) * label_loss + distill.weight * taught_loss

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
        return self.loss.of_labels(logits_BK, targets_BK, self.settings.smoothing)
