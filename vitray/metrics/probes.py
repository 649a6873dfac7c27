"""Probes of a network's features, logits and attention: what they learn from one split is scored on another.

A probe is a row of `PROBES` here, and of `PROBE_TRAITS` in `vitray/config/evaluation.py`.

Shapes: N images; of attention distance (LPHB), L levels, P branches, H heads, B images.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vitray.metrics.arrays import Labeled, ProbeInputs, ProbeValues, check_logits, check_probe, draw_part
from vitray.metrics.calibration import calibration_scores
from vitray.metrics.feature_rank import rank_scores
from vitray.metrics.few_shot import SHOTS, few_shot_scores
from vitray.metrics.knn import NEIGHBORS, knn_scores
from vitray.metrics.linear_probe import linear_scores

# Another one than that of the linear probe's development part, which a hash of the keys chooses too.
SHARE_SEED = 1


class Probe(NamedTuple):
    """The computation of a probe, and how its scores are shown."""

    compute: Callable[[ProbeInputs], ProbeValues]
    headlines: Sequence[str]
    """The scores that stand for the probe in a single line, of which a network has one."""
    titles: Mapping[str, str] = {}
    """Titles of the scores that the page of `vitray evaluate` shows; results.json has all."""
    in_percent: bool = False
    """Whether they are shown in percent."""


def _calibration(inputs: ProbeInputs) -> ProbeValues:
    logits_NK, labels_N = check_logits(inputs.logits, inputs.scored.labels)
    scores = calibration_scores(logits_NK, labels_N, probability=inputs.probability)._asdict()
    return ProbeValues({name: value for name, value in scores.items() if name != "images"})


def _attention_distance(inputs: ProbeInputs) -> ProbeValues:
    assert inputs.attention_distances is not None, "settings refuse a network without attention"
    return ProbeValues(mean_distances(inputs.attention_distances()))


def mean_distances(distance_LPHB: np.ndarray) -> dict[str, float]:
    """Return the mean attention distance in pixels, of all levels and of each, counted from 0."""
    levels = distance_LPHB.astype(np.float64).mean((1, 2, 3)).tolist()
    by_level = {f"attention_distance_level{number:02d}": value for number, value in enumerate(levels)}
    return {"attention_distance": float(np.mean(levels))} | by_level


# In the order of the page.
PROBES = {
    "knn": Probe(
        knn_scores,
        ("knn10", "knn10_map"),
        {f"knn{count}": f"kNN, {count} neighbors" for count in NEIGHBORS}
        | {f"knn{count}_map": f"kNN, {count} neighbors, mAP" for count in NEIGHBORS},
        in_percent=True,
    ),
    "few_shot": Probe(
        few_shot_scores,
        ("few_shot5",),
        {f"few_shot{shots}": f"few-shot, {shots} image{'s' * (shots > 1)} a class" for shots in SHOTS}
        | {"few_shot_least": "few-shot, images of the smallest class"},
        in_percent=True,
    ),
    "linear": Probe(
        linear_scores,
        ("linear", "linear_map"),
        {"linear": "linear probe", "linear_map": "linear probe, mAP"},
        in_percent=True,
    ),
    "rank": Probe(
        rank_scores,
        ("rankme",),
        {
            "rankme": "RankMe",
            "effective_rank": "effective rank",
            "separation_variance_share": "variance between classes",
            "separation_cosine": "cosine separation",
        },
    ),
    "calibration": Probe(_calibration, ("ece",)),
    "attention_distance": Probe(_attention_distance, ("attention_distance",)),
}


def probe_scores(names: Collection[str], inputs: ProbeInputs) -> ProbeValues:
    """Return the scores of the named probes."""
    inputs, found = check_probe(inputs), ProbeValues({})
    for name, probe in PROBES.items():
        if name in names:
            scores, hits, maps = probe.compute(inputs)
            found = ProbeValues(found.scores | scores, {**found.hits, **hits}, {**found.maps, **maps})
    return found


def probe_shares(shares: Sequence[float], inputs: ProbeInputs) -> dict[str, Any]:
    """Return the scores of linear probes that learn from a share of the training images, as `linear_share0.1`.

    A hash of the keys chooses the images, so a larger share has those of a smaller one, for every network. The inputs
    are those of `probe_scores`, which checks them.
    """
    values: dict[str, Any] = {}
    for share in shares:
        train, keys = inputs.learned, inputs.keys
        count = max(1, round(share * len(train.labels)))
        chosen_N = draw_part(keys, count, SHARE_SEED)
        part = Labeled(train.features[chosen_N], train.labels[chosen_N])
        part_keys = [key for key, is_in in zip(keys, chosen_N, strict=True) if is_in]
        fitted = linear_scores(inputs._replace(train=part, keys=part_keys)).scores
        values |= {name.replace("linear", f"linear_share{share:g}", 1): value for name, value in fitted.items()}
    return values
