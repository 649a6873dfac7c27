"""Rank and separation of features: equal to scipy and to loops over pairs; exact for features of known rank."""

import numpy as np
import pytest
from scipy.linalg import svdvals
from scipy.stats import entropy
from sklearn.metrics.pairwise import cosine_distances
from test_few_shot import clusters

from vitray.errors import ConfigError
from vitray.metrics.arrays import Labeled, ProbeInputs
from vitray.metrics.feature_rank import class_separation, effective_rank, rankme, singular_values
from vitray.metrics.probes import probe_scores


@pytest.mark.parametrize("shape", [(200, 16), (10, 16), (16, 16), (1, 5), (5, 1)])
def test_ranks_equal_scipy(shape):
    features = np.random.default_rng(0).normal(size=shape).astype(np.float32) + 0.5
    values = svdvals(features.astype(float))
    shares = values / values.sum() + 1e-7
    assert rankme(features) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), abs=1e-6)
    centered = features.astype(float) - features.astype(float).mean(0)
    wanted = np.exp(entropy(svdvals(centered))) if shape[0] > 1 else 0.0
    assert effective_rank(features) == pytest.approx(wanted, abs=1e-6)


def test_features_of_known_rank():
    assert rankme(np.eye(8)) == pytest.approx(8, abs=1e-4)
    assert rankme(np.ones((50, 6))) == pytest.approx(1, abs=1e-4)
    rows = np.repeat([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], 10, axis=0)
    assert effective_rank(rows) == pytest.approx(2)  # three points lie in a plane
    assert effective_rank(np.full((50, 6), 0.1)) == effective_rank(np.zeros((3, 2))) == rankme(np.zeros((3, 2))) == 0


def test_chunks_keep_small_singular_values(monkeypatch):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(500, 12)) * 10.0 ** -np.arange(12)
    monkeypatch.setattr("vitray.metrics.feature_rank.CHUNK_ROWS", 64)
    assert singular_values(features) == pytest.approx(svdvals(features), rel=1e-4)
    assert singular_values(features[:5]) == pytest.approx(svdvals(features[:5]), rel=1e-4)


def test_parts_of_the_rows_change_nothing(monkeypatch):
    data = clusters(80)
    rank, separation = effective_rank(data.features), class_separation(*data)
    monkeypatch.setattr("vitray.metrics.feature_rank.CHUNK_ROWS", 7)
    assert effective_rank(data.features) == pytest.approx(rank, rel=1e-9)
    assert class_separation(*data) == pytest.approx(separation, rel=1e-9)


def test_separation_equals_loops_over_images_and_pairs():
    data = clusters(80)
    x, labels = data.features.astype(float), data.labels
    scored = class_separation(data.features, labels)
    within = sum(((x[labels == k] - x[labels == k].mean(0)) ** 2).sum() for k in range(5))
    assert scored.variance_share == pytest.approx(1 - within / ((x - x.mean(0)) ** 2).sum(), abs=1e-9)
    distances = cosine_distances(x)
    means = np.array([[distances[labels == j][:, labels == k].mean() for k in range(5)] for j in range(5)])
    assert scored.cosine == pytest.approx(1 - np.trace(means) / 5 / means.mean(), abs=1e-5)
    assert scored.classes == 5
    order = np.random.default_rng(1).permutation(80)
    assert class_separation(x[order], labels[order]) == pytest.approx(scored, rel=1e-5)


def test_collapsed_classes_and_features():
    points = np.repeat(np.eye(3), 4, axis=0)
    assert class_separation(points, np.repeat([0, 1, 2], 4))[:2] == pytest.approx((1.0, 1.0))
    assert class_separation(points, np.zeros(12, int)) == pytest.approx((0.0, 0.0, 1), abs=1e-12)
    assert class_separation(np.ones((4, 2)), np.array([0, 0, 1, 1])) == (None, None, 2)
    assert class_separation(np.array([[1.0]]), np.array([0])) == (None, None, 1)


def test_bad_input_is_refused_by_name():
    for features, labels, message in (
        (np.zeros((0, 4)), np.zeros(0, int), r"test features: the shape is \(0, 4\)"),
        (np.array([[0.0], [np.inf]]), np.zeros(2, int), "test features: row 1 holds inf"),
        (np.array([[0.0]]), np.array([9]), "test labels: row 0 has class 9"),
    ):
        with pytest.raises(ConfigError, match=message):
            probe_scores(["rank"], ProbeInputs(Labeled(features, labels), 2))
