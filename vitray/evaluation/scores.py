"""Every image of a split counted exactly once, on any number of workers: top-1, top-5, who is taken for whom; losses.

Shapes: B images, K classes.
"""

import heapq
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config.augmentation import Normalise
from vitray.data.augment.batch import normalised
from vitray.data.stream.prefetch import DeviceBatch
from vitray.models.tokenizer import VisualTokenizer
from vitray.tasks.masked import MaskedPrediction

MISTAKES = 16
# Images whose predicted patches are looked at.
PICTURES = 8


class Mistake(NamedTuple):
    """An image taken for another class; ordered by how sure the network was."""

    probability: float
    row: int
    label: int
    predicted: int


class Score(NamedTuple):
    """How a network did on every image of a split."""

    images: int
    loss: float
    """Mean cross-entropy of the labels, whatever the training loss; of what learns no labels the mean of its loss."""
    top1: float | None = None
    top5: float | None = None
    confusion: np.ndarray | None = None
    """K x K: rows are labels, columns what they were taken for."""
    mistakes: Sequence[Mistake] = ()
    """The surest ones, on rank 0."""
    perplexity: float | None = None
    """Of a tokenizer: how many codes, equally frequent, would be as much as was used."""
    pictures: np.ndarray | None = None
    """Of a few images, on rank 0: as they are, what is seen of them, what was made of that (RBCHW, normalised)."""

    def numbers(self, suffix: str = "") -> dict[str, float]:
        """The metrics as they are recorded."""
        known = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "perplexity": self.perplexity}
        return {f"val/{name}{suffix}": value for name, value in known.items() if value is not None}


@torch.no_grad()
def evaluate(
    vit: nn.Module,
    batches: Iterable[DeviceBatch],
    normalise: Normalise,
    *,
    images: int,
    num_classes: int,
    device: torch.device,
    autocast: AbstractContextManager[object] | None = None,
) -> Score:
    """Score a network on the batches of all workers, which must hold `images` images in all."""
    was_training = vit.training
    vit.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    confusion_KK = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=device)
    mistakes: list[Mistake] = []
    for batch in batches:
        with autocast or nullcontext():
            logits_BK = vit(normalised(batch.images, normalise))
        real_B = batch.weights > 0
        logits_BK, labels_B = logits_BK.float()[real_B], batch.labels[real_B].long()
        sums += _sums(logits_BK, labels_B)
        predicted_B = logits_BK.argmax(1)
        confusion_KK += torch.bincount(labels_B * num_classes + predicted_B, minlength=num_classes**2)
        found = _mistakes(logits_BK, labels_B, batch.rows[: len(labels_B)])
        mistakes = heapq.nlargest(MISTAKES, mistakes + found)
    vit.train(was_training)
    if dist.is_initialized():
        dist.all_reduce(sums)
        dist.all_reduce(confusion_KK)
        gathered: list[list[Mistake]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, mistakes)
        mistakes = heapq.nlargest(MISTAKES, [mistake for some in gathered for mistake in some])
    count, loss, top1, top5 = sums.tolist()
    # The law, asserted and not hoped: no image dropped, none counted twice.
    assert count == images, f"{count:.0f} images were counted, the split has {images}"
    matrix = confusion_KK.view(num_classes, num_classes).cpu().numpy()
    return Score(images, loss / images, top1 / images, top5 / images, matrix, mistakes)


@torch.no_grad()
def evaluate_loss(
    task: MaskedPrediction | VisualTokenizer,
    batches: Iterable[DeviceBatch],
    normalise: Normalise,
    *,
    images: int,
    device: torch.device,
    autocast: AbstractContextManager[object] | None = None,
) -> Score:
    """The loss of what learns no labels, on the batches of all workers, which must hold `images` images in all."""
    was_training = task.training
    task.eval()
    if isinstance(task, VisualTokenizer):
        task.read_perplexity()  # what was counted before is not of this split
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    pictures = None
    for batch in batches:
        # Real rows come first: an evaluation's last step is filled up at its end.
        real = int((batch.weights > 0).sum())
        if not real:
            continue
        images_BCHW, targets = normalised(batch.images[:real], normalise), batch.labels[:real]
        with autocast or nullcontext():
            sums += torch.stack([task(images_BCHW, targets).double() * real, sums.new_tensor(real)])
            if pictures is None:
                pictures = task.pictures(images_BCHW[:PICTURES], targets[:PICTURES]).float().cpu().numpy()
    task.train(was_training)
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss, count = sums.tolist()
    assert count == images, f"{count:.0f} images were counted, the split has {images}"
    perplexity = task.read_perplexity() if isinstance(task, VisualTokenizer) else None
    return Score(images, loss / images, perplexity=perplexity, pictures=pictures)


def agree_on_buffers(module: nn.Module) -> None:
    """Give every worker rank 0's buffers: batch norms that are not synchronised drift apart by a step."""
    if dist.is_initialized():
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


def _sums(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Images, their summed loss, and how many have the label first and among the first five."""
    first_B5 = logits_BK.topk(min(5, logits_BK.shape[1]), dim=1).indices
    hit_B5 = first_B5 == labels_B[:, None]
    loss = F.cross_entropy(logits_BK, labels_B, reduction="sum")
    count = torch.tensor(len(labels_B), device=loss.device)
    return torch.stack([count.double(), loss.double(), hit_B5[:, 0].sum().double(), hit_B5.any(1).sum().double()])


def _mistakes(logits_BK: Tensor, labels_B: Tensor, rows_B: np.ndarray) -> list[Mistake]:
    probability_B, predicted_B = logits_BK.softmax(1).max(1)
    wrong = (predicted_B != labels_B).nonzero()[:, 0]
    wrong = wrong[probability_B[wrong].argsort(descending=True)[:MISTAKES]].tolist()
    return [Mistake(float(probability_B[at]), int(rows_B[at]), int(labels_B[at]), int(predicted_B[at])) for at in wrong]
