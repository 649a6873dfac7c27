"""What settings and predictions know of each loss of labels; `LOSSES` of `vitray/tasks/supervised.py` computes it."""

from typing import Literal, NamedTuple

Probability = Literal["softmax", "sigmoid"]
"""Softmax over the classes, or a sigmoid for each class."""


class LossTraits(NamedTuple):
    """The nature of a loss."""

    about: str
    """Its definition, for the page of all settings."""
    probability: Probability
    """How logits that it has trained become probabilities."""


LOSS_TRAITS = {
    "softmax": LossTraits("cross-entropy with soft targets", "softmax"),
    "bce": LossTraits("binary cross-entropy, with each class of a mixed image a target", "sigmoid"),
}
