"""Intervals and comparisons: equal to scipy, to formulas and to slow resampling, and plain about small differences."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitray.metrics import intervals
from vitray.metrics.intervals import agreement, bootstrap, compare_hits, corrected, holm, wilson


@given(st.integers(1, 100_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999))
@settings(max_examples=60, deadline=None)
def test_wilson_equals_scipy(counts, level):
    hits, n = counts
    wanted = stats.binomtest(hits, n).proportion_ci(level, "wilson")
    interval = wilson(hits, n, level)
    assert (interval.low, interval.high) == pytest.approx((wanted.low, wanted.high), abs=1e-12)
    assert 0 <= interval.low <= interval.estimate <= interval.high <= 1


def test_wilson_of_no_hit_and_of_only_hits():
    assert wilson(0, 1)[:2] == (0.0, 0.0)
    assert wilson(1, 1)[0::2] == (1.0, 1.0)
    assert wilson(50_000, 50_000).low > 0.9999


def test_the_bootstrap_of_a_mean_equals_scipy():
    values = np.random.default_rng(0).gamma(2.0, size=300)
    wanted = stats.bootstrap((values,), np.mean, n_resamples=10_000, method="percentile", rng=1).confidence_interval
    interval = bootstrap(values)
    assert interval.estimate == pytest.approx(values.mean(), rel=1e-12)
    assert (interval.low, interval.high) == pytest.approx((wanted.low, wanted.high), abs=0.01)


def test_counts_of_few_values_are_drawn_as_rows_are():
    values = np.repeat([0.0, 0.25, 1.0], [40, 25, 35])
    fast, slow = bootstrap(values, draws=20_000), bootstrap(values, lambda sample_DN: sample_DN.mean(1), draws=20_000)
    assert fast == pytest.approx(slow, abs=0.006)
    assert fast.estimate == pytest.approx(values.mean())


def test_a_statistic_of_rows_is_drawn_in_chunks(monkeypatch):
    rows, sizes = np.random.default_rng(0).normal(size=(50, 2)), []

    def statistic(sample_DN2):
        sizes.append(len(sample_DN2))
        return np.median(sample_DN2[..., 0] * sample_DN2[..., 1], axis=1)

    whole = bootstrap(rows, statistic, draws=300)
    monkeypatch.setattr(intervals, "CHUNK_VALUES", 100 * 70)
    parts = bootstrap(rows, statistic, draws=300)
    assert sizes == [1, 300, 1, 70, 70, 70, 70, 20]
    assert whole == parts
    assert whole.estimate == np.median(rows[:, 0] * rows[:, 1])
    assert bootstrap(rows, statistic, draws=300, seed=1) != whole


def test_the_interval_holds_the_mean_as_often_as_its_level():
    rng, inside = np.random.default_rng(0), 0
    for seed in range(400):
        interval = bootstrap(rng.random(60) < 0.3, draws=400, seed=seed, level=0.9)
        inside += interval.low <= 0.3 <= interval.high
    assert 0.84 < inside / 400 < 0.96


def test_one_image_has_an_interval_without_width():
    assert bootstrap([0.4], draws=10)[:3] == pytest.approx((0.4, 0.4, 0.4))


def test_pairs_are_drawn_together():
    rng = np.random.default_rng(0)
    a = rng.random(2000) < 0.8
    b = np.where(rng.random(2000) < 0.02, ~a, a)
    paired = compare_hits(a, b).difference
    assert paired.difference == pytest.approx(a.mean() - b.mean(), abs=1e-12)
    assert paired.high - paired.low < 0.4 * (bootstrap(a).high - bootstrap(a).low)
    drawn = bootstrap(a.astype(float) - b)
    assert (paired.low, paired.high) == pytest.approx((drawn.low, drawn.high), abs=1e-3)
    reverse = compare_hits(b, a).difference
    assert (reverse.low, reverse.high) == pytest.approx((-paired.high, -paired.low))


@pytest.mark.parametrize(("images", "shares"), [(20, (0.01, 0.01)), (60, (0.05, 0.02)), (400, (0.2, 0.1))])
def test_the_interval_of_a_difference_holds_it_as_often_as_its_level(images, shares):
    """By Bonett and Price's formula of the counts; a bootstrap of 20 images is [0, 0] in two of three draws."""
    rng, inside = np.random.default_rng(1), 0
    for _ in range(2000):
        only_a, only_b, _ = rng.multinomial(images, [*shares, 1 - sum(shares)])
        a, b = np.zeros((2, images))
        a[:only_a] = 1
        b[only_a : only_a + only_b] = 1
        found = compare_hits(a, b).difference
        p, q = (only_a + 1) / (images + 2), (only_b + 1) / (images + 2)
        half = stats.norm.ppf(0.975) * np.sqrt((p + q - (p - q) ** 2) / (images + 2))
        assert (found.low, found.high) == pytest.approx((p - q - half, p - q + half))
        inside += found.low <= shares[0] - shares[1] <= found.high
    assert inside / 2000 > 0.935


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_mcnemar_equals_scipys_binomial_test(pairs):
    a, b = np.array(pairs).T
    test = compare_hits(a, b).mcnemar
    assert (test.only_a, test.only_b) == (int((a & ~b).sum()), int((b & ~a).sum()))
    discordant = test.only_a + test.only_b
    assert test.p_value == pytest.approx(stats.binomtest(test.only_a, discordant).pvalue if discordant else 1.0)
    assert compare_hits(b, a).mcnemar.p_value == test.p_value


def test_a_comparison_says_plainly_whether_the_difference_is_significant():
    same = compare_hits(np.ones(100), np.ones(100))
    assert not same.significant
    assert same.difference[:3] == pytest.approx((0.0, -0.0272, 0.0272), abs=1e-4)
    assert "is not significant" in same.sentence()
    clear = compare_hits(np.ones(100), np.r_[np.zeros(20), np.ones(80)])
    assert clear.significant
    assert "+20.00 points on 100 images is significant (95 % interval +1" in clear.sentence()
    assert "20 images right only for the first, 0 only for the second, p = 1.9e-06" in clear.sentence()


@given(st.lists(st.floats(0, 1), max_size=12))
def test_p_values_are_corrected_as_by_a_slow_definition(p_values):
    """Holm's p of a test is the largest of (tests that are no more extreme than each) x its p, up to its own place."""
    order = sorted(p_values)
    slow = [max(min(1, (len(order) - i) * order[i]) for i in range(order.index(p) + order.count(p))) for p in p_values]
    assert holm(p_values) == pytest.approx(slow)
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # as R's p.adjust


def test_a_difference_among_many_needs_a_smaller_p():
    alone = compare_hits(np.ones(100), np.r_[np.zeros(6), np.ones(94)])
    assert (alone.mcnemar.p_value, alone.corrected_p, alone.significant) == (0.03125, 0.03125, True)
    same = compare_hits(np.ones(100), np.ones(100))
    first, *_ = corrected([alone, same, same])
    assert (first.corrected_p, first.significant) == (3 * 0.03125, False)
    assert "p = 0.094, corrected for 3 comparisons)" in first.sentence()


@pytest.mark.parametrize(("tests", "gain"), [(1, 0.05), (3, 0.03)])
def test_as_many_images_as_said_find_a_difference(tests, gain):
    shares = [0.1 - gain / 2, 0.1 + gain / 2, 0.8]  # of images that only a, only b and both have right
    kind = np.repeat(range(3), np.round(4000 * np.array(shares)).astype(int))
    needed = corrected([compare_hits(kind != 1, kind != 0)] * tests)[0].images_to_tell
    z = stats.norm.ppf(1 - 0.025 / tests) + stats.norm.ppf(0.8)
    assert needed == pytest.approx((z / gain) ** 2 * (0.2 - gain**2), rel=0.05)
    drawn = np.random.default_rng(tests).multinomial(needed, shares, 1000)
    found = [stats.binomtest(int(a), int(a + b)).pvalue < 0.05 / tests for a, b, _ in drawn]
    assert 0.75 < np.mean(found) < 0.85


def test_few_images_are_not_enough():
    few = compare_hits(np.ones(3), np.zeros(3))
    assert few.difference[:3] == pytest.approx((1.0, -0.1012, 1.0), abs=1e-4)
    assert few.mcnemar.p_value == 0.25
    assert not few.significant


def test_agreement_is_the_share_of_equal_predictions():
    shares = agreement([[0, 1, 2, 3], [0, 1, 2, 0], [3, 1, 0, 0]])
    assert shares.tolist() == [[1.0, 0.75, 0.25], [0.75, 1.0, 0.5], [0.25, 0.5, 1.0]]
