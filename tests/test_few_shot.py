"""Few-shot accuracy: the ViT paper's algebra in both of its forms, its draws of images, and its constants."""

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from vitray.errors import ConfigError
from vitray.metrics import arrays, few_shot
from vitray.metrics.arrays import Labeled, ProbeInputs
from vitray.metrics.few_shot import (
    few_shot_scores,
    fit_least_squares,
    probe_few_shot,
    shot_order,
    shots_within,
    smallest_class,
)
from vitray.metrics.probes import probe_scores


def clusters(images, seed=0, num_classes=5, width=20, spread=2.0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, images)
    means = np.random.default_rng(99).normal(size=(num_classes, width))
    return Labeled((means[labels] + spread * rng.normal(size=(images, width))).astype(np.float32), labels)


def reference_targets(x, y, x_test, num_classes):
    """The published algebra, step by step: one eigendecomposition of X'X or of XX'."""
    mean, std = x.mean(0, keepdims=True), x.std(0, keepdims=True) + 1e-5
    x, x_test = (np.c_[(each - mean) / std, np.full(len(each), 100.0)] for each in (x, x_test))
    targets = 2.0 * np.eye(num_classes)[y] - 1.0
    if len(x) >= x.shape[1]:
        eigs, q = np.linalg.eigh(x.T @ x)
        left, right = q, q.T @ (x.T @ targets)
    else:
        eigs, q = np.linalg.eigh(x @ x.T)
        left, right = x.T @ q, q.T @ targets
    return x_test @ ((left / (eigs + 1024.0)) @ right)


@pytest.mark.parametrize("images", [7, 20, 21, 22, 200])
def test_the_fit_equals_the_published_algebra_and_scikit_learn(images):
    train, test = clusters(images), clusters(50, 1)
    x, x_test = train.features.astype(float), test.features.astype(float)
    model = fit_least_squares(train.features, train.labels, 5)
    wanted = reference_targets(x, train.labels, x_test, 5)
    assert np.allclose(model.scores(test.features), wanted, atol=1e-6)
    mean, std = x.mean(0), x.std(0) + 1e-5
    padded = np.c_[(x - mean) / std, np.full(images, 100.0)]
    ridge = Ridge(alpha=1024.0, fit_intercept=False, solver="svd").fit(padded, 2.0 * np.eye(5)[train.labels] - 1.0)
    assert np.allclose(model.weights, ridge.coef_.T, atol=1e-6)


def test_shots_are_drawn_as_in_the_published_code():
    train = clusters(300)
    rng = np.random.default_rng(2)
    wanted = [rng.permutation(np.where(train.labels == label)[0]) for label in range(5)]
    for own, other in zip(shot_order(train.labels, 5, 2), wanted, strict=True):
        assert np.array_equal(own, other)


def test_scores_equal_a_loop_over_seeds_and_shots():
    train, test = clusters(300), clusters(80, 1)
    scores = probe_few_shot(train, test, 5)
    assert {shots: len(each) for shots, each in scores.items()} == {1: 3, 5: 3, 10: 3, 25: 3}
    for shots, of_seeds in scores.items():
        for seed, each in enumerate(of_seeds):
            rng = np.random.default_rng(seed)
            rows = np.concatenate([rng.permutation(np.where(train.labels == k)[0])[:shots] for k in range(5)])
            targets = reference_targets(train.features[rows].astype(float), train.labels[rows], test.features, 5)
            assert len(rows) == 5 * shots
            assert np.array_equal(each.predictions, targets.argmax(1))
            assert each.hits == (targets.argmax(1) == test.labels).sum() == round(each.top1 * 80)
    values, hits, _ = few_shot_scores(ProbeInputs(test, 5, train))
    top1 = [each.top1 for each in scores[5]]
    assert values["few_shot25"] > values["few_shot1"]
    assert (values["few_shot5"], values["few_shot5_std"]) == pytest.approx((np.mean(top1), np.std(top1, ddof=1)))
    assert hits.keys() == {"few_shot5"}
    assert set(np.unique(3 * hits["few_shot5"]).round(9)) <= {0, 1, 2, 3}
    assert hits["few_shot5"].mean() == pytest.approx(values["few_shot5"])


def test_the_constants_are_the_published_ones():
    assert (few_shot.L2, few_shot.BIAS, few_shot.SHOTS, few_shot.SEEDS) == (1024, 100, (1, 5, 10, 25), (0, 1, 2))


def test_the_order_of_test_images_changes_nothing():
    train, test = clusters(100), clusters(40, 1)
    order = np.random.default_rng(1).permutation(40)
    one, hits, _ = few_shot_scores(ProbeInputs(test, 5, train))
    other, others, _ = few_shot_scores(ProbeInputs(Labeled(test.features[order], test.labels[order]), 5, train))
    assert one == other
    assert np.array_equal(hits["few_shot5"][order], others["few_shot5"])


def test_absent_classes_small_classes_and_constant_features():
    train = Labeled(np.ones((3, 2)), np.array([0, 0, 2]))
    scores = probe_few_shot(train, Labeled(np.ones((2, 2)), np.array([0, 2])), 4, shots=[2])
    assert [score.top1 for score in scores[2]] == [0.5, 0.5, 0.5]
    one = Labeled(np.ones((1, 1)), np.zeros(1, int))
    assert probe_few_shot(one, one, 1)[1][0].top1 == 1.0


def test_parts_of_the_scored_rows_change_nothing(monkeypatch):
    train, test = clusters(60), clusters(50, 1)
    whole = probe_few_shot(train, test, 5)
    monkeypatch.setattr(arrays, "CHECKED_ROWS", 7)
    for shots, scores in probe_few_shot(train, test, 5).items():
        for one, other in zip(whole[shots], scores, strict=True):
            assert np.array_equal(one.predictions, other.predictions)


def test_a_number_of_shots_is_that_of_the_smallest_class_or_fewer():
    assert smallest_class(np.array([3, 0, 3, 0, 0, 3, 3])) == 3
    assert [shots_within(images) for images in (0, 1, 9, 10, 400)] == [[], [1], [1, 5], [1, 5, 10], [1, 5, 10, 25]]


def test_bad_input_is_refused_by_name():
    train, test = clusters(10), clusters(10, 1)
    with pytest.raises(ConfigError, match="test features: 19 columns; expected 20"):
        probe_scores(["few_shot"], ProbeInputs(Labeled(test.features[:, 1:], test.labels), 5, train))
    with pytest.raises(ConfigError, match=r"train labels: row \d+ has class 4; expected 0 to 3"):
        probe_scores(["few_shot"], ProbeInputs(Labeled(test.features, np.zeros(10, int)), 4, train))
