"""Scores of a split, with every image counted exactly once on any number of workers.

Shapes: B images, K classes.
"""

import heapq
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config.augmentation import Normalise
from vitray.data.augment.batch import DeviceBatch, normalised
from vitray.models.tokenizer import VisualTokenizer

MAX_MISTAKES = 16
MAX_PICTURES = 8


class Mistake(NamedTuple):
    """A misclassified image; the order is by the network's confidence."""

    probability: float
    row: int
    label: int
    predicted: int


class Score(NamedTuple):
    """The scores of a network on a split."""

    images: int
    loss: float
    """Mean cross-entropy of the labels, for any training loss; without labels, the mean of the training loss."""
    top1: float | None = None
    top5: float | None = None
    confusion: np.ndarray | None = None
    """K x K: labels in rows, predictions in columns."""
    mistakes: Sequence[Mistake] = ()
    """The most confident ones, on rank 0."""
    perplexity: float | None = None
    """Of a tokenizer: the number of equally frequent codes with the same entropy."""
    pictures: np.ndarray | None = None
    """A few images on rank 0: original, masked, reconstructed (RBCHW, normalised)."""

    def metrics(self, suffix: str = "") -> dict[str, float]:
        """Return the numbers under their metric names."""
        values = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "perplexity": self.perplexity}
        return {f"val/{name}{suffix}": value for name, value in values.items() if value is not None}


class LabelFreeTask(Protocol):
    """A task without labels: its forward is the loss, and it can draw pictures."""

    training: bool

    def __call__(self, images_BCHW: Tensor, targets: Tensor) -> Tensor: ...

    def pictures(self, images_BCHW: Tensor, targets: Tensor, /) -> Tensor: ...

    def eval(self) -> object: ...

    def train(self, mode: bool = True) -> object: ...


class EvaluationSet(NamedTuple):
    """The batches of one worker, and the number of images of all workers together."""

    batches: Iterable[DeviceBatch]
    images: int
    normalise: Normalise


@torch.no_grad()
def evaluate(
    vit: nn.Module,
    data: EvaluationSet,
    num_classes: int,
    device: torch.device,
    autocast: AbstractContextManager[object] | None = None,
) -> Score:
    """Return the score of a classifier over the batches of all workers."""
    was_training = vit.training
    vit.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    confusion_KK = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=device)
    mistakes: list[Mistake] = []
    for batch in data.batches:
        with autocast or nullcontext():
            logits_BK = vit(normalised(batch.images, data.normalise))
        real_B = batch.weights > 0
        logits_BK, labels_B = logits_BK.float()[real_B], batch.labels[real_B].long()
        sums += _sums(logits_BK, labels_B)
        predicted_B = logits_BK.argmax(1)
        confusion_KK += torch.bincount(labels_B * num_classes + predicted_B, minlength=num_classes**2)
        batch_mistakes = _mistakes(logits_BK, labels_B, batch.rows[: len(labels_B)])
        mistakes = heapq.nlargest(MAX_MISTAKES, mistakes + batch_mistakes)
    vit.train(was_training)
    if dist.is_initialized():
        dist.all_reduce(sums)
        dist.all_reduce(confusion_KK)
        gathered: list[list[Mistake]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, mistakes)
        mistakes = heapq.nlargest(MAX_MISTAKES, [mistake for part in gathered for mistake in part])
    count, loss, top1, top5 = sums.tolist()
    _check_count(count, data.images)
    matrix = confusion_KK.view(num_classes, num_classes).cpu().numpy()
    return Score(data.images, loss / data.images, top1 / data.images, top5 / data.images, matrix, mistakes)


@torch.no_grad()
def evaluate_loss(
    task: LabelFreeTask,
    data: EvaluationSet,
    device: torch.device,
    autocast: AbstractContextManager[object] | None = None,
) -> Score:
    """Return the loss of a task without labels over the batches of all workers."""
    was_training = task.training
    task.eval()
    if isinstance(task, VisualTokenizer):
        task.read_perplexity()  # resets the counts
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    pictures = None
    for batch in data.batches:
        # Padding is at the end of the last batch.
        real = int((batch.weights > 0).sum())
        if not real:
            continue
        images_BCHW, targets = normalised(batch.images[:real], data.normalise), batch.labels[:real]
        with autocast or nullcontext():
            sums += torch.stack([task(images_BCHW, targets).double() * real, sums.new_tensor(real)])
            if pictures is None:
                pictures = task.pictures(images_BCHW[:MAX_PICTURES], targets[:MAX_PICTURES]).float().cpu().numpy()
    task.train(was_training)
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss, count = sums.tolist()
    _check_count(count, data.images)
    perplexity = task.read_perplexity() if isinstance(task, VisualTokenizer) else None
    return Score(data.images, loss / data.images, perplexity=perplexity, pictures=pictures)


def broadcast_buffers(module: nn.Module) -> None:
    """Give every worker the buffers of rank 0: unsynchronised batch norms differ between workers."""
    if dist.is_initialized():
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


def _check_count(count: float, images: int) -> None:
    assert count == images, f"{count:.0f} images were counted, the split has {images}"


def _sums(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Sums over a batch: images, loss, top-1 hits, top-5 hits."""
    first_B5 = logits_BK.topk(min(5, logits_BK.shape[1]), dim=1).indices
    hit_B5 = first_B5 == labels_B[:, None]
    loss = F.cross_entropy(logits_BK, labels_B, reduction="sum")
    count = torch.tensor(len(labels_B), device=loss.device)
    return torch.stack([count.double(), loss.double(), hit_B5[:, 0].sum().double(), hit_B5.any(1).sum().double()])


def _mistakes(logits_BK: Tensor, labels_B: Tensor, rows_B: np.ndarray) -> list[Mistake]:
    probability_B, predicted_B = logits_BK.softmax(1).max(1)
    wrong = (predicted_B != labels_B).nonzero()[:, 0]
    wrong = wrong[probability_B[wrong].argsort(descending=True)[:MAX_MISTAKES]].tolist()
    return [Mistake(float(probability_B[at]), int(rows_B[at]), int(labels_B[at]), int(predicted_B[at])) for at in wrong]
