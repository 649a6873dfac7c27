"""Probabilities of classes from logits: the loss of a network's training decides how.

Shapes: B images, K classes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

import numpy as np

from vitray.config import Run
from vitray.config.classification import LOSS_TRAITS, Probability

if TYPE_CHECKING:
    from torch import Tensor


def probability_of(run: Run) -> Probability:
    """Return how the logits of a run's network become probabilities: as its loss says; after others by a softmax."""
    return LOSS_TRAITS[run.classification.loss].probability if run.classification else "softmax"


def probabilities_of(logits_BK: "Tensor", probability: Probability) -> "Tensor":
    """Return the probabilities (BK, float32) of the classes; NaN for an image whose logits are not all finite."""
    logits_BK = logits_BK.float()
    match probability:
        case "softmax":
            probabilities_BK = logits_BK.softmax(dim=-1)
        case "sigmoid":
            probabilities_BK = logits_BK.sigmoid()
        case _:
            assert_never(probability)
    # An infinite logit has a sigmoid like any other.
    return probabilities_BK.where(logits_BK.isfinite().all(dim=-1, keepdim=True), float("nan"))


def present_labels(probabilities_K: np.ndarray, thresholds: Sequence[float]) -> list[int]:
    """Return the classes that reach their thresholds, the most probable first."""
    order = np.argsort(-probabilities_K, kind="stable")
    return [int(label) for label in order if probabilities_K[label] >= thresholds[label]]
