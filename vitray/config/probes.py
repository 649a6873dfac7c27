"""What settings, plans and options know of each probe; `PROBES` of `vitray/metrics/probes.py` computes it."""

from typing import Literal, NamedTuple


class ProbeTraits(NamedTuple):
    """The nature of a probe."""

    learns: bool = False
    """Whether it learns from the labels of other images."""
    reads: Literal["features", "logits", "attention"] = "features"
    """What it reads of a network. Every network has features, those with a head logits, and a ViT attention."""
    in_training: bool = True
    """Whether evaluate.probes offers it."""


PROBE_TRAITS = {
    "knn": ProbeTraits(learns=True),
    "few_shot": ProbeTraits(learns=True),
    "linear": ProbeTraits(learns=True, in_training=False),
    "rank": ProbeTraits(),
    "calibration": ProbeTraits(reads="logits"),
    "attention_distance": ProbeTraits(reads="attention"),
}


def training_probes() -> list[str]:
    """Return the probes of evaluate.probes."""
    return [name for name, traits in PROBE_TRAITS.items() if traits.in_training]


def feature_probes() -> list[str]:
    """Return the probes of `vitray evaluate`, which scores the logits of each network anyway."""
    return [name for name, traits in PROBE_TRAITS.items() if traits.reads == "features"]
