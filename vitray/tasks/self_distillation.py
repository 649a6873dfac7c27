"""Self-distillation: a network learns what its own average, the teacher, says of other views of the same image.

DINO compares whole views, iBOT the patches that are masked with what the teacher sees in their places, and KoLeo keeps
different images apart. All three are of the whole batch: sums, centers and neighbors are those of all workers.
Shapes: B images of this worker, V global views, v local ones, C colors, N patches, M masked patches of all global
views, D width, K prototypes, S samples, W workers, R rows of the largest share.
"""

import copy
import math
from functools import partial
from typing import NamedTuple, Self, assert_never

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vitray.config import Run
from vitray.config.sections import in_steps
from vitray.config.self_supervised import TEACHER_TEMPERATURE, SelfDistillation, by_data, length_alone
from vitray.models.positions import VisiblePatches
from vitray.models.precision import at_least_float32, without_autocast
from vitray.models.products import Products
from vitray.models.stems import sum_over_workers
from vitray.models.vit import ViT, initialize_linear
from vitray.weights.freezing import prepare

SINKHORN_ITERATIONS = 3
# Added to squared distances: the logarithm of 0, and its gradient, are infinite where two images are equal.
LEAST_SQUARE = 1e-16
# Of what `read_metrics` returns the means.
PARTS = ("dino", "ibot", "koleo", "entropy")


class Outputs(NamedTuple):
    """The cosines with the prototypes; None for a part of the loss that is off."""

    whole: Tensor | None
    """Of views, SK."""
    patches: Tensor | None
    """Of masked patches, MK."""


class SelfDistilled(nn.Module):
    """A ViT and its heads, which learn, and the averages of both, which teach."""

    center: Tensor
    patch_center: Tensor
    temperature: Tensor
    """Of the teacher; among the weights, which are scored with it, and a tensor, which compiled code need not know."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        task, model = run.task, run.model
        assert isinstance(task, SelfDistillation)
        self.settings, self.views, self.batch = task, run.data.chosen_views, run.optim.batch
        self.row = by_data(1)  # for settings that no dataset has completed
        width, prototypes = model.shape.size, task.prototypes or self.row.prototypes
        hidden, bottleneck = task.hidden_width(width), task.bottleneck_width(width)
        self.vit = ViT(model)
        if task.weights is not None:
            prepare(self.vit, task)
        self.head = PrototypeHead(width, hidden, bottleneck, prototypes)
        self.patch_head = None if task.shared_head else PrototypeHead(width, hidden, bottleneck, prototypes)
        self.mask_token = nn.Parameter(nn.init.trunc_normal_(torch.empty(width), std=0.02)) if task.ibot else None
        self.teacher = Teacher(self.vit, self.head, self.patch_head)
        self.register_buffer("center", torch.zeros(prototypes))
        self.register_buffer("patch_center", torch.zeros(prototypes))
        self.register_buffer("temperature", torch.tensor(TEACHER_TEMPERATURE, dtype=torch.float64))
        self.momentum, self.holds_prototypes, self.holds_network = 1.0, False, False
        self._sums = dict.fromkeys((True, False), torch.zeros(len(PARTS) + 1, dtype=torch.float64))
        # Not a buffer: each worker counts its own.
        self._used = dict.fromkeys((True, False), torch.zeros(prototypes, dtype=torch.int64))

    # ---- the steps of a run ------------------------------------------------------------------------------------------

    def before_step(self, step: int, epoch: int, total: int) -> None:
        """Set what changes with the steps."""
        task = self.settings
        first = self.row.momentum if task.momentum is None else task.momentum
        self.momentum = 1 - (1 - first) * (1 + math.cos(math.pi * step / total)) / 2
        start, end = task.teacher_temperature or (TEACHER_TEMPERATURE, self.row.temperature)
        warmup = total / 10 if task.temperature_warmup is None else in_steps(task.temperature_warmup, epoch)
        self.temperature.fill_(start + (end - start) * min(1.0, step / max(warmup, 1)))
        self.holds_prototypes = step < in_steps(task.freeze_prototypes, epoch)
        self.holds_network = step < in_steps(length_alone(task), epoch)

    def after_backward(self) -> None:
        """Drop the gradients of what this step does not train."""
        for head in (self.head, self.patch_head):
            if self.holds_prototypes and head is not None:
                head.prototypes.weight.grad = None
        if self.holds_network:
            for parameter in self.vit.parameters():
                parameter.grad = None

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the teacher towards the student."""
        own = self.state_dict()
        averages, latest = list[Tensor](), list[Tensor]()
        for name, average in self.teacher.state_dict().items():
            if average.is_floating_point():
                averages.append(average)
                latest.append(own[name])
            else:  # the count of a batch norm
                average.copy_(own[name])
        get_ema_multi_avg_fn(self.momentum)(averages, latest, None)

    # ---- the loss ----------------------------------------------------------------------------------------------------

    def forward(self, images_BVCHW: Tensor, views_BvChw: Tensor, masks_BVN: Tensor, hidden: int) -> Tensor:
        """Return the loss of the whole batch; `masks_BVN` is true for the `hidden` patches that the student guesses."""
        images, local, masks_SN = images_BVCHW.flatten(0, 1), views_BvChw.flatten(0, 1), masks_BVN.flatten(0, 1)
        index_M = torch.nonzero_static(masks_SN.flatten(), size=hidden).squeeze(1)
        with torch.no_grad():
            tokens_SND = self.teacher.vit.tokens(images)
            taught = self._outputs(self.teacher, self._vectors(self.teacher.vit, tokens_SND), tokens_SND, index_M)
        tokens_SND = self._masked_tokens(images, masks_SN)
        vectors_SD = self._vectors(self.vit, tokens_SND)
        parts = [vectors_SD]
        if len(local) and self.settings.dino:
            parts.append(self._vectors(self.vit, self.vit.tokens(local)))
        own = self._outputs(self, torch.cat(parts), tokens_SND, index_M)
        with without_autocast(images.device):
            return self._loss(own, taught, at_least_float32(vectors_SD), (masks_SN, index_M), images_BVCHW.shape[:2])

    def _masked_tokens(self, images_BCHW: Tensor, masks_BN: Tensor) -> Tensor:
        if self.mask_token is None:
            return self.vit.tokens(images_BCHW)
        x_BND, grid = self.vit.stem(images_BCHW)
        x_BND = torch.where(masks_BN[..., None], self.mask_token.to(x_BND.dtype), x_BND)
        return self.vit.encode(self.vit.positions(x_BND, grid), VisiblePatches(grid))

    def _vectors(self, vit: ViT, tokens_SND: Tensor) -> Tensor:
        """Return the vector of each view that is compared, SD."""
        match self.settings.compares:
            case "pool":
                return vit.pooled(tokens_SND)
            case "class_token":
                return vit.norm(tokens_SND[:, 0])
            case "patches":
                return vit.norm(tokens_SND[:, vit.num_prefix :]).mean(dim=1)
            case _:
                assert_never(self.settings.compares)

    def _outputs(self, of: "Self | Teacher", vectors_SD: Tensor, tokens_SND: Tensor, index_M: Tensor) -> Outputs:
        """Return what the heads say of whole views and of masked patches."""
        patches_MD = of.vit.norm(tokens_SND[:, of.vit.num_prefix :].flatten(0, 1)[index_M])
        patch_head = of.patch_head or of.head
        whole = of.head(vectors_SD) if self.settings.dino else None
        return Outputs(whole, patch_head(patches_MD) if self.settings.ibot else None)

    def _loss(
        self, own: Outputs, taught: Outputs, vectors_SD: Tensor, hidden: tuple[Tensor, Tensor], shape: torch.Size
    ) -> Tensor:
        task, (images, views), (masks_SN, index_M) = self.settings, shape, hidden
        masked_SN = masks_SN if task.ibot else torch.zeros_like(masks_SN)
        hidden_S = masked_SN.sum(1)
        counts = torch.stack([hidden_S.new_full((), images), (hidden_S > 0).sum(), hidden_S.sum()])
        all_images, all_masked, all_patches = sum_over_workers(counts.double()).to(vectors_SD.dtype).unbind()
        sums = {name: vectors_SD.new_zeros(()) for name in PARTS}
        if own.whole is not None and taught.whole is not None:
            targets_SK = self._targets(taught.whole, self.center, all_images * views)
            scores_SK = F.log_softmax(own.whole / task.student_temperature, dim=1)
            sums["dino"] = dino_sum(targets_SK, scores_SK, images, views)
            sums["entropy"] = torch.special.entr(targets_SK).sum() / views
            self._count_used(targets_SK)
        if own.patches is not None and taught.patches is not None:
            targets_MK = self._targets(taught.patches, self.patch_center, all_patches)
            scores_MK = F.log_softmax(own.patches / task.student_temperature, dim=1)
            share_SN = masked_SN.to(vectors_SD.dtype) / hidden_S.clamp(min=1)[:, None]
            sums["ibot"] = -((targets_MK * scores_MK).sum(1) * share_SN.flatten()[index_M]).sum()
        if task.koleo:
            sums["koleo"] = self._spread_sum(vectors_SD.unflatten(0, shape))
        dino, ibot, koleo, entropy = sum_over_workers(torch.stack([*sums.values()])).unbind()
        means = dino / all_images, ibot / all_masked.clamp(min=1), koleo / all_images, entropy / all_images
        self._record(torch.stack(means))
        return task.dino * means[0] + task.ibot * means[1] + task.koleo * means[2]

    @torch.no_grad()
    def _targets(self, logits_SK: Tensor, center_K: Tensor, count: Tensor) -> Tensor:
        """Return the teacher's probabilities; `count` is the number of samples of all workers."""
        match self.settings.centering:
            case "center":
                targets_SK = F.softmax((logits_SK - center_K) / self.temperature, dim=1)
                if self.training:
                    mean_K = sum_over_workers(logits_SK.sum(0)) / count.clamp(min=1)
                    weight = (1 - self.settings.center_momentum) * (count > 0)
                    center_K.lerp_(mean_K, weight)
                return targets_SK
            case "sinkhorn":
                return sinkhorn(logits_SK / self.temperature)
            case _:
                assert_never(self.settings.centering)

    def _spread_sum(self, vectors_BVD: Tensor) -> Tensor:
        """Return KoLeo's sum over the images of this worker, the mean over their views."""
        images, views, _ = vectors_BVD.shape
        own_BVD = F.normalize(vectors_BVD, dim=-1)
        all_RVD, is_real_R, first = self._of_all_workers(own_BVD)
        with torch.no_grad():
            near_VBR = own_BVD.transpose(0, 1) @ all_RVD.permute(1, 2, 0)
            place_R = torch.arange(len(all_RVD), device=near_VBR.device)
            own_B = first + torch.arange(images, device=near_VBR.device)
            is_other_BR = is_real_R & (place_R != own_B[:, None])
            nearest_VB = near_VBR.masked_fill(~is_other_BR, -math.inf).argmax(dim=2)
        neighbors_VBD = all_RVD.transpose(0, 1).gather(1, nearest_VB[..., None].expand(-1, -1, own_BVD.shape[2]))
        square_VB = (own_BVD.transpose(0, 1) - neighbors_VBD).square().sum(2)
        loss_VB = -(square_VB + LEAST_SQUARE).log() / 2
        return torch.where(is_other_BR.any(1), loss_VB, 0.0).sum() / views  # one image alone has no neighbor

    def _of_all_workers(self, own_BVD: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the vectors of all workers, which of these rows are real, and the row of this worker's first image."""
        if not dist.is_initialized():
            return own_BVD, torch.ones(len(own_BVD), dtype=torch.bool, device=own_BVD.device), 0
        workers, most = dist.get_world_size(), torch.tensor(len(own_BVD), device=own_BVD.device)
        if self.training:  # a bound that the host knows: images are dealt in pairs, so that none has two more
            rows = -(-self.batch // workers) + 2
        else:
            dist.all_reduce(most, dist.ReduceOp.MAX)
            rows = int(most)
        first = dist.get_rank() * rows
        marked = F.pad(own_BVD.flatten(1), (0, 1), value=1.0)
        placed = F.pad(marked, (0, 0, first, workers * rows - first - len(marked)))
        everyone = sum_over_workers(placed)
        return everyone[:, :-1].unflatten(1, own_BVD.shape[1:]), everyone[:, -1].detach() > 0, first

    # ---- what is known of it -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _record(self, means: Tensor) -> None:
        sums = self._sums[self.training].to(means.device)
        self._sums[self.training] = sums + F.pad(means.double(), (0, 1), value=1.0)

    def _count_used(self, targets_SK: Tensor) -> None:
        used_K, likeliest_S = self._used[self.training].to(targets_SK.device), targets_SK.argmax(1)
        self._used[self.training] = used_K.scatter_add(0, likeliest_S, torch.ones_like(likeliest_S))

    def read_metrics(self, *, training: bool) -> dict[str, float]:
        """Return the means of the parts of the loss since the last call, in one mode, and the use of the prototypes."""
        *sums, passes = self._sums[training].tolist()
        self._sums[training] = torch.zeros(len(PARTS) + 1, dtype=torch.float64)
        used_K = self._used[training].clone()
        self._used[training].zero_()
        if not passes:
            return {}
        if dist.is_initialized():
            dist.all_reduce(used_K)
        weights = {"dino": self.settings.dino, "ibot": self.settings.ibot, "koleo": self.settings.koleo}
        weights["entropy"] = self.settings.dino
        values = {name: total / passes for name, total in zip(PARTS, sums, strict=True) if weights[name]}
        if self.settings.dino:
            values["prototypes_used"] = float((used_K > 0).sum())
        if self.settings.centering == "center":
            values["center_norm"] = float(self.center.norm())
        return values

    def count(self, products: Products) -> None:
        """Count the products of a training step for an image, over all its views; of masked patches, the mean."""
        task, model, views = self.settings, self.vit.model, self.views
        height, width = views.large_size(model.image_shape)
        patches = height * width / model.shape.patch**2
        masked = task.mask.chance * sum(task.mask.ratio) / 2 * patches if task.ibot else 0.0

        def count_view(of: "SelfDistilled | Teacher", size: tuple[int, int], masked: float, products: Products) -> None:
            of.vit.count_tokens(products, size=size)
            products.train(of.vit.norm, self.mask_token)
            products.branches(
                lambda: of.head.count(products, float(task.dino > 0)),
                lambda: (of.patch_head or of.head).count(products, masked),
            )

        products.repeat(views.large.count, partial(count_view, self, (height, width), masked))
        if views.small is not None and task.dino:
            size = views.small_size(model.image_shape, model.shape.patch)
            products.repeat(views.small.count, partial(count_view, self, size, 0.0))
        products.frozen(
            lambda inner: inner.repeat(views.large.count, partial(count_view, self.teacher, (height, width), masked))
        )


class Teacher(nn.Module):
    """The averages of a network and its heads, which are not trained, and always answer as in an evaluation."""

    def __init__(self, vit: ViT, head: "PrototypeHead", patch_head: "PrototypeHead | None") -> None:
        super().__init__()
        self.vit, self.head, self.patch_head = copy.deepcopy((vit, head, patch_head))
        self.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        """Stay in the mode of evaluations."""
        del mode
        return super().train(False)


class PrototypeHead(nn.Module):
    """Two hidden layers, a normalized output, and its cosines with prototypes, which are computed in float32."""

    def __init__(self, width: int, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, bottleneck)
        self.prototypes = nn.Linear(bottleneck, prototypes, bias=False)
        self.apply(initialize_linear)

    def forward(self, x_SD: Tensor) -> Tensor:
        """Return the cosines, SK."""
        x_SD = self.last(F.gelu(self.second(F.gelu(self.first(x_SD)))))
        with without_autocast(x_SD.device):
            return F.linear(F.normalize(at_least_float32(x_SD), dim=-1), F.normalize(self.prototypes.weight, dim=-1))

    def count(self, products: Products, positions: float) -> None:
        """Count the products of some vectors of an image."""
        for layer in (self.first, self.second, self.last, self.prototypes):
            products.layer(layer, positions)


# ---- parts of the loss -----------------------------------------------------------------------------------------------


def dino_sum(targets_SK: Tensor, scores_SK: Tensor, images: int, views: int) -> Tensor:
    """Return the cross-entropy of each global view of the teacher with each other view of the student.

    It is the mean over these pairs and the sum over images. The scores, logarithms of probabilities, are of the global
    views, image after image, and then of the local ones.
    """
    targets_BVK = targets_SK.unflatten(0, (images, views))
    large_BVK = scores_SK[: images * views].unflatten(0, (images, views))
    small = scores_SK[images * views :]
    everyone_BK = large_BVK.sum(1)
    number = views
    if len(small):
        small_BvK = small.unflatten(0, (images, -1))
        everyone_BK, number = everyone_BK + small_BvK.sum(1), number + small_BvK.shape[1]
    same = (targets_BVK * large_BVK).sum()
    return (same - (targets_BVK.sum(1) * everyone_BK).sum()) / (views * (number - 1))


@torch.no_grad()
def sinkhorn(logits_SK: Tensor) -> Tensor:
    """Return probabilities of samples under which all prototypes are about equally frequent, over all workers.

    In logarithms: of a sample that is far from every prototype, the probabilities themselves would all be 0.
    """
    scores_SK = logits_SK
    for _ in range(SINKHORN_ITERATIONS):
        scores_SK = scores_SK - log_sum_over_samples(scores_SK)
        scores_SK = scores_SK - scores_SK.logsumexp(dim=1, keepdim=True)
    return scores_SK.exp()


def log_sum_over_samples(scores_SK: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials over the samples of all workers, K."""
    if not dist.is_initialized():
        return scores_SK.logsumexp(dim=0)
    least = scores_SK.new_full((1, scores_SK.shape[1]), -math.inf)
    top_K = (scores_SK if len(scores_SK) else least).amax(0)
    dist.all_reduce(top_K, dist.ReduceOp.MAX)
    return top_K + sum_over_workers((scores_SK - top_K).exp().sum(0)).log()
