"""Nearest neighbors: equal to a loop over the published rule and to scikit-learn; ties go to the first."""

import tracemalloc

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier
from test_few_shot import clusters

from vitray.errors import ConfigError
from vitray.metrics.arrays import Labeled, ProbeInputs
from vitray.metrics.knn import knn_scores, nearest_rows, probe_knn
from vitray.metrics.probes import probe_scores


def test_votes_equal_a_loop_over_the_published_rule():
    train, test = clusters(200), clusters(60, 1)
    found = probe_knn(train, test, 5, [1, 10, 20], 0.2)
    rows = train.features / np.linalg.norm(train.features, axis=1, keepdims=True)
    for index, image in enumerate(test.features):
        similar = rows @ (image / np.linalg.norm(image))
        order = np.argsort(-similar, kind="stable")[:20]
        weights = np.exp(similar[order] / 0.2) / np.exp(similar[order] / 0.2).sum()
        for k, score in found.items():
            votes = np.zeros(5)
            np.add.at(votes, train.labels[order[:k]], weights[:k])
            assert score.predictions[index] == votes.argmax()
    assert all(score.hits == (score.predictions == test.labels).sum() for score in found.values())
    assert found[20].top1 == found[20].hits / 60 > 0.4


@pytest.mark.parametrize("k", [10, 20])
def test_predictions_equal_scikit_learn(k):
    train, test = clusters(300), clusters(80, 1)
    reference = KNeighborsClassifier(k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
    wanted = reference.fit(train.features, train.labels).predict(test.features)
    assert np.array_equal(probe_knn(train, test, 5)[k].predictions, wanted)


def test_of_equal_similarities_the_first_rows_are_nearest():
    similar = np.array([[1, 3, 2, 2, 2, 0], [0, 0, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0]])
    assert nearest_rows(similar, 3).tolist() == [[1, 2, 3], [0, 1, 2], [0, 1, 2]]
    rng = np.random.default_rng(0)
    similar = rng.integers(0, 4, (50, 30)).astype(float)
    for count in (1, 7, 30):
        wanted = np.argsort(-similar, axis=1, kind="stable")[:, :count]
        assert np.array_equal(nearest_rows(similar, count), wanted)


def test_of_equal_votes_the_lower_class_wins():
    same = Labeled(np.ones((4, 3)), np.array([2, 1, 1, 2]))
    assert probe_knn(same, Labeled(np.ones((1, 3)), np.array([1])), 3, [4])[4].predictions.tolist() == [1]


def test_chunks_and_the_order_of_images_change_nothing(monkeypatch):
    train, test = clusters(120), clusters(50, 1)
    whole = probe_knn(train, test, 5)
    rng = np.random.default_rng(1)
    first, second = rng.permutation(120), rng.permutation(50)
    shuffled = [Labeled(each.features[order], each.labels[order]) for each, order in ((train, first), (test, second))]
    assert {k: each.hits for k, each in probe_knn(*shuffled, 5).items()} == {k: s.hits for k, s in whole.items()}
    for block in (1, 7, 50, 119):
        monkeypatch.setattr("vitray.metrics.knn.BLOCK", block)
        for k, score in probe_knn(train, test, 5).items():
            assert np.array_equal(score.predictions, whole[k].predictions)


@pytest.mark.parametrize("block", [1, 3, 8, 64])
def test_blocks_keep_the_order_of_equal_similarities(monkeypatch, block):
    """Features along axes: their similarities are exactly 0, 1 or -1, so most of them are equal."""
    rng = np.random.default_rng(0)
    axes = np.concatenate([np.eye(3), -np.eye(3)])
    train = Labeled(axes[rng.integers(0, 6, 40)], rng.integers(0, 4, 40))
    test = Labeled(axes[rng.integers(0, 6, 25)], rng.integers(0, 4, 25))
    order = np.argsort(-(test.features @ train.features.T), axis=1, kind="stable")
    monkeypatch.setattr("vitray.metrics.knn.BLOCK", block)
    for k, score in probe_knn(train, test, 4, [1, 5, 40]).items():
        similar = np.take_along_axis(test.features @ train.features.T, order, 1)
        weights = np.exp(similar / 0.07) / np.exp(similar / 0.07).sum(1, keepdims=True)
        votes = np.zeros((25, 4))
        for row in range(25):
            np.add.at(votes[row], train.labels[order[row, :k]], weights[row, :k])
        assert np.array_equal(score.predictions, votes.argmax(1))


def test_memory_does_not_grow_with_the_training_images(tmp_path):
    """Features in a file of 64 MB are read block by block."""
    features = np.memmap(tmp_path / "features", np.float32, "w+", shape=(200_000, 80))
    features[:] = np.random.default_rng(0).random((200_000, 80), np.float32)
    train = Labeled(features, np.arange(200_000) % 5)
    tracemalloc.start()
    score = probe_knn(train, Labeled(np.array(features[:8]), np.arange(8) % 5), 5, [1])[1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert score.top1 == 1.0
    assert peak < features.nbytes / 4


def test_one_image_zero_features_and_half_precision():
    one = Labeled(np.zeros((1, 2), np.float16), np.array([0]))
    assert probe_knn(one, one, 1, [1])[1].top1 == 1.0
    train = clusters(60)
    half = Labeled(train.features.astype(np.float16), train.labels)
    assert probe_knn(half, half, 5, [1])[1].top1 == 1.0


def test_bad_input_is_refused_by_name():
    train = clusters(9)
    with pytest.raises(ConfigError, match=r"test labels: the shape is \(8,\); expected \(9,\)"):
        probe_scores(["knn"], ProbeInputs(Labeled(train.features, train.labels[1:]), 5, train))


def test_few_training_images_are_all_neighbors():
    values, hits, _ = knn_scores(ProbeInputs(clusters(9), 5, clusters(9)))
    assert values.keys() == {"knn9", "knn9_low", "knn9_high"}
    assert hits["knn9"].mean() == values["knn9"]
