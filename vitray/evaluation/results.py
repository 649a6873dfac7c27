"""The scores of a network and of pairs of networks, each with its uncertainty.

Proportions have Wilson's interval, all other scores that of a bootstrap over images. N images, K classes.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from vitray.errors import ConfigError
from vitray.inference.images import ImageSet
from vitray.inference.network_spec import NetworkSpec
from vitray.inference.outputs import Outputs
from vitray.metrics.arrays import DrawnMap, ProbeValues
from vitray.metrics.calibration import (
    Bin,
    Temperature,
    adaptive_ece,
    brier,
    calibration_error,
    fit_temperature,
    reliability,
)
from vitray.metrics.classification import Classification, classify, log_probability_chunks, mean_per_class_of
from vitray.metrics.intervals import (
    LEAST_DIFFERENCE,
    POWER,
    Comparison,
    Interval,
    agreement,
    bootstrap,
    compare_hits,
    corrected,
    wilson,
)
from vitray.metrics.label_sets import LabelSetScore
from vitray.metrics.multilabel import LabelScores, compare_maps
from vitray.metrics.probes import PROBES
from vitray.models.probabilities import Probability

MAX_MISTAKES = 16
# Titles of the scores by which networks are compared, beside those of probes.
COMPARED = {"top1": "top-1", "map": "mAP", "labels_top1": "top-1 by the label set"}


class Scored(NamedTuple):
    """The scores of a network with a head."""

    intervals: Mapping[str, Interval]
    """By name: top1, top5, mean_per_class, nll, ece."""
    values: Mapping[str, float]
    """Scores without an interval."""
    classification: Classification
    labels: np.ndarray
    """N labels, as the network's classes."""
    bins: Sequence[Bin]
    temperature: Temperature | None
    """None for a single image, and for sigmoids."""

    @property
    def hits(self) -> np.ndarray:
        """N flags: whether the prediction is the label."""
        return self.classification.ranks == 0


class Result(NamedTuple):
    """One network on the images."""

    name: str
    """Unique among the networks of an evaluation."""
    spec: NetworkSpec
    outputs: Outputs
    classes: tuple[str, ...]
    """The network's class names; of the images, where the network has none."""
    scores: Scored | LabelScores | None
    """None for a network without a head."""
    more: Mapping[str, Any]
    """Scores of features, of corrupted images and by a label set, by name."""
    by_labels: LabelSetScore | None = None
    """The scores by a label set."""
    probed: ProbeValues = ProbeValues({})
    """By score of a probe, what networks are compared by."""

    @property
    def scored(self) -> Scored | None:
        """The scores of one label an image."""
        return self.scores if isinstance(self.scores, Scored) else None

    @property
    def several(self) -> LabelScores | None:
        """The scores of several labels an image."""
        return self.scores if isinstance(self.scores, LabelScores) else None

    @property
    def main(self) -> tuple[str, Interval] | None:
        """The score by which networks are compared, by its name; None without predictions of the labels."""
        if self.scored is not None:
            return "top1", self.scored.intervals["top1"]
        if self.several is not None:
            return "map", self.several.intervals["map"]
        by_labels = self.by_labels
        return None if by_labels is None else ("labels_top1", wilson(by_labels.hits1, by_labels.images))

    @property
    def hits(self) -> Mapping[str, np.ndarray]:
        """By score, a flag for each counted image; top-1 is by the label set if the images have other classes."""
        if self.scored is not None:
            return {"top1": self.scored.hits, **self.probed.hits}
        by_labels = {} if self.by_labels is None else {"labels_top1": self.by_labels.ranks == 0}
        return {**by_labels, **self.probed.hits}

    @property
    def maps(self) -> Mapping[str, DrawnMap]:
        """By score, the mean average precision of several labels an image."""
        return {**({} if self.several is None else {"map": self.several.map}), **self.probed.maps}

    def flat(self) -> dict[str, Any]:
        """Return all scores by name, with `_low` and `_high` for the bounds of an interval."""
        values: dict[str, Any] = {"model": self.name, "url": self.spec.url, "identity": self.spec.identity}
        values |= {"network": self.spec.network, "images": len(self.outputs.labels)}
        values["left_out"] = len(self.outputs.left_out)
        for name, interval in self.scores.intervals.items() if self.scores else ():
            values |= {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
        if self.scored is not None:
            values |= {"loss": values["nll"], **self.scored.values}
        if self.several is not None:
            values["loss"] = self.several.loss
        return values | dict(self.more)


class PairResult(NamedTuple):
    """Two networks on the same images, the first less the second."""

    first: str
    second: str
    comparison: Comparison
    score: str = "top1"
    """The score that differs."""

    @property
    def title(self) -> str:
        """The title of the score."""
        return (COMPARED | probe_titles()).get(self.score, self.score)

    def sentence(self) -> str:
        """Return the difference in words."""
        return f"{self.first} against {self.second}, {self.title}: {self.comparison.sentence()}"

    def flat(self) -> dict[str, Any]:
        """Return the numbers and the verdict by name."""
        difference, test = self.comparison.difference, self.comparison.mcnemar
        counts = {} if test is None else {"only_first": test.only_a, "only_second": test.only_b}
        return {
            "first": self.first,
            "second": self.second,
            "score": self.score,
            "difference": difference.difference,
            "difference_low": difference.low,
            "difference_high": difference.high,
            **counts,
            "p_value": self.comparison.p_value,
            "p_corrected": self.comparison.corrected_p,
            "significant": bool(self.comparison.significant),
            "images_to_tell": self.comparison.images_to_tell,
            "verdict": self.comparison.sentence(),
        }


class Evaluation(NamedTuple):
    """Networks on one set of images."""

    images: ImageSet
    results: Sequence[Result]
    pairs: Sequence[PairResult]
    agreement: np.ndarray | None
    """Shares of images on which two networks predict the same class; None for less than two with a head."""
    command: str

    def flat(self) -> dict[str, Any]:
        """Return everything for JSON; the scores of a single network are at the top."""
        images = self.images
        head: dict[str, Any] = {"data": images.url, "split": images.split, "data_identity": images.identity}
        if len(self.results) == 1:
            return head | self.results[0].flat()
        head |= {"images": len(self.results[0].outputs.labels), "models": [each.flat() for each in self.results]}
        shares = None if self.agreement is None else self.agreement.tolist()
        pairs = {"comparisons": [pair.flat() for pair in self.pairs], "verdict": self.verdict()}
        return head | pairs | {"agreement": shares}

    def verdict(self) -> str | None:
        """Return in a sentence whether the second of two networks is better than the first; None for more or less."""
        if len(self.results) != 2 or not self.pairs:
            return None
        before, after = (result.name for result in self.results)
        gains = {pair.title: -pair.comparison.difference.difference for pair in self.pairs}
        clear = [pair.title for pair in self.pairs if pair.comparison.significant]
        texts = {title: f"{title} {100 * gain:+.2f} points" for title, gain in gains.items()}
        better, worse = ([title for title in clear if (gains[title] > 0) == is_better] for is_better in (True, False))
        found = ", ".join(texts[title] for title in [*better, *worse])
        question = f"Is {after} better than {before}?"
        if clear:
            answer = "In part" if better and worse else "Yes" if better else "No, it is worse"
            return f"{question} {answer}: {found}."
        within = all(
            max(abs(difference.low), abs(difference.high)) < LEAST_DIFFERENCE
            for difference in (pair.comparison.difference for pair in self.pairs)
        )
        if within:
            return f"{question} No: no score differs by a point or more."
        largest = max(self.pairs, key=lambda pair: abs(pair.comparison.difference.difference))
        images, needed = largest.comparison.difference.images, largest.comparison.images_to_tell
        return (
            f"{question} These {images:,} images cannot tell: {texts[largest.title]} is within chance; about"
            f" {needed:,} images would tell such a difference, or one of a point, with a chance of {POWER:.0%}."
        )


def probe_titles() -> dict[str, str]:
    """Return {score: title} of the scores of probes that are shown."""
    return {name: title for probe in PROBES.values() for name, title in probe.titles.items()}


def score(
    logits_NK: np.ndarray, labels_N: np.ndarray, keys: Sequence[str], probability: Probability = "softmax"
) -> Scored:
    """Return the scores of N images from their logits; a temperature belongs to a softmax alone."""
    check_finite(logits_NK, keys)
    whole = classify(logits_NK, labels_N, MAX_MISTAKES, probability)
    hits_N = (whole.ranks == 0).astype(np.float64)
    losses_N = np.concatenate(
        [-log_BK[np.arange(len(log_BK)), labels_N[rows]] for rows, log_BK in log_probability_chunks(logits_NK)]
    )
    error = calibration_error(logits_NK, labels_N, probability)
    intervals = {
        "top1": wilson(whole.hits1, whole.images),
        "top5": wilson(whole.hits5, whole.images),
        "mean_per_class": bootstrap(np.stack([labels_N, hits_N], 1), mean_per_class_of(logits_NK.shape[1])),
        "nll": bootstrap(losses_N),
        "ece": error.interval,
    }
    values = {
        "ece_calibrated": error.calibrated,
        "calibration_p": error.p,
        "adaptive_ece": adaptive_ece(logits_NK, labels_N, probability=probability),
        "brier": brier(logits_NK, labels_N, probability=probability),
    }
    is_fitted = len(labels_N) > 1 and probability == "softmax"
    temperature = fit_temperature(logits_NK, labels_N, keys) if is_fitted else None
    if temperature is not None:
        values |= {"temperature": temperature.temperature, "temperature_images": float(temperature.after.images)}
        values |= {"ece_before_temperature": temperature.before.ece, "ece_after_temperature": temperature.after.ece}
        values |= {"nll_before_temperature": temperature.before.nll, "nll_after_temperature": temperature.after.nll}
    bins = reliability(logits_NK, labels_N, probability=probability)
    return Scored(intervals, values, whole, labels_N, bins, temperature)


def check_finite(logits_NK: np.ndarray, keys: Sequence[str]) -> None:
    """Refuse logits that are not finite, by the key of their first image."""
    finite_N = np.isfinite(logits_NK).all(1)
    if not finite_N.all():
        row = int(np.flatnonzero(~finite_N)[0])
        raise ConfigError(f"{keys[row]}: the network's logits are not finite; expected weights of a finished training")


def compare(results: Sequence[Result]) -> tuple[list[PairResult], np.ndarray | None]:
    """Return each pair of networks by each score that both have, and the agreement of those with labels."""
    pairs = [
        PairResult(one.name, other.name, compare_hits(hits, other.hits[score]), score)
        for one, other in combinations(results, 2)
        for score, hits in one.hits.items()
        if score in other.hits
    ]
    pairs += [
        PairResult(one.name, other.name, compare_maps(drawn_map, other.maps[score]), score)
        for one, other in combinations(results, 2)
        for score, drawn_map in one.maps.items()
        if score in other.maps and not np.isnan(drawn_map.estimate)  # as no image has any label
    ]
    all_corrected = corrected([pair.comparison for pair in pairs])
    pairs = [pair._replace(comparison=each) for pair, each in zip(pairs, all_corrected, strict=True)]
    return pairs, _agreement([(result.classes, result.scored) for result in results if result.scored is not None])


def _agreement(heads: Sequence[tuple[tuple[str, ...], Scored]]) -> np.ndarray | None:
    """Return the shares of equal predictions: by class name, or by number if the networks' names are not the same."""
    predictions = [scored.classification.predictions for _, scored in heads]
    if len({frozenset(classes) for classes, _ in heads}) == 1:
        # Places among the sorted names: networks may number the same classes differently.
        places = [np.argsort(np.argsort(np.array(classes))) for classes, _ in heads]
        predictions = [order[each] for order, each in zip(places, predictions, strict=True)]
    return agreement(predictions) if len(predictions) > 1 else None
