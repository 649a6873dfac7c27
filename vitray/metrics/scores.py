"""Scores of a split, with every image counted exactly once on any number of workers.

Shapes: B images, K classes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config.augmentation import Normalize
from vitray.config.sections import TaskTraits
from vitray.data.augment.mixing import DeviceBatch, normalized, to_device
from vitray.metrics.arrays import Examples
from vitray.metrics.multilabel import THRESHOLD, best_threshold, label_loss, mean_average_precision
from vitray.models.probabilities import Probability, probabilities_of

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
    """Mean cross-entropy of the labels, for any training loss, binary of several labels an image; without labels, the
    mean of the training loss."""
    top1: float | None = None
    top5: float | None = None
    confusion: np.ndarray | None = None
    """K x K: labels in rows, predictions in columns."""
    mistakes: Sequence[Mistake] = ()
    """The most confident ones, on rank 0."""
    others: Mapping[str, float] = {}
    """Further numbers of the task, such as the perplexity of a tokenizer."""
    pictures: np.ndarray | None = None
    """A few images on rank 0: original, masked, reconstructed (RBCHW, normalized)."""
    examples: Examples | None = None
    """A few images on rank 0, the same at every evaluation."""
    corrupt: Sequence[str] = ()
    """Images that could not be decoded; no number counts them."""
    map: float | None = None
    """Mean average precision, of several labels an image."""
    thresholds: Sequence[float] | None = None
    """Of several labels an image: of each class, that of the highest F1."""

    @property
    def main(self) -> tuple[str, float]:
        """The score by which evaluations are compared, by its name; of a loss, less is better."""
        if self.map is not None:
            return "map", self.map
        return ("loss", self.loss) if self.top1 is None else ("top1", self.top1)

    def metrics(self, suffix: str = "") -> dict[str, float]:
        """Return the numbers under their metric names."""
        values = {"top1": self.top1, "top5": self.top5, "map": self.map, "loss": self.loss, **self.others}
        return {f"val/{name}{suffix}": value for name, value in values.items() if value is not None}


class EvaluationSet(NamedTuple):
    """The batches of one worker, and the number of images of all workers together."""

    batches: Iterable[DeviceBatch]
    images: int
    normalize: Normalize
    corrupt: Callable[[], Sequence[str]] = tuple
    """Returns, after the batches, those of this worker's images that could not be decoded and are in no batch."""


@torch.no_grad()
def evaluate(
    vit: nn.Module,
    data: EvaluationSet,
    num_classes: int,
    device: torch.device,
    autocast: AbstractContextManager[object],
    probability: Probability = "softmax",
) -> Score:
    """Return the score of a classifier over the batches of all workers."""
    sums, images = Sums.zeros(num_classes, device), 0
    for batch in _batches(vit, data):
        with autocast:
            logits_BK = vit(normalized(batch.images, data.normalize))
        add_batch(sums, logits_BK, batch, probability)
        images += len(batch.rows)
    counted, corrupt, (loss, top1, top5) = _means(images, sums.totals, data)
    mistakes_M4 = sums.mistakes
    if dist.is_initialized():
        dist.all_reduce(sums.confusion)
        gathered = [torch.empty_like(mistakes_M4) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mistakes_M4)
        mistakes_M4 = most_confident(torch.cat(gathered))
    matrix = sums.confusion.view(num_classes, num_classes).cpu().numpy()
    of_class = matrix.sum(1)
    balanced = float((matrix.diagonal()[of_class > 0] / of_class[of_class > 0]).mean())
    mistakes = [
        Mistake(probability, int(row), int(label), int(predicted))
        for probability, row, label, predicted in mistakes_M4.tolist()
        if row >= 0
    ]
    return Score(counted, loss, top1, top5, matrix, mistakes, {"mean_per_class": balanced}, corrupt=corrupt)


@torch.no_grad()
def evaluate_labels(
    vit: nn.Module,
    data: EvaluationSet,
    num_classes: int,
    device: torch.device,
    autocast: AbstractContextManager[object],
    probability: Probability = "sigmoid",
) -> Score:
    """Return the score of a classifier of several labels an image over the batches of all workers."""
    logits = [torch.empty(0, num_classes, device=device)]
    states, images = [torch.empty(0, num_classes, dtype=torch.int8, device=device)], 0
    for batch in _batches(vit, data):
        with autocast:
            logits_BK = vit(normalized(batch.images, data.normalize))
        real = len(batch.rows)  # the padding is at the end
        logits.append(logits_BK[:real].float())
        states.append(batch.labels[:real].to(torch.int8))
        images += real
    logits_NK, states_NK = torch.cat(logits), torch.cat(states)
    counted, corrupt, _ = _means(images, torch.zeros(1, dtype=torch.float64, device=device), data)
    if dist.is_initialized():
        # Every worker gives as many rows; those that it lacks have classes that are all unknown.
        most = torch.tensor(len(logits_NK), device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        missing = (0, 0, 0, int(most) - len(logits_NK))
        logits_NK, states_NK = _gathered(F.pad(logits_NK, missing)), _gathered(F.pad(states_NK, missing, value=-1))
    found_NK, known_NK = logits_NK.cpu(), states_NK.cpu().numpy()
    # A row that is not finite comes last, and its loss is not a number.
    probabilities_NK = probabilities_of(found_NK, probability).nan_to_num(0.0).numpy()
    ranked_NK = found_NK.nan_to_num(-torch.inf).numpy() if probability == "sigmoid" else probabilities_NK
    loss = label_loss(found_NK.numpy(), known_NK, probability)
    columns = zip(probabilities_NK.T, known_NK.T, strict=True)
    thresholds = [THRESHOLD if (each := best_threshold(*column)) is None else each for column in columns]
    average = mean_average_precision(ranked_NK, known_NK)
    return Score(counted, loss, map=average, thresholds=thresholds, corrupt=corrupt)


def _gathered(tensor: Tensor) -> Tensor:
    """Return the rows of all workers, which have equal numbers of them."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


@torch.no_grad()
def evaluate_loss(
    task: Any,
    traits: TaskTraits,
    data: EvaluationSet,
    device: torch.device,
    autocast: AbstractContextManager[object],
    forward: Callable[..., Tensor] | None = None,
) -> Score:
    """Return the loss of a task without labels over the batches of all workers, with its pictures and other numbers.

    `forward` is the compiled task. It sees whole batches only, because another batch size would be compiled anew.
    """
    task.read_metrics(training=False)  # resets counts
    total, images, pictures = torch.zeros(1, dtype=torch.float64, device=device), 0, None
    for batch in _batches(task, data):
        real = len(batch.rows)
        if not real and not (traits.joint and dist.is_initialized()):
            continue
        inputs = batch.inputs(traits.needs, data.normalize, slice(real))
        network = task if forward is None or real < len(batch.images) else forward
        with autocast:
            total += network(*inputs).double() * real
            if pictures is None and not traits.joint:
                pictures = task.pictures(*(each[:MAX_PICTURES] for each in inputs))
        images += real
    counted, corrupt, [loss] = _means(images, total, data)
    drawn = None if pictures is None else pictures.float().cpu().numpy()
    return Score(counted, loss, others=task.read_metrics(training=False), pictures=drawn, corrupt=corrupt)


def broadcast_buffers(module: nn.Module) -> None:
    """Give every worker the buffers of rank 0: unsynchronized batch norms differ between workers."""
    if dist.is_initialized():
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


def _batches(network: nn.Module, data: EvaluationSet) -> Iterator[DeviceBatch]:
    """Yield each batch, with the network in evaluation mode."""
    was_training = network.training
    network.eval()
    yield from data.batches
    network.train(was_training)


def _means(images: int, totals: Tensor, data: EvaluationSet) -> tuple[int, list[str], list[float]]:
    """Return the number of images of all workers, the names of the corrupt ones, and the means over the others."""
    names = data.corrupt()
    sums = torch.cat([totals.new_tensor([images, len(names)]), totals])
    if dist.is_initialized():
        dist.all_reduce(sums)
    count, corrupt, *values = sums.tolist()
    assert count + corrupt == data.images, f"{count + corrupt:.0f} images were counted, the split has {data.images}"
    return int(count), gather_names(names) if corrupt else [], [value / count for value in values]


def gather_names(names: Sequence[str]) -> list[str]:
    """Return the names of all workers, sorted; all workers call this."""
    if not dist.is_initialized():
        return sorted(names)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, list(names))
    return sorted(name for part in parts for name in part)


# ---- sums on the device ----------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """The sums over the batches so far. They stay on the device: a copy to the host after each batch would stall it."""

    totals: Tensor
    """Loss, top-1 hits, top-5 hits."""
    confusion: Tensor
    """K * K counts."""
    mistakes: Tensor
    """M x 4, the most confident ones in order: probability, row, label, predicted class. Row -1 is none."""

    @classmethod
    def zeros(cls, num_classes: int, device: torch.device) -> "Sums":
        """Return the sums of no image."""
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        confusion = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=device)
        return cls(totals, confusion, torch.full((MAX_MISTAKES, 4), -1.0, dtype=torch.float64, device=device))


def add_batch(sums: Sums, logits_BK: Tensor, batch: DeviceBatch, probability: Probability = "softmax") -> None:
    """Add a batch without its padding; the host does not wait for the device."""
    real = len(batch.rows)  # the padding is at the end
    logits_BK, labels_B = logits_BK[:real].float(), batch.labels[:real].long()
    num_classes = logits_BK.shape[1]
    rank_B = label_ranks(logits_BK, labels_B)
    loss = F.cross_entropy(logits_BK, labels_B, reduction="sum")
    sums.totals.add_(
        torch.stack([loss.double(), (rank_B == 0).sum().double(), (rank_B < min(5, num_classes)).sum().double()])
    )
    probability_B, predicted_B = probabilities_of(logits_BK, probability).amax(1), logits_BK.argmax(1)
    index_B = labels_B * num_classes + predicted_B
    sums.confusion.scatter_add_(0, index_B, torch.ones_like(index_B))  # bincount would wait for the device
    row_B = to_device(torch.tensor(batch.rows), labels_B.device)
    mistakes_B4 = torch.stack([probability_B.double(), row_B.double(), labels_B.double(), predicted_B.double()], dim=1)
    mistakes_B4 = torch.where((predicted_B != labels_B)[:, None], mistakes_B4, -1.0)
    sums.mistakes.copy_(most_confident(torch.cat([sums.mistakes, mistakes_B4])))


def label_ranks(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Return the number of classes before each label: higher logits, and equal ones of lower classes.

    `topk` leaves the order of equal logits open, and those of bfloat16 are often equal. A NaN is never a hit: it comes
    before every other label, and a label with a NaN has rank K.
    """
    own_B1, classes_K = logits_BK.gather(1, labels_B[:, None]), torch.arange(logits_BK.shape[1], device=labels_B.device)
    behind_BK = (logits_BK < own_B1) | ((logits_BK == own_B1) & (classes_K >= labels_B[:, None]))
    return logits_BK.shape[1] - behind_BK.sum(1)


def most_confident(mistakes_N4: Tensor) -> Tensor:
    """Return the first mistakes by probability, equal ones by row, both descending."""
    mistakes_N4 = mistakes_N4[mistakes_N4[:, 1].argsort(descending=True)]
    return mistakes_N4[mistakes_N4[:, 0].argsort(descending=True, stable=True)[:MAX_MISTAKES]]
