"""Linear probe: equal to scikit-learn's logistic regression, SGD to torch's; the L2 is chosen on training images."""

import hashlib

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from test_few_shot import clusters

from vitray.errors import ConfigError
from vitray.metrics import linear_probe
from vitray.metrics.arrays import Labeled, ProbeInputs, draw_part
from vitray.metrics.linear_probe import (
    chunks_of,
    fit_head,
    fit_head_sgd,
    probe_linear,
    probe_linear_sgd,
    score_head,
)
from vitray.metrics.probes import probe_shares


def names(images):
    return [f"image {row}" for row in range(images)]


@pytest.mark.parametrize("l2", [1e-3, 1e-1])
def test_the_fit_equals_scikit_learn(l2):
    train, test = clusters(150), clusters(50, 1)
    head, converged = fit_head(train, 5, l2)
    x = train.features.astype(float)
    reference = LogisticRegression(C=1 / (l2 * 150), solver="newton-cg", tol=1e-12, max_iter=1000)
    reference.fit((x - x.mean(0)) / (x.std(0) + 1e-5), train.labels)
    assert converged
    assert np.allclose(head.weights, reference.coef_.T, atol=1e-6)
    assert np.allclose(head.bias - head.bias.mean(), reference.intercept_ - reference.intercept_.mean(), atol=1e-6)
    wanted = reference.predict((test.features - head.mean) / head.std)
    assert np.array_equal(score_head(head, test).predictions, wanted)


def test_a_warm_start_ends_in_the_same_place():
    train = clusters(150)
    far = fit_head(train, 5, 10.0)[0]
    assert np.allclose(fit_head(train, 5, 1e-2, far)[0].weights, fit_head(train, 5, 1e-2)[0].weights, atol=1e-5)


def test_the_l2_is_chosen_on_a_tenth_of_the_training_images():
    train, test = clusters(200), clusters(60, 1)
    keys = names(200)
    probe = probe_linear(train, 5, keys)
    development = draw_part(keys, 20, 0)
    part = Labeled(train.features[~development], train.labels[~development])
    held = Labeled(train.features[development], train.labels[development])
    assert [*probe.quality] == sorted([10.0**power for power in range(-6, 2)], reverse=True)
    for l2 in [*probe.quality][:5]:
        assert probe.quality[l2] == score_head(fit_head(part, 5, l2)[0], held).hits
    assert probe.chosen == max(l2 for l2, hits in probe.quality.items() if hits == max(probe.quality.values()))
    assert probe.converged
    assert np.allclose(probe.head.weights, fit_head(train, 5, probe.chosen)[0].weights)
    assert score_head(probe.head, test).top1 > 0.5


def test_of_equal_hits_the_larger_l2_is_chosen():
    train = clusters(60, spread=0.01)
    probe = probe_linear(train, 5, names(60), [1e-3, 1e-1, 1e-2])
    assert [*probe.quality.values()] == [6, 6, 6]
    assert probe.chosen == 1e-1


def test_the_order_of_images_changes_nothing_with_keys():
    train = clusters(100)
    keys, order = np.array(names(100)), np.random.default_rng(1).permutation(100)
    one = probe_linear(train, 5, keys.tolist(), [1e-2, 1.0])
    shuffled = Labeled(train.features[order], train.labels[order])
    other = probe_linear(shuffled, 5, keys[order].tolist(), [1e-2, 1.0])
    assert one.quality == other.quality
    assert np.allclose(one.head.weights, other.head.weights, atol=1e-6)


def test_absent_classes_one_class_and_constant_features():
    train = Labeled(np.c_[np.arange(20.0) % 2, np.ones(20)], np.arange(20) % 2)
    assert score_head(probe_linear(train, 4, names(20), [1e-3]).head, train).top1 == 1.0
    same = Labeled(np.ones((2, 3)), np.zeros(2, int))
    assert score_head(probe_linear(same, 1, names(2), [1e-3]).head, same).top1 == 1.0


# ---- features that do not fit memory ---------------------------------------------------------------------------------


def test_a_share_of_the_labels_is_that_of_the_smallest_hashes_in_any_order():
    train, test = clusters(200), clusters(60, 1)
    keys = names(200)
    values = probe_shares([0.1, 0.5], ProbeInputs(test, 5, train, keys))
    hashes = [hashlib.sha256(f"1\0{key}".encode()).digest() for key in keys]
    for share, count in ((0.1, 20), (0.5, 100)):
        rows = sorted(sorted(range(200), key=hashes.__getitem__)[:count])
        part = Labeled(train.features[rows], train.labels[rows])
        wanted = probe_linear(part, 5, [keys[row] for row in rows])
        top1 = score_head(wanted.head, test).top1
        assert values[f"linear_share{share}"] == top1
        assert values[f"linear_share{share}_l2"] == wanted.chosen
        assert values[f"linear_share{share}_low"] < top1 < values[f"linear_share{share}_high"]
    order = np.random.default_rng(0).permutation(200)
    moved = Labeled(train.features[order], train.labels[order])
    shuffled = probe_shares([0.1, 0.5], ProbeInputs(test, 5, moved, [keys[row] for row in order]))
    assert {name: shuffled[name] for name in shuffled} == values
    assert values["linear_share0.5"] > values["linear_share0.1"]


def parts(data, size):
    return lambda: (
        Labeled(data.features[start : start + size], data.labels[start : start + size])
        for start in range(0, len(data.labels), size)
    )


def test_sgd_equals_torch():
    train = clusters(130)
    head = fit_head_sgd(parts(train, 50), 5, lr=0.05, epochs=3, batch=16)
    x = torch.from_numpy(train.features).double()
    x = (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-5)
    layer = torch.nn.Linear(20, 5).double()
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * 10)  # 4 + 4 + 2 batches an epoch
    for epoch in range(3):
        for index, start in enumerate((0, 50, 100)):
            size = min(50, 130 - start)
            order = np.random.default_rng((0, epoch, index)).permutation(size) + start
            for rows in np.split(order, range(16, size, 16)):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(layer(x[rows]), torch.from_numpy(train.labels[rows])).backward()
                optimizer.step()
                schedule.step()
    assert np.allclose(head.weights, layer.weight.detach().numpy().T, atol=1e-8)
    assert np.allclose(head.bias, layer.bias.detach().numpy(), atol=1e-8)


def test_sgd_scores_nearly_as_lbfgs_does():
    train, test = clusters(600), clusters(200, 1)
    head = fit_head_sgd(parts(train, 77), 5, 0.1)
    assert score_head(head, test).top1 == pytest.approx(score_head(fit_head(train, 5, 1e-3)[0], test).top1, abs=0.03)
    assert np.allclose(head.mean, train.features.astype(float).mean(0))
    assert np.allclose(head.std, train.features.astype(float).std(0) + 1e-5)


def test_the_learning_rate_of_sgd_is_chosen_on_a_tenth_of_the_training_images(monkeypatch):
    monkeypatch.setattr(linear_probe, "SGD_CHUNK", 64)
    train, test = clusters(400), clusters(200, 1)
    keys = names(400)
    probe = probe_linear_sgd(train, 5, keys)
    development = draw_part(keys, 40, 0)
    held = Labeled(train.features[development], train.labels[development])
    for lr, hits in probe.quality.items():
        head = fit_head_sgd(chunks_of(train, ~development), 5, lr)
        assert score_head(head, held).hits == hits
    assert probe.chosen == min(lr for lr, hits in probe.quality.items() if hits == max(probe.quality.values()))
    whole = fit_head_sgd(chunks_of(train, np.ones(400, bool)), 5, probe.chosen)
    assert np.array_equal(probe.head.weights, whole.weights)
    other = score_head(probe_linear(train, 5, keys).head, test)
    assert score_head(whole, test).top1 == pytest.approx(other.top1, abs=0.05)


def test_chunks_deal_the_flagged_images_in_random_order_and_begin_anew(monkeypatch):
    """Of images sorted by class, as in folders, each chunk has several classes."""
    monkeypatch.setattr(linear_probe, "SGD_CHUNK", 30)
    labels = np.repeat(np.arange(10), 20)
    data, mask = Labeled(np.arange(200.0)[:, None], labels), np.arange(200) % 4 > 0
    chunks = chunks_of(data, mask)
    first, again = list(chunks()), list(chunks())
    assert [len(chunk.labels) for chunk in first] == [30, 30, 30, 30, 30]
    assert sorted(np.concatenate([chunk.features[:, 0] for chunk in first])) == np.flatnonzero(mask).tolist()
    assert all(np.array_equal(one.features, other.features) for one, other in zip(first, again, strict=True))
    assert min(len(set(chunk.labels)) for chunk in first) >= 7


def test_one_training_image_is_refused():
    for probe in (probe_linear, probe_linear_sgd):
        with pytest.raises(ConfigError, match="1 training image; expected at least 2"):
            probe(clusters(1), 5, names(1))
