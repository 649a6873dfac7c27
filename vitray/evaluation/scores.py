"""Scores of a split, with every image counted exactly once on any number of workers.

Shapes: B images, K classes.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

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
    autocast: AbstractContextManager[object],
) -> Score:
    """Return the score of a classifier over the batches of all workers."""
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    confusion_KK = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=device)
    mistakes: list[Mistake] = []
    for batch, images_BCHW in _normalised_batches(vit, data):
        with autocast:
            logits_BK = vit(images_BCHW)
        real_B = batch.weights > 0
        logits_BK, labels_B = logits_BK.float()[real_B], batch.labels[real_B].long()
        sums += _sums(logits_BK, labels_B)
        predicted_B = logits_BK.argmax(1)
        confusion_KK += torch.bincount(labels_B * num_classes + predicted_B, minlength=num_classes**2)
        batch_mistakes = _mistakes(logits_BK, labels_B, batch.rows[: len(labels_B)])
        mistakes = heapq.nlargest(MAX_MISTAKES, mistakes + batch_mistakes)
    loss, top1, top5 = _means(sums, data.images)
    if dist.is_initialized():
        dist.all_reduce(confusion_KK)
        gathered: list[list[Mistake]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, mistakes)
        mistakes = heapq.nlargest(MAX_MISTAKES, [mistake for part in gathered for mistake in part])
    matrix = confusion_KK.view(num_classes, num_classes).cpu().numpy()
    return Score(data.images, loss, top1, top5, matrix, mistakes)


@torch.no_grad()
def evaluate_loss(
    task: nn.Module,
    draw: Callable[[Tensor, Tensor], Tensor],
    data: EvaluationSet,
    device: torch.device,
    autocast: AbstractContextManager[object],
) -> Score:
    """Return the loss of a task without labels over the batches of all workers, and the pictures that `draw` makes."""
    if isinstance(task, VisualTokenizer):
        task.read_perplexity()  # resets the counts
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    pictures = None
    for batch, padded_BCHW in _normalised_batches(task, data):
        # Padding is at the end of the last batch.
        real = int((batch.weights > 0).sum())
        if not real:
            continue
        images_BCHW, targets = padded_BCHW[:real], batch.labels[:real]
        with autocast:
            sums += torch.stack([sums.new_tensor(real), task(images_BCHW, targets).double() * real])
            if pictures is None:
                pictures = draw(images_BCHW[:MAX_PICTURES], targets[:MAX_PICTURES]).float().cpu().numpy()
    [loss] = _means(sums, data.images)
    perplexity = task.read_perplexity() if isinstance(task, VisualTokenizer) else None
    return Score(data.images, loss, perplexity=perplexity, pictures=pictures)


def broadcast_buffers(module: nn.Module) -> None:
    """Give every worker the buffers of rank 0: unsynchronised batch norms differ between workers."""
    if dist.is_initialized():
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


def _normalised_batches(network: nn.Module, data: EvaluationSet) -> Iterator[tuple[DeviceBatch, Tensor]]:
    """Yield each batch and its normalised images, with the network in evaluation mode."""
    was_training = network.training
    network.eval()
    for batch in data.batches:
        yield batch, normalised(batch.images, data.normalise)
    network.train(was_training)


def _means(sums: Tensor, images: int) -> list[float]:
    """Return the means over the images of all workers; the first sum is the number of images."""
    if dist.is_initialized():
        dist.all_reduce(sums)
    count, *totals = sums.tolist()
    assert count == images, f"{count:.0f} images were counted, the split has {images}"
    return [total / images for total in totals]


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
