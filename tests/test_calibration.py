"""Calibration: equal to loops over bins, to scikit-learn and to scipy; a temperature is measured on the other half."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.metrics import brier_score_loss, log_loss

from vitray.evaluation.results import score
from vitray.metrics import calibration
from vitray.metrics.calibration import (
    adaptive_ece,
    best_temperature,
    brier,
    calibration_scores,
    fit_temperature,
    reliability,
)
from vitray.metrics.intervals import Interval, bootstrap, reflected


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


def test_the_bootstrap_draws_the_ece():
    logits, labels = random_logits(200)
    interval = bootstrap(calibration.ece_rows(logits, labels), calibration.ece_of, draws=400)
    assert interval.estimate == pytest.approx(calibration_scores(logits, labels).ece, abs=1e-12)
    assert interval.low < interval.estimate < interval.high


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_interval_of_the_ece_is_reflected_and_contains_its_estimate(seed):
    """The probabilities are right, so the true error is zero."""
    logits, labels = random_logits(200, seed=seed, scale=1)
    interval = score(logits, labels, [f"image {row}" for row in range(200)]).intervals["ece"]
    percentile = bootstrap(calibration.ece_rows(logits, labels), calibration.ece_of)
    assert 0 <= interval.low < percentile.low
    assert interval.low <= interval.estimate <= interval.high
    assert interval.high == max(interval.estimate, 2 * interval.estimate - percentile.low)


def test_an_interval_is_reflected_at_its_estimate():
    assert reflected(Interval(0.10, 0.08, 0.13, 0.95)) == pytest.approx((0.10, 0.07, 0.12, 0.95))
    assert reflected(Interval(0.10, 0.11, 0.30, 0.95)) == pytest.approx((0.10, 0.0, 0.10, 0.95))
