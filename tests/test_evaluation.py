"""Evaluation: every image counts once for any batch size, and the scores equal those of a slow loop."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from vitray.config.augmentation import Normalise
from vitray.data.augment.batch import DeviceBatch
from vitray.evaluation.scores import MAX_MISTAKES, EvaluationSet, evaluate


class Reader(torch.nn.Module):
    """A network that returns the first 7 pixels as logits."""

    def forward(self, images_BCHW):
        return images_BCHW.flatten(1)[:, :7]


PLAIN = Normalise(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
CPU = torch.device("cpu")


def data(count):
    rng = np.random.default_rng(count)
    return torch.from_numpy(rng.integers(0, 256, (count, 4, 4, 3), np.uint8)), rng.integers(0, 7, count)


def batches(images, labels, size):
    """The images in batches of `size`, the last one padded with black images of weight 0."""
    for start in range(0, len(images), size):
        real = len(images[start : start + size])
        pixels = torch.cat([images[start : start + size], torch.zeros(size - real, 4, 4, 3, dtype=torch.uint8)])
        padded = np.concatenate([labels[start : start + size], np.zeros(size - real, np.int64)])
        weights = torch.tensor([1.0] * real + [0.0] * (size - real))
        rows = np.arange(start, start + real)
        yield DeviceBatch(pixels, torch.from_numpy(padded), weights, rows, rows)


def score(images, labels, size, count=None):
    return evaluate(
        Reader(), EvaluationSet(batches(images, labels, size), count or len(images), PLAIN), 7, CPU, nullcontext()
    )


@pytest.mark.parametrize("size", [1, 4, 9, 64])
def test_the_score_equals_a_slow_loop_for_any_batch_size(size):
    images, labels = data(50)
    scored = score(images, labels, size)
    logits = (images.permute(0, 3, 1, 2).double() / 255).flatten(1)[:, :7].numpy()
    confusion, top1, top5, loss, wrong = np.zeros((7, 7), int), 0, 0, 0.0, []
    for row, (values, label) in enumerate(zip(logits, labels, strict=True)):
        order = np.argsort(-values, kind="stable")
        shares = np.exp(values) / np.exp(values).sum()
        confusion[label, order[0]] += 1
        top1 += int(order[0] == label)
        top5 += int(label in order[:5])
        loss -= np.log(shares[label])
        if order[0] != label:
            wrong.append((shares[order[0]], row, label, order[0]))
    assert (scored.images, scored.top1, scored.top5) == (50, top1 / 50, top5 / 50)
    assert scored.loss == pytest.approx(loss / 50, rel=1e-6)
    assert np.array_equal(scored.confusion, confusion)
    worst = sorted(wrong, reverse=True)[:MAX_MISTAKES]
    assert [(mistake.row, mistake.label, mistake.predicted) for mistake in scored.mistakes] == [w[1:] for w in worst]


def test_a_missing_or_doubled_image_stops_the_evaluation():
    images, labels = data(10)
    for claimed in (9, 11):
        with pytest.raises(AssertionError, match="10 images were counted"):
            score(images, labels, 4, claimed)


def test_the_network_returns_to_training():
    images, labels = data(3)
    reader = Reader().train()
    evaluate(reader, EvaluationSet(batches(images, labels, 2), 3, PLAIN), 7, CPU, nullcontext())
    assert reader.training
