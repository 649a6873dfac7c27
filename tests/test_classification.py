"""Scores from logits: equal to scikit-learn, to slow loops and to training's evaluation; exact with ties and gaps."""

import numpy as np
import pytest
import torch
from sklearn import metrics

from vitray.data.augment.mixing import DeviceBatch
from vitray.errors import ConfigError
from vitray.metrics import scores
from vitray.metrics.classification import classify, mean_per_class_of


def random_logits(images=300, num_classes=9, seed=0):
    rng = np.random.default_rng(seed)
    logits = (3 * rng.normal(size=(images, num_classes))).astype(np.float32)
    return logits, rng.integers(0, num_classes, images)


def test_scores_equal_scikit_learn():
    logits, labels = random_logits()
    scored, classes = classify(logits, labels), np.arange(9)
    predictions, probabilities = logits.argmax(1), torch.from_numpy(logits).double().softmax(1).numpy()
    assert scored.images == 300
    assert scored.hits1 == metrics.accuracy_score(labels, predictions, normalize=False)
    assert scored.hits5 == metrics.top_k_accuracy_score(labels, logits, k=5, labels=classes, normalize=False)
    assert (scored.top1, scored.top5) == (scored.hits1 / 300, scored.hits5 / 300)
    assert scored.nll == pytest.approx(metrics.log_loss(labels, probabilities, labels=classes), rel=1e-9)
    assert scored.loss == scored.nll
    assert scored.mean_per_class == pytest.approx(metrics.balanced_accuracy_score(labels, predictions), rel=1e-12)
    assert np.array_equal(scored.confusion, metrics.confusion_matrix(labels, predictions))
    assert [each.recall for each in scored.classes] == pytest.approx(
        metrics.recall_score(labels, predictions, average=None)
    )
    assert [each.precision for each in scored.classes] == pytest.approx(
        metrics.precision_score(labels, predictions, average=None)
    )
    assert [each.confidence for each in scored.classes] == pytest.approx(
        [probabilities[labels == label].max(1).mean() for label in classes]
    )
    assert sum(each.hits for each in scored.classes) == scored.hits1


@pytest.mark.parametrize(("num_classes", "probability"), [(3, "softmax"), (7, "softmax"), (7, "sigmoid")])
def test_scores_equal_those_of_training(num_classes, probability):
    logits, labels = random_logits(200, num_classes)
    logits[20:60] = 0  # more equal mistakes than are kept
    sums = scores.Sums.zeros(num_classes, torch.device("cpu"))
    rows = np.arange(200)
    batch = DeviceBatch(torch.empty(0), torch.from_numpy(labels), rows, rows)
    scores.add_batch(sums, torch.from_numpy(logits), batch, probability)
    scored = classify(logits, labels, probability=probability)
    assert np.array_equal(scored.confusion.ravel(), sums.confusion.numpy())
    assert scored.nll == pytest.approx(float(sums.totals[0]) / 200, rel=1e-6)
    for mine, (probability, *rest) in zip(scored.mistakes, sums.mistakes.tolist(), strict=True):
        assert [mine.row, mine.label, mine.predicted] == rest
        assert mine.probability == pytest.approx(probability, rel=1e-6)
    assert [scored.hits1, scored.hits5] == sums.totals[1:].tolist()


def test_of_equal_logits_the_lower_class_comes_first():
    scored = classify(np.zeros((8, 8)), np.arange(8))
    assert scored.ranks.tolist() == list(range(8))
    assert (scored.hits1, scored.hits5) == (1, 5)
    assert scored.predictions.tolist() == [0] * 8
    tied = classify([[1.0, 2.0, 2.0]] * 3, [0, 1, 2])
    assert tied.ranks.tolist() == [2, 0, 1]


def test_the_order_of_images_changes_nothing():
    logits, labels = random_logits()
    order = np.random.default_rng(1).permutation(300)
    one, other = classify(logits, labels), classify(logits[order], labels[order])
    assert one[:5] == other[:5]
    assert (one.nll, one.mean_per_class) == pytest.approx((other.nll, other.mean_per_class), rel=1e-12)
    assert np.array_equal(one.confusion, other.confusion)
    assert [each.row for each in one.mistakes] == [order[each.row] for each in other.mistakes]


def test_chunks_change_nothing(monkeypatch):
    logits, labels = random_logits()
    whole = classify(logits, labels)
    monkeypatch.setattr("vitray.metrics.classification.CHUNK_VALUES", 70)
    parts = classify(logits, labels)
    assert whole[:8] == parts[:8]
    assert np.array_equal(whole.confidences, parts.confidences)


def test_fewer_than_five_classes_and_one_image():
    one = classify([[0.5]], [0])
    assert (one.images, one.top1, one.top5, one.nll, one.mistakes) == (1, 1.0, 1.0, 0.0, [])
    three = classify(np.eye(3), [1, 2, 0])
    assert (three.top1, three.top5, three.hits5) == (0.0, 1.0, 3)


def test_absent_classes_have_no_recall_and_do_not_count():
    scored = classify([[2.0, 0, 0, 0], [2.0, 0, 0, 0], [0, 0, 3.0, 0]], [0, 1, 1])
    assert [each.recall for each in scored.classes] == [1.0, 0.0, None, None]
    assert [each.precision for each in scored.classes] == [0.5, None, 0.0, None]
    assert [each.images for each in scored.classes] == [1, 2, 0, 0]
    assert scored.classes[3].confidence is None
    assert scored.mean_per_class == 0.5


def test_large_logits_do_not_overflow():
    scored = classify([[1e4, -1e4]], [1])
    assert scored.nll == pytest.approx(2e4)
    assert scored.mistakes[0].probability == 1.0


def test_the_bootstrap_of_the_mean_per_class_equals_a_loop():
    rng = np.random.default_rng(2)
    sample = np.stack([rng.integers(0, 4, (5, 12)), rng.integers(0, 2, (5, 12))], axis=2).astype(float)
    wanted = [np.mean([s[s[:, 0] == label, 1].mean() for label in np.unique(s[:, 0])]) for s in sample]
    assert mean_per_class_of(6)(sample) == pytest.approx(wanted)
    logits, labels = random_logits()
    scored = classify(logits, labels)
    rows = np.stack([labels, scored.ranks == 0], axis=1)[None].astype(float)
    assert mean_per_class_of(9)(rows)[0] == pytest.approx(scored.mean_per_class)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (np.zeros((0, 3)), [], r"logits: the shape is \(0, 3\)"),
        (np.zeros(3), [0, 1, 2], r"logits: the shape is \(3,\)"),
        (np.zeros((2, 3)), [0], r"labels: the shape is \(1,\); expected \(2,\)"),
        (np.zeros((2, 3)), [0, 3], "labels: row 1 has class 3; expected 0 to 2"),
        (np.zeros((2, 3)), [-1, 0], "labels: row 0 has class -1"),
        (np.zeros((2, 3)), [0.0, 1.0], "labels: the type is float64; expected integers"),
        ([[0.0, 1.0], [np.nan, 1.0]], [0, 1], "logits: row 1 holds nan"),
        ([["a", "b"]], [0], "logits: the type is"),
    ],
)
def test_bad_arrays_are_refused_by_name(logits, labels, message):
    with pytest.raises(ConfigError, match=message):
        classify(logits, labels)
