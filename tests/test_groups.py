"""Differences of groups under one variance: scipy's tests, paired tests, and simulations of many experiments."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitray.metrics.groups import dunnett, overlap_of_folds, pool, scatter_p, seeds_to_tell, tukey

NAMES = "abcdef"


def drawn(rng: np.random.Generator, counts, effects=None, seed_sd=0.0) -> dict[str, dict[int, float]]:
    """Scores of groups with some seeds each, of variance 1."""
    of_seed = rng.normal(0, seed_sd, max(counts)) if seed_sd else np.zeros(max(counts))
    effects = np.zeros(len(counts)) if effects is None else effects
    return {
        name: dict(enumerate((effect + of_seed[:count] + rng.normal(size=count)).tolist()))
        for name, count, effect in zip(NAMES, counts, effects, strict=False)
    }


def samples(scores) -> list[list[float]]:
    return [list(each.values()) for each in scores.values()]


@settings(max_examples=15, deadline=None)
@given(counts=st.lists(st.integers(2, 6), min_size=2, max_size=5), seed=st.integers(0, 10**6))
def test_tukeys_differences_are_those_of_scipy(counts, seed):
    rng = np.random.default_rng(seed)
    scores = drawn(rng, counts, rng.normal(size=len(counts)))
    theirs = stats.tukey_hsd(*samples(scores))
    bounds = theirs.confidence_interval()
    pairs = [(a, b) for a in range(len(counts)) for b in range(len(counts)) if a != b]
    pooled = pool(scores, by_seed=False)
    assert pooled is not None
    for (a, b), own in zip(pairs, tukey(pooled, [(NAMES[a], NAMES[b]) for a, b in pairs]), strict=True):
        assert own.mean == pytest.approx(theirs.statistic[a, b])
        assert own.p == pytest.approx(theirs.pvalue[a, b], abs=1e-9)
        assert (own.low, own.high) == pytest.approx((bounds.low[a, b], bounds.high[a, b]), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("counts", [(5, 5), (5, 5, 5, 5), (3, 6, 4)])
def test_dunnetts_differences_are_those_of_scipy(counts):
    scores = drawn(np.random.default_rng(len(counts)), counts, np.arange(len(counts)))
    control, *others = samples(scores)
    theirs = stats.dunnett(*others, control=control, rng=np.random.default_rng(1))
    bounds = theirs.confidence_interval()
    pooled = pool(scores, by_seed=False)
    assert pooled is not None
    for place, own in enumerate(dunnett(pooled, "a").values()):
        mean, error = pooled.difference(NAMES[place + 1], "a")
        assert (own.mean, own.mean / error) == pytest.approx((mean, theirs.statistic[place]))
        assert own.p == pytest.approx(theirs.pvalue[place], abs=2e-3)
        assert (own.low, own.high) == pytest.approx((bounds.low[place], bounds.high[place]), abs=0.02)


def test_two_groups_with_effects_of_seeds_are_a_paired_test():
    scores = drawn(np.random.default_rng(3), (5, 5), seed_sd=4.0)
    one, other = samples(scores)
    theirs = stats.ttest_rel(one, other)
    bounds = theirs.confidence_interval()
    pooled = pool(scores, by_seed=True)
    assert pooled is not None
    assert pooled.freedom == 4
    [own] = tukey(pooled, [("a", "b")])
    assert own.p == pytest.approx(theirs.pvalue, abs=1e-3)
    assert (own.low, own.high) == pytest.approx((bounds.low, bounds.high), rel=1e-3)


def test_the_variance_with_effects_of_seeds_is_that_of_two_ways():
    """Of complete seeds: the sum of squares less that of groups and of seeds, by hand."""
    scores = drawn(np.random.default_rng(5), (6, 6, 6), (0, 1, 2), seed_sd=3.0)
    table = np.array(samples(scores))
    rest = table - table.mean(0, keepdims=True) - table.mean(1, keepdims=True) + table.mean()
    pooled = pool(scores, by_seed=True)
    assert pooled is not None
    assert pooled.freedom == 10
    assert pooled.variance == pytest.approx(np.square(rest).sum() / 10)
    mean, error = pooled.difference("c", "a")
    assert mean == pytest.approx(table[2].mean() - table[0].mean())
    assert error == pytest.approx(np.sqrt(2 * pooled.variance / 6))


def test_a_missing_seed_leaves_no_effect_of_it_in_a_difference():
    scores = drawn(np.random.default_rng(6), (6, 6, 6), seed_sd=0.0)
    shifted = {name: {seed: score + 100 * seed for seed, score in each.items()} for name, each in scores.items()}
    del scores["b"][5], shifted["b"][5]
    first, second = pool(scores, by_seed=True), pool(shifted, by_seed=True)
    assert first is not None
    assert second is not None
    assert second.difference("a", "b") == pytest.approx(first.difference("a", "b"))


def test_effects_are_means_as_if_each_group_had_all_seeds():
    scores = {"a": {0: 0.5, 1: 0.6}, "b": {0: 0.6, 1: 0.7, 2: 0.2}}  # seed 2 is hard
    scores |= {"c": {0: 0.4, 1: 0.5, 2: 0.0}}
    pooled = pool(scores, by_seed=True)
    assert pooled is not None
    assert pooled.effects == pytest.approx([0.4, 0.5, 0.3])
    assert pool(scores, by_seed=False).effects == pytest.approx([0.55, 0.5, 0.3])  # type: ignore[union-attr]


def test_a_group_that_shares_no_seed_leaves_the_others_compared():
    scores = drawn(np.random.default_rng(7), (4, 4, 4), seed_sd=2.0)
    alone = {"x": {8: 1.0, 9: 2.0}, **scores, "y": {seed + 20: score for seed, score in scores["a"].items()}}
    first, second = pool(scores, by_seed=True), pool(alone, by_seed=True)
    assert first is not None
    assert second is not None
    assert second.groups == ("a", "b", "c")
    assert tukey(first, [("a", "b")]) == tukey(second, [("a", "b")])


def test_folds_scatter_as_nadeau_and_bengio_say():
    """The corrected resampled t-test, by hand: the variance of k differences times 1 / k + 1 / (k - 1)."""
    scores = drawn(np.random.default_rng(8), (5, 5), seed_sd=2.0)
    apart = np.subtract(*samples(scores))
    error = np.sqrt(apart.var(ddof=1) * (1 / 5 + 1 / 4))
    pooled = pool(scores, True, overlap_of_folds(5, 5))
    assert pooled is not None
    assert pooled.difference("a", "b") == pytest.approx((apart.mean(), error))
    [own] = tukey(pooled, [("a", "b")])
    assert own.p == pytest.approx(2 * stats.t.sf(abs(apart.mean()) / error, 4))


def test_groups_that_scatter_unequally_are_found():
    alike = drawn(np.random.default_rng(9), (5, 5, 5))
    wide = {**alike, "c": {seed: 20 * score for seed, score in alike["c"].items()}}
    assert scatter_p(alike) == pytest.approx(stats.bartlett(*samples(alike)).pvalue)
    assert scatter_p(alike) > 0.05 > 0.001 > scatter_p(wide)  # type: ignore[operator]
    assert scatter_p({"a": {0: 1.0, 1: 1.0}, "b": {0: 1.0, 1: 2.0}}) is None


def test_what_cannot_be_compared_has_no_variance():
    assert pool({"a": {0: 1.0, 1: 2.0}}, by_seed=False) is None  # one group
    assert pool({"a": {0: 1.0}, "b": {0: 2.0}}, by_seed=False) is None  # no spread is known
    assert pool({"a": {0: 1.0, 1: 2.0}, "b": {0: 1.0}}, by_seed=True) is None  # two seeds, of which one is common
    assert pool({"a": {0: 1.0, 1: 2.0, 2: 4.0}, "b": {3: 1.0, 4: 2.0, 5: 4.0}}, by_seed=True) is None  # none is common
    assert pool({}, by_seed=True) is None


def test_equal_scores_give_no_verdict():
    pooled = pool({"a": {0: 1.0, 1: 1.0}, "b": {0: 2.0, 1: 2.0}}, by_seed=False)
    assert pooled is not None
    [difference] = tukey(pooled, [("a", "b")])
    assert (difference.mean, difference.p, difference.is_clear) == (-1.0, 1.0, False)


def reach(pooled) -> float:
    """The standard errors beyond which Tukey's test calls a difference clear."""
    [difference] = tukey(pooled, [("a", "b")])
    return (difference.high - difference.mean) / pooled.difference("a", "b")[1]


@pytest.mark.parametrize("by_seed", [False, True])
def test_equal_groups_are_told_apart_in_one_of_twenty_experiments(by_seed):
    """Of all pairs together, and of the best against the rest, which the data choose."""
    rng, pairs = np.random.default_rng(8), [(a, b) for a in NAMES[:4] for b in NAMES[:4] if a < b]
    least, found, against_best = None, 0, 0
    for _ in range(1500):
        pooled = pool(drawn(rng, (4, 4, 4, 4), seed_sd=2.0 * by_seed), by_seed)
        assert pooled is not None
        least = least or reach(pooled)
        clear = [pair for pair in pairs if abs(np.divide(*pooled.difference(*pair))) > least]
        found += bool(clear)
        best = pooled.groups[int(pooled.effects.argmax())]
        against_best += any(best in pair for pair in clear)
    assert 0.035 < found / 1500 < 0.065
    assert against_best <= found


@pytest.mark.parametrize("by_seed", [False, True])
def test_the_named_number_of_seeds_tells_a_difference(by_seed):
    rng = np.random.default_rng(9)
    known = pool({name: {0: -1.0, 1: 1.0, 2: 0.0} for name in "abc"}, by_seed=False)
    assert known is not None
    known = known._replace(variance=1.0, by_seed=by_seed)
    seeds = seeds_to_tell(known, 1.5)
    assert seeds is not None
    least, found = None, 0
    for _ in range(1000):
        pooled = pool(drawn(rng, (seeds,) * 3, (0, 0, 1.5), seed_sd=3.0 * by_seed), by_seed)
        assert pooled is not None
        least = least or reach(pooled)
        found += np.divide(*pooled.difference("c", "a")) > least
    assert 0.75 < found / 1000 < 0.87
    # Two differences instead of three.
    assert 2 <= (seeds_to_tell(known, 0.5, "a") or 0) < (seeds_to_tell(known, 0.5) or 0)
    assert seeds_to_tell(known, 0.001) is None
    assert seeds_to_tell(known._replace(variance=1e-9), 1.0) == 2
