"""Scores of several labels an image: average precision, F1, thresholds, and which labels come together.

A class is present, absent or unknown at an image; an unknown one is not counted. Of equal scores, all or none are taken
as present. Means over classes are of those that are present at some image.

Shapes: N images, K classes, D draws of a bootstrap.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vitray.metrics.arrays import DrawnMap, check_matrix, draw_part
from vitray.metrics.intervals import LEVEL, Comparison, Difference, Interval
from vitray.models.probabilities import Probability

# Draws of a bootstrap: fewer where images times classes are many, as each takes their number of steps.
DRAWS, LEAST_DRAWS, MOST_STEPS = 1000, 100, 4 * 10**9
# Numbers of a chunk of draws, and classes of a product.
CHUNK_VALUES, BLOCK = 2**22, 64
THRESHOLD = 0.5
MAX_MISTAKES = 16


class LabelScore(NamedTuple):
    """The scores of one class."""

    label: int
    images: int
    """At which the class is present."""
    known: int
    """At which it is present or absent."""
    average_precision: Interval | None
    """None for a class that is at no image."""
    hits: int
    """Images at which it is present and predicted, by the network's threshold."""
    predicted: int
    f1: float | None
    best_threshold: float | None
    """The least probability of a present class for the highest F1 on these images."""

    @property
    def recall(self) -> float | None:
        """The share of the images with the class at which it is predicted."""
        return self.hits / self.images if self.images else None

    @property
    def precision(self) -> float | None:
        """The share of the images with the prediction at which the class is present."""
        return self.hits / self.predicted if self.predicted else None


class LabelScores(NamedTuple):
    """The scores of a network on a set of images."""

    images: int
    intervals: dict[str, Interval]
    """map; f1_micro, f1_macro: by the network's thresholds; f1_micro_chosen, f1_macro_chosen: by thresholds that the
    other half of the images chose."""
    loss: float
    """Mean binary cross-entropy of the known labels, for any training loss; NaN if it was not given."""
    classes: list[LabelScore]
    together: np.ndarray
    """KxK images at which both classes are present; on the diagonal, those of one."""
    predicted_together: np.ndarray
    """The same of predictions."""
    wrong: list[tuple[float, int, int]]
    """Probability, image and class of the absent classes with the highest probability, one an image."""
    states: np.ndarray
    """NxK: 1, 0, or -1 for an unknown class."""
    predicted: np.ndarray
    """NxK: whether a class is predicted."""
    map: DrawnMap


def score_labels(
    probabilities_NK: np.ndarray,
    states_NK: np.ndarray,
    keys: Sequence[str],
    thresholds: np.ndarray | Sequence[float] | None = None,
    loss: float = float("nan"),
    draws: int | None = None,
) -> LabelScores:
    """Return the scores of N images from the probabilities of all classes and their states (1, 0, -1 unknown).

    `thresholds`: the least probability of each class that is predicted (K, or NK); None: 0.5
    """
    draws = draws or draws_of(states_NK)
    limits = np.asarray(THRESHOLD if thresholds is None else thresholds, np.float32)
    probabilities_NK = check_matrix("probabilities", probabilities_NK, "classes").astype(np.float64)
    is_known_NK, is_present_NK = states_NK >= 0, states_NK == 1
    chosen_NK = cross_chosen(probabilities_NK, states_NK, keys)
    predicted_NK = probabilities_NK.astype(np.float32) >= limits  # as `vitray predict` compares them
    tables = {"": _outcomes(predicted_NK, states_NK), "_chosen": _outcomes(chosen_NK, states_NK)}
    rankings = _rankings(probabilities_NK, states_NK)
    drawn: dict[str, list[np.ndarray]] = {}
    ap_DK: list[np.ndarray] = []
    for counts_DN in drawn_counts(len(states_NK), draws):
        ap_DK.append(np.stack([ranking.average_precision(counts_DN) for ranking in rankings], 1))
        for name, table in tables.items():
            for mean, f1_D in _f1(counts_DN, table).items():
                drawn.setdefault(f"{mean}{name}", []).append(f1_D)
    once = np.ones((1, len(states_NK)), np.float32)
    ap_K = np.concatenate([ranking.average_precision(once) for ranking in rankings])
    all_DK = np.concatenate(ap_DK)
    map_D = _mean_of_known(all_DK)
    drawn_map = DrawnMap(float(_mean_of_known(ap_K[None])[0]), map_D, len(states_NK))
    intervals = {"map": map_interval(drawn_map)}
    for name, table in tables.items():
        for mean, f1 in _f1(once, table).items():
            intervals[f"{mean}{name}"] = _interval(float(f1[0]), np.concatenate(drawn[f"{mean}{name}"]))
    hits_K, predicted_K, present_K = (table.sum(0) for table in tables[""])
    classes = [
        LabelScore(
            label=label,
            images=int(present_K[label]),
            known=int(is_known_NK[:, label].sum()),
            average_precision=None if np.isnan(ap_K[label]) else _interval(float(ap_K[label]), all_DK[:, label]),
            hits=int(hits_K[label]),
            predicted=int(predicted_K[label]),
            f1=2 * float(hits_K[label]) / float(present_K[label] + predicted_K[label]) if present_K[label] else None,
            best_threshold=best_threshold(probabilities_NK[:, label], states_NK[:, label]),
        )
        for label in range(states_NK.shape[1])
    ]
    shown_NK, present_NK = (flags.astype(np.float32) for flags in (predicted_NK & is_known_NK, is_present_NK))
    return LabelScores(
        images=len(states_NK),
        intervals=intervals,
        loss=loss,
        classes=classes,
        together=(present_NK.T @ present_NK).astype(np.int64),
        predicted_together=(shown_NK.T @ shown_NK).astype(np.int64),
        wrong=_most_confident(probabilities_NK, states_NK),
        predicted=predicted_NK,
        states=states_NK,
        map=drawn_map,
    )


def label_loss(logits_NK: np.ndarray, states_NK: np.ndarray, probability: Probability) -> float:
    """Return the mean binary cross-entropy of the known labels, from logits; NaN without any."""
    from scipy.special import log_expit, log_softmax  # loads slowly

    total, known = 0.0, 0
    rows = max(1, CHUNK_VALUES // logits_NK.shape[1])
    for start in range(0, len(logits_NK), rows):
        part_BK, states_BK = logits_NK[start : start + rows].astype(np.float64), states_NK[start : start + rows]
        if probability == "sigmoid":
            log_p_BK, log_not_p_BK = log_expit(part_BK), log_expit(-part_BK)
        else:
            log_p_BK = log_softmax(part_BK, axis=1)
            log_not_p_BK = np.log1p(-np.minimum(np.exp(log_p_BK), 1 - 2.0**-53))
        losses_BK = -np.where(states_BK == 1, log_p_BK, log_not_p_BK)
        total, known = total + float(losses_BK[states_BK >= 0].sum()), known + int((states_BK >= 0).sum())
    return total / known if known else float("nan")


def mean_average_precision(scores_NK: np.ndarray, states_NK: np.ndarray) -> float:
    """Return the mean over classes of the average precision, without those at no image; NaN without any."""
    return float(_map_of(_rankings(scores_NK, states_NK), np.ones((1, len(states_NK))))[0])


def draw_maps(scores_NK: np.ndarray, states_NK: np.ndarray) -> DrawnMap:
    """Return the mean average precision of all images, and that of each draw of a bootstrap over them."""
    rankings = _rankings(scores_NK, states_NK)
    estimate = _map_of(rankings, np.ones((1, len(states_NK))))[0]
    drawn = [_map_of(rankings, counts_DN) for counts_DN in drawn_counts(len(states_NK), draws_of(states_NK))]
    return DrawnMap(float(estimate), np.concatenate(drawn), len(states_NK))


def draws_of(states_NK: np.ndarray) -> int:
    """Return the number of draws of a bootstrap over the images."""
    return max(LEAST_DRAWS, min(DRAWS, MOST_STEPS // states_NK.size))


def map_interval(drawn_map: DrawnMap) -> Interval:
    """Return a mean average precision with its interval."""
    return _interval(drawn_map.estimate, drawn_map.drawn)


def map_values(name: str, drawn_map: DrawnMap) -> dict[str, float]:
    """Return a mean average precision under a name, and the bounds of its interval under `_low` and `_high`."""
    interval = map_interval(drawn_map)
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}


def compare_maps(one: DrawnMap, other: DrawnMap) -> Comparison:
    """Return the difference of the mAP of two networks on the same images.

    p, two-sided, is that of a normal difference with the draws' standard deviation: a share of some hundred draws could
    not be as small as many comparisons need.
    """
    from scipy.special import ndtr  # loads slowly

    apart_D = one.drawn - other.drawn
    apart_D = apart_D[~np.isnan(apart_D)]
    difference = one.estimate - other.estimate
    interval = _interval(difference, apart_D)
    error = float(apart_D.std()) if len(apart_D) else 0.0
    p_value = 2 * float(ndtr(-abs(difference) / error)) if error > 0 else 1.0
    return Comparison(Difference(*interval, one.images), p_value, None, 1, p_value)


def _most_confident(probabilities_NK: np.ndarray, states_NK: np.ndarray) -> list[tuple[float, int, int]]:
    absent_NK = np.where(states_NK == 0, probabilities_NK, -1.0)
    worst_N = absent_NK.argmax(1)
    highest_N = absent_NK[np.arange(len(absent_NK)), worst_N]
    rows = np.argsort(-highest_N, kind="stable")[:MAX_MISTAKES].tolist()
    return [(float(highest_N[row]), row, int(worst_N[row])) for row in rows if highest_N[row] >= 0]


# ---- average precision -----------------------------------------------------------------------------------------------


class Ranking(NamedTuple):
    """The images of which one class is known, by falling scores, down to the last one that has it.

    A segment ends with the last of the images whose score is that of an image with the class.
    """

    rows: np.ndarray
    starts: np.ndarray
    """The first place of each segment."""
    present: np.ndarray
    """The places of the images with the class."""
    firsts: np.ndarray
    """The first of `present` in each segment."""

    @classmethod
    def of(cls, scores_N: np.ndarray, states_N: np.ndarray) -> "Ranking":
        """Return the ranking of some images; those of which the class is unknown are not in it."""
        rows = np.flatnonzero(states_N >= 0)
        rows = rows[np.argsort(-scores_N[rows], kind="stable")]
        present = np.flatnonzero(states_N[rows] == 1)
        if not len(present):
            return cls(rows[:0], present, present, present)
        ends = np.flatnonzero(np.append(np.diff(scores_N[rows]) != 0, True))
        ends = np.unique(ends[np.searchsorted(ends, present)])
        starts = np.append(0, ends[:-1] + 1)
        return cls(rows[: ends[-1] + 1], starts, present, np.searchsorted(present, starts))

    def average_precision(self, counts_DN: np.ndarray) -> np.ndarray:
        """Return the average precision of each draw, which has each image as often as `counts_DN` says.

        It is the sum over the segments of the growth of recall times the precision; NaN where the class is at no image.
        """
        if not len(self.present):
            return np.full(len(counts_DN), np.nan)
        counts_DM = counts_DN[:, self.rows]
        grown_DE = np.add.reduceat(counts_DM[:, self.present], self.firsts, axis=1).astype(np.float64)
        taken_DE = np.add.reduceat(counts_DM, self.starts, axis=1).astype(np.float64).cumsum(1)
        found_DE = grown_DE.cumsum(1)
        areas_D, present_D = (grown_DE * found_DE / np.maximum(taken_DE, 1)).sum(1), found_DE[:, -1]
        return np.where(present_D > 0, areas_D / np.maximum(present_D, 1), np.nan)


def _rankings(scores_NK: np.ndarray, states_NK: np.ndarray) -> list[Ranking]:
    return [Ranking.of(*columns) for columns in zip(scores_NK.T, states_NK.T, strict=True)]


def _map_of(rankings: Sequence[Ranking], counts_DN: np.ndarray) -> np.ndarray:
    """Return the mean average precision of each draw."""
    return _mean_of_known(np.stack([ranking.average_precision(counts_DN) for ranking in rankings], 1))


def drawn_counts(images: int, draws: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yield how often each draw of a bootstrap has each image (DN), for some draws at a time."""
    rng, size = np.random.default_rng(seed), max(1, CHUNK_VALUES // images)
    for start in range(0, draws, size):
        number = min(start + size, draws) - start
        drawn_DN = rng.integers(0, images, (number, images)) + images * np.arange(number)[:, None]
        # Exact up to 2^24 images.
        yield np.bincount(drawn_DN.ravel(), minlength=number * images).reshape(number, images).astype(np.float32)


def _mean_of_known(values_DK: np.ndarray) -> np.ndarray:
    """The mean of each row over the numbers that are not NaN; NaN without any."""
    known_D = (~np.isnan(values_DK)).sum(1)
    return np.where(known_D > 0, np.nansum(values_DK, 1) / np.maximum(known_D, 1), np.nan)


def _interval(estimate: float, drawn_D: np.ndarray) -> Interval:
    """Return the percentile interval of the draws, less their bias.

    An image that a draw has twice is ranked beside itself, so that precision is higher than on as many images that
    differ.
    """
    known_D = drawn_D[~np.isnan(drawn_D)]
    if not len(known_D):
        return Interval(estimate, np.nan, np.nan, LEVEL)
    bias = float(known_D.mean()) - estimate
    low, high = (np.quantile(known_D, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) - bias).tolist()
    return Interval(estimate, low, high, LEVEL)


# ---- F1 and thresholds -----------------------------------------------------------------------------------------------


def _outcomes(predicted_NK: np.ndarray, states_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where a class is predicted and present, predicted, and present, each only where it is known."""
    is_present_NK, is_shown_NK = states_NK == 1, predicted_NK & (states_NK >= 0)
    return is_shown_NK & is_present_NK, is_shown_NK, is_present_NK


def _sums(counts_DN: np.ndarray, flags_NK: np.ndarray) -> np.ndarray:
    """Return how often the images of each draw have each flag (DK)."""
    blocks = range(0, flags_NK.shape[1], BLOCK)
    parts = [counts_DN @ flags_NK[:, start : start + BLOCK].astype(np.float32) for start in blocks]
    return np.concatenate(parts, 1).astype(np.float64)


def _f1(counts_DN: np.ndarray, outcomes: tuple[np.ndarray, np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    """Return F1 = 2 hits / (predicted + present) of each draw: of all labels together, and the mean over classes."""
    hits_DK, predicted_DK, present_DK = (_sums(counts_DN, flags) for flags in outcomes)
    micro_D = 2 * hits_DK.sum(1) / np.maximum(predicted_DK.sum(1) + present_DK.sum(1), 1)
    each_DK = np.where(present_DK > 0, 2 * hits_DK / np.maximum(predicted_DK + present_DK, 1), np.nan)
    return {"f1_micro": micro_D, "f1_macro": _mean_of_known(each_DK)}


def best_threshold(probabilities_N: np.ndarray, states_N: np.ndarray) -> float | None:
    """Return the least probability of a present class for the highest F1; None for a class at no image.

    It lies halfway to the next lower probability. Of equal F1, the highest threshold is taken.
    """
    known_N = states_N >= 0
    order = np.argsort(-probabilities_N[known_N], kind="stable")
    values, is_present = probabilities_N[known_N][order], states_N[known_N][order] == 1
    if not is_present.any():
        return None
    ends = np.flatnonzero(np.append(np.diff(values) != 0, True))
    f1 = 2 * np.cumsum(is_present)[ends] / (ends + 1 + is_present.sum())
    at = ends[int(f1.argmax())]
    return float((values[at] + values[at + 1]) / 2) if at + 1 < len(values) else float(values[at])


def cross_chosen(probabilities_NK: np.ndarray, states_NK: np.ndarray, keys: Sequence[str]) -> np.ndarray:
    """Return predictions (NK) at thresholds that the other half of the images chose; the keys decide the halves."""
    half_N = draw_part(keys, len(keys) // 2, 0)
    predicted_NK = np.zeros(states_NK.shape, bool)
    for own_N in (half_N, ~half_N):
        for label in range(states_NK.shape[1]):
            chosen = best_threshold(probabilities_NK[~own_N, label], states_NK[~own_N, label])
            threshold = THRESHOLD if chosen is None else chosen
            predicted_NK[own_N, label] = probabilities_NK[own_N, label] >= threshold
    return predicted_NK
