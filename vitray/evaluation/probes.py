"""Probes of a network's features, logits and attention: what they learn from one split is scored on another.

Shapes: N images, K classes, F features; of attention distance (LPHB), L levels, P branches, H heads, B images.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitray.evaluation.arrays import Labeled, ProbeScore, draw_part
from vitray.evaluation.calibration import calibration_scores
from vitray.evaluation.feature_rank import class_separation, effective_rank, rankme
from vitray.evaluation.few_shot import mean_of_seeds, probe_few_shot, shots_within, smallest_class
from vitray.evaluation.intervals import wilson
from vitray.evaluation.knn import NEIGHBORS, probe_knn
from vitray.evaluation.linear_probe import is_too_large, probe_linear, probe_linear_sgd
from vitray.models.probabilities import Probability

# Another one than that of the linear probe's development part, which a hash of the keys chooses too.
SHARE_SEED = 1


def probe_features(
    names: Sequence[str], train: Labeled | None, test: Labeled, num_classes: int, keys: Sequence[str]
) -> dict[str, Any]:
    """Return the scores of the probes by name; `keys` are those of the training images."""
    values: dict[str, Any] = {}
    if train is not None and "knn" in names:
        neighbors = [count for count in NEIGHBORS if count <= len(train.labels)] or [len(train.labels)]
        for count, each in probe_knn(train, test, num_classes, neighbors).items():
            values |= _with_interval(f"knn{count}", each)
    if train is not None and "few_shot" in names:
        # A smaller class would give fewer images than the name of the score says.
        values["few_shot_least"] = smallest_class(train.labels)
        fitted = probe_few_shot(train, test, num_classes, shots_within(values["few_shot_least"]))
        for shots, mean in mean_of_seeds(fitted).items():
            values |= {f"few_shot{shots}": mean.top1, f"few_shot{shots}_std": mean.std}
    if train is not None and "linear" in names:
        values |= _linear(train, test, num_classes, keys)
    if "rank" in names:
        separation = class_separation(*test, num_classes)
        values |= {"rankme": rankme(test.features), "effective_rank": effective_rank(test.features)}
        values |= {"separation_variance_share": separation.variance_share, "separation_cosine": separation.cosine}
    return values


def probe_shares(
    shares: Sequence[float], train: Labeled, test: Labeled, num_classes: int, keys: Sequence[str]
) -> dict[str, Any]:
    """Return the scores of linear probes that learn from a share of the training images, as `linear_share0.1`.

    A hash of the keys chooses the images, so a larger share has those of a smaller one, for every network.
    """
    values: dict[str, Any] = {}
    for share in shares:
        count = max(1, round(share * len(train.labels)))
        chosen_N = draw_part(len(train.labels), count, SHARE_SEED, keys)
        part = Labeled(train.features[chosen_N], train.labels[chosen_N])
        fitted = _linear(part, test, num_classes, [key for key, is_in in zip(keys, chosen_N, strict=True) if is_in])
        values |= {name.replace("linear", f"linear_share{share:g}", 1): value for name, value in fitted.items()}
    return values


def probe_calibration(logits_NK: Any, labels_N: Any, probability: Probability) -> dict[str, float]:
    """Return the scores of calibration by name."""
    scores = calibration_scores(logits_NK, labels_N, probability=probability)._asdict()
    return {name: value for name, value in scores.items() if name != "images"}


def mean_distances(distance_LPHB: np.ndarray) -> dict[str, float]:
    """Return the mean attention distance in pixels, of all levels and of each, counted from 0."""
    levels = distance_LPHB.astype(np.float64).mean((1, 2, 3)).tolist()
    by_level = {f"attention_distance_level{number:02d}": value for number, value in enumerate(levels)}
    return {"attention_distance": float(np.mean(levels))} | by_level


def _linear(train: Labeled, test: Labeled, num_classes: int, keys: Sequence[str]) -> dict[str, Any]:
    """Return the score of a linear probe, and how it was fitted: by SGD where L-BFGS needs too much memory."""
    if is_too_large(len(train.labels), train.features.shape[1], num_classes):
        by_sgd = probe_linear_sgd(train, test, num_classes, keys)
        how = {"linear_fit": "sgd", "linear_lr": by_sgd.lr, "linear_epochs": by_sgd.epochs}
        return _with_interval("linear", by_sgd.score) | how
    fitted = probe_linear(train, test, num_classes, keys=keys)
    how = {"linear_fit": "l-bfgs", "linear_l2": fitted.l2, "linear_converged": fitted.converged}
    return _with_interval("linear", fitted.score) | how


def _with_interval(name: str, score: ProbeScore) -> dict[str, float]:
    interval = wilson(score.hits, score.images)
    return {name: score.top1, f"{name}_low": interval.low, f"{name}_high": interval.high}
