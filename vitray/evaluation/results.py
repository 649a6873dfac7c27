"""The scores of a network and of pairs of networks, each with its uncertainty.

Proportions have Wilson's interval, all other scores that of a bootstrap over images. N images, K classes.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np

from vitray.errors import ConfigError
from vitray.inference.images import ImageSet
from vitray.inference.network_spec import NetworkSpec
from vitray.inference.outputs import Outputs
from vitray.metrics.calibration import (
    Bin,
    Temperature,
    adaptive_ece,
    brier,
    ece_of,
    ece_rows,
    fit_temperature,
    reliability,
)
from vitray.metrics.classification import Classification, classify, log_probability_chunks, mean_per_class_of
from vitray.metrics.intervals import Comparison, Interval, agreement, bootstrap, compare_hits, reflected, wilson
from vitray.metrics.label_sets import LabelSetScore
from vitray.models.probabilities import Probability

MAX_MISTAKES = 16


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
    scored: Scored | None
    """None for a network without a head."""
    more: Mapping[str, Any]
    """Scores of features, of corrupted images and by a label set, by name."""
    by_labels: LabelSetScore | None = None
    """The scores by a label set."""

    @property
    def hits(self) -> np.ndarray | None:
        """A flag for each counted image: by the labels of the images, or by the label set if they fit no class."""
        if self.scored is not None:
            return self.scored.hits
        return None if self.by_labels is None else self.by_labels.ranks == 0

    def flat(self) -> dict[str, Any]:
        """Return all scores by name, with `_low` and `_high` for the bounds of an interval."""
        values: dict[str, Any] = {"model": self.name, "url": self.spec.url, "identity": self.spec.identity}
        values |= {"network": self.spec.network, "images": len(self.outputs.labels)}
        values["left_out"] = len(self.outputs.left_out)
        if self.scored is not None:
            for name, interval in self.scored.intervals.items():
                values |= {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
            values |= {"loss": values["nll"], **self.scored.values}
        return values | dict(self.more)


class PairResult(NamedTuple):
    """Two networks on the same images, the first less the second."""

    first: str
    second: str
    comparison: Comparison
    score: Literal["top1", "labels_top1"] = "top1"
    """The score that differs."""

    def sentence(self) -> str:
        """Return the verdict in words."""
        return f"{self.first} against {self.second}: {self.comparison.sentence()}"

    def flat(self) -> dict[str, Any]:
        """Return the numbers and the verdict by name."""
        difference, test = self.comparison.difference, self.comparison.mcnemar
        return {
            "first": self.first,
            "second": self.second,
            "score": self.score,
            "difference": difference.difference,
            "difference_low": difference.low,
            "difference_high": difference.high,
            "only_first": test.only_a,
            "only_second": test.only_b,
            "p_value": test.p_value,
            "significant": bool(self.comparison.significant),
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
        return head | {"comparisons": [pair.flat() for pair in self.pairs], "agreement": shares}


def score(
    logits_NK: np.ndarray, labels_N: np.ndarray, keys: Sequence[str], probability: Probability = "softmax"
) -> Scored:
    """Return the scores of N images from their logits; a temperature belongs to a softmax alone."""
    finite_N = np.isfinite(logits_NK).all(1)
    if not finite_N.all():
        row = int(np.flatnonzero(~finite_N)[0])
        raise ConfigError(f"{keys[row]}: the network's logits are not finite; expected weights of a finished training")
    whole = classify(logits_NK, labels_N, MAX_MISTAKES, probability)
    hits_N = (whole.ranks == 0).astype(np.float64)
    losses_N = np.concatenate(
        [-log_BK[np.arange(len(log_BK)), labels_N[rows]] for rows, log_BK in log_probability_chunks(logits_NK)]
    )
    intervals = {
        "top1": wilson(whole.hits1, whole.images),
        "top5": wilson(whole.hits5, whole.images),
        "mean_per_class": bootstrap(np.stack([labels_N, hits_N], 1), mean_per_class_of(logits_NK.shape[1])),
        "nll": bootstrap(losses_N),
        "ece": reflected(bootstrap(ece_rows(logits_NK, labels_N, probability=probability), ece_of)),
    }
    values = {
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


def compare(results: Sequence[Result]) -> tuple[list[PairResult], np.ndarray | None]:
    """Return each pair of networks whose predictions are scored, and the agreement of those with labels."""
    pairs = [
        PairResult(one.name, other.name, compare_hits(one.hits, other.hits), "top1" if one.scored else "labels_top1")
        for one, other in combinations([result for result in results if result.hits is not None], 2)
    ]
    return pairs, _agreement([(result.classes, result.scored) for result in results if result.scored is not None])


def _agreement(heads: Sequence[tuple[tuple[str, ...], Scored]]) -> np.ndarray | None:
    """Return the shares of equal predictions: by class name, or by number if the networks' names are not the same."""
    predictions = [scored.classification.predictions for _, scored in heads]
    if len({frozenset(classes) for classes, _ in heads}) == 1:
        # Places among the sorted names: networks may number the same classes differently.
        places = [np.argsort(np.argsort(np.array(classes))) for classes, _ in heads]
        predictions = [order[each] for order, each in zip(places, predictions, strict=True)]
    return agreement(predictions) if len(predictions) > 1 else None
