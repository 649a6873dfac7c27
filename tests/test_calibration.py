"""Calibration: equal to loops over bins, to scikit-learn and to scipy; a temperature is measured on the other half."""

from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.metrics import brier_score_loss, log_loss

from vitray.metrics import calibration
from vitray.metrics.calibration import (
    adaptive_ece,
    best_temperature,
    brier,
    calibration_error,
    calibration_scores,
    fit_temperature,
    reliability,
)


def random_logits(images=500, num_classes=6, seed=0, scale=3.0):
    """Logits whose probabilities are right, multiplied by `scale`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(images, num_classes))
    labels = np.array([rng.choice(num_classes, p=each) for each in softmax(logits, 1)])
    return (scale * logits).astype(np.float32), labels


def slow_ece(confidences, hits, groups):
    return sum(len(rows) * abs(hits[rows].mean() - confidences[rows].mean()) for rows in groups) / len(hits)


def test_ece_equals_a_loop_over_bins():
    logits, labels = random_logits()
    confidences, hits = softmax(logits.astype(float), 1).max(1), logits.argmax(1) == labels
    groups = []
    for index in range(15):
        rows = np.flatnonzero((confidences > index / 15) & (confidences <= (index + 1) / 15))
        groups += [rows] * (len(rows) > 0)
    assert calibration_scores(logits, labels).ece == pytest.approx(slow_ece(confidences, hits, groups), abs=1e-12)
    assert calibration_scores(logits, labels).ece > 0.1


def test_adaptive_ece_has_bins_of_equal_mass():
    logits, labels = random_logits(510)
    confidences, hits = softmax(logits.astype(float), 1).max(1), logits.argmax(1) == labels
    groups = np.split(np.argsort(confidences), 15)
    assert adaptive_ece(logits, labels) == pytest.approx(slow_ece(confidences, hits, groups), abs=1e-12)
    assert {each.images for each in reliability(logits[:500], labels[:500], equal_mass=True)} == {33, 34}


def test_equal_confidences_share_a_bin():
    logits, labels = np.zeros((20, 2)), np.arange(20) % 2
    [only] = reliability(logits, labels, equal_mass=True)
    assert only == (0.5, 0.5, 20, 10, 0.5, 0.5)
    assert adaptive_ece(logits, labels) == calibration_scores(logits, labels).ece == 0


def test_bins_of_a_diagram_contain_their_upper_bound():
    bins = reliability(np.array([[0.0, 0.0], [9.0, 0.0]]), np.array([0, 1]), bins=4)
    assert [(each.low, each.high, each.images, each.hits) for each in bins] == [
        (0.0, 0.25, 0, 0),
        (0.25, 0.5, 1, 1),
        (0.5, 0.75, 0, 0),
        (0.75, 1.0, 1, 0),
    ]
    assert (bins[0].accuracy, bins[0].confidence, bins[1].confidence, bins[3].accuracy) == (None, None, 0.5, 0.0)


def test_brier_and_nll_equal_scikit_learn():
    logits, labels = random_logits()
    probabilities = softmax(logits.astype(float), 1)
    wanted = brier_score_loss(labels, probabilities, labels=np.arange(6), scale_by_half=False)
    assert brier(logits, labels) == pytest.approx(wanted, rel=1e-12)
    assert calibration_scores(logits, labels).nll == pytest.approx(log_loss(labels, probabilities), rel=1e-12)
    cooler = softmax(logits.astype(float) / 2.5, 1)
    assert calibration_scores(logits, labels, 2.5).nll == pytest.approx(log_loss(labels, cooler), rel=1e-12)
    assert brier(np.eye(3) * 100, np.arange(3)) == pytest.approx(0)
    assert brier(np.eye(3) * 100, np.array([1, 2, 0])) == pytest.approx(2)


@pytest.mark.parametrize("scale", [0.02, 1.0, 3.0, 300.0])
def test_the_best_temperature_equals_a_search(scale):
    logits, labels = random_logits(scale=scale)

    def loss(log_temperature):
        values = log_softmax(logits.astype(float) / np.exp(log_temperature), 1)
        return -values[np.arange(len(labels)), labels].mean()

    wanted = np.exp(minimize_scalar(loss, bounds=(-6, 7), method="bounded", options={"xatol": 1e-10}).x)
    assert best_temperature(logits, labels) == pytest.approx(wanted, rel=1e-6)
    assert 0.85 < wanted / scale < 1.2  # the logits are too large by this factor


def test_a_temperature_is_fitted_on_one_half_and_measured_on_the_other():
    logits, labels = random_logits()
    keys = [f"image {row}" for row in range(500)]
    fitted = fit_temperature(logits, labels, keys)
    half = calibration.draw_part(keys, 250, 0)
    assert half.sum() == fitted.fitted == fitted.before.images == fitted.after.images == 250
    assert fitted.temperature == best_temperature(logits[half], labels[half])
    assert fitted.before == calibration_scores(logits[~half], labels[~half])
    assert fitted.after.nll == pytest.approx(calibration_scores(logits[~half], labels[~half], fitted.temperature).nll)
    assert fitted.after.ece < fitted.before.ece
    assert not fitted.at_bound


def test_the_half_follows_the_keys_in_any_order():
    logits, labels = random_logits(100)
    keys = np.array([f"image {row}" for row in range(100)])
    order = np.random.default_rng(3).permutation(100)
    one = fit_temperature(logits, labels, keys.tolist())
    other = fit_temperature(logits[order], labels[order], keys[order].tolist())
    assert other.temperature == pytest.approx(one.temperature, rel=1e-9)
    assert other.after == pytest.approx(one.after, rel=1e-9)


def test_a_temperature_without_a_minimum_is_at_a_bound():
    logits = 3 * np.eye(4)
    assert best_temperature(1e4 * logits[:1], np.array([1])) == calibration.HOTTEST
    assert fit_temperature(logits, np.arange(4), "abcd")[:2] == (calibration.COLDEST, True)
    assert fit_temperature(logits, np.array([1, 2, 3, 0]), "abcd")[:2] == (calibration.HOTTEST, True)


def test_the_order_of_images_changes_no_score():
    logits, labels = random_logits()
    order = np.random.default_rng(1).permutation(500)
    one, other = (calibration_scores(*each) for each in ((logits, labels), (logits[order], labels[order])))
    assert one == pytest.approx(other, rel=1e-12)


def test_one_image_and_one_class():
    assert calibration_scores(np.array([[0.3]]), np.array([0])) == (1, 0.0, 0.0, 0.0, 0.0)


def fixed_confidences(rng: np.random.Generator, images: int, sharpness: float, true: float) -> tuple[Any, Any]:
    """Logits whose confidences are too high or too low where `true`, the power that gives the right ones, is not 1."""
    logits = sharpness * rng.standard_normal((images, 5))
    probabilities = np.exp(true * logits)
    probabilities /= probabilities.sum(1, keepdims=True)
    labels = (rng.random((images, 1)) > probabilities.cumsum(1)).sum(1)
    return logits, np.minimum(labels, 4)


@pytest.mark.parametrize(("images", "sharpness"), [(60, 4.0), (200, 1.0), (200, 8.0), (1000, 2.0)])
@pytest.mark.parametrize("true", [1.0, 0.8, 0.4])
def test_the_interval_of_the_ece_covers_the_error_of_many_images(images, sharpness, true):
    rng = np.random.default_rng(images)
    logits, labels = fixed_confidences(rng, 400_000, sharpness, true)
    error = calibration_scores(logits, labels).ece if true < 1 else 0.0
    found = [calibration_error(*fixed_confidences(rng, images, sharpness, true)) for _ in range(100)]
    assert sum(each.interval.low <= error <= each.interval.high for each in found) >= 93
    rejected = sum(each.p < 0.05 for each in found)
    if true == 0.4 and images > 60:
        assert rejected > 90
    if true == 1:
        assert rejected <= 12
        means = np.mean([[each.interval.estimate, each.calibrated] for each in found], axis=0)
        assert means[0] == pytest.approx(means[1], rel=0.15)


def test_the_ece_with_an_interval_is_that_of_the_bins():
    logits, labels = random_logits(200)
    error = calibration_error(logits, labels)
    assert error.interval.estimate == pytest.approx(calibration_scores(logits, labels).ece, abs=1e-12)
    assert error.interval.low < error.interval.estimate < error.interval.high
    order = np.random.default_rng(1).permutation(200)
    assert calibration_error(logits[order], labels[order]).p == pytest.approx(error.p, abs=0.02)


def test_images_without_a_mistake_are_no_proof_of_calibration():
    """Of twenty images with a confidence of 0.9, all are right with a probability of 0.12."""
    logits = np.tile([np.log(9.0), 0.0], (20, 1))
    error = calibration_error(logits, np.zeros(20, int))
    assert (error.interval.low, error.interval.estimate) == (0.0, pytest.approx(0.1))
    assert error.p > 0.1
    assert calibration_error(np.array([[0.3]]), np.array([0]))[0][:3] == (0.0, 0.0, 0.0)
