"""The `evaluate` section, and what settings, plans and help know of each probe and figure; nothing heavy."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from vitray.config.model import Model
from vitray.config.sections import NameOf, Section, Size, duration_in

# ---- probes ----------------------------------------------------------------------------------------------------------


class ProbeTraits(NamedTuple):
    """The nature of a probe, which `PROBES` of `vitray/metrics/probes.py` computes."""

    learns: bool = False
    """Whether it learns from the labels of other images."""
    reads: Literal["features", "logits", "attention"] = "features"
    """What it reads of a network. Every network has features, those with a head logits, and a ViT attention."""
    in_training: bool = True
    """Whether evaluate.probes offers it."""
    needs_one_label: str = ""
    """Why it does not apply to several labels an image, as the end of a sentence; empty if it does."""


PROBE_TRAITS = {
    "knn": ProbeTraits(learns=True),
    "few_shot": ProbeTraits(learns=True, needs_one_label="an image is then an example of several classes at once"),
    "linear": ProbeTraits(learns=True, in_training=False),
    "rank": ProbeTraits(),
    "calibration": ProbeTraits(reads="logits", needs_one_label="it is that of the most probable class"),
    "attention_distance": ProbeTraits(reads="attention"),
}


def training_probes() -> list[str]:
    """Return the probes of evaluate.probes."""
    return [name for name, traits in PROBE_TRAITS.items() if traits.in_training]


def feature_probes() -> list[str]:
    """Return the probes of `vitray evaluate`, which scores the logits of each network anyway."""
    return [name for name, traits in PROBE_TRAITS.items() if traits.reads == "features"]


# ---- figures ---------------------------------------------------------------------------------------------------------


class FigureNeeds(NamedTuple):
    """What a figure of `vitray inspect` needs of the images and of the networks."""

    images: bool = True
    fewest_images: int = 1
    two: bool = False
    """Whether it compares two networks. Training, which has one, cannot draw it."""
    vit_only: str = ""
    """Why only Vision Transformers have it, as the end of a sentence; empty if other networks have it too."""
    obstacle: Callable[[Model], str | None] = lambda _: None
    """What a Vision Transformer of these settings has that leaves nothing to show, or None."""


# Images from which unbiased CKA can be estimated.
FEWEST_COMPARED = 4
# In the order of the page.
NEEDS = {
    "rollout": FigureNeeds(),
    "components": FigureNeeds(vit_only="the figure reads the patches of these only."),
    "distance": FigureNeeds(vit_only="the figure reads the attention of these only."),
    "branches": FigureNeeds(
        fewest_images=FEWEST_COMPARED,
        vit_only="it has no parallel branches.",
        obstacle=lambda model: "one branch a level, and none to compare" if model.shape.branches == 1 else None,
    ),
    "filters": FigureNeeds(images=False),
    "positions": FigureNeeds(
        images=False, obstacle=lambda model: "no position embedding" if model.positions.kind == "none" else None
    ),
    "similarity": FigureNeeds(fewest_images=FEWEST_COMPARED),
    "norms": FigureNeeds(vit_only="the figure reads the tokens of these only."),
    "layerscale": FigureNeeds(
        images=False,
        vit_only="the figure reads the LayerScale of these only.",
        obstacle=lambda model: "no LayerScale" if model.layerscale is None else None,
    ),
    "spectra": FigureNeeds(images=False),
    "changes": FigureNeeds(images=False, two=True),
    "features": FigureNeeds(two=True),
}
if TYPE_CHECKING:  # type checkers read only literals that are spelled out
    TrainingFigure = str
else:
    TrainingFigure = Literal[tuple(name for name, needs in NEEDS.items() if not needs.two)]


# ---- the section -----------------------------------------------------------------------------------------------------

# Decoded views of both splits stay in the memory of one process: 16,384 of 224 px take 2.5 GB.
MOST_PROBED = 16_384


class Evaluate(Section):
    """Evaluation of the val split."""

    every: Annotated[str, duration_in("epochs", "steps")] = "1 epoch"
    """Interval, in epochs or steps. The last step is always evaluated."""
    batch: Size | None = None
    """Images per step over all workers; null: the training batch."""
    where: Literal["workers", "cpu", "gpu"] = "workers"
    """workers: training pauses; cpu or gpu: on one extra device, while training continues."""
    gpus: Annotated[float, Field(ge=0.0001, le=1)] = 1.0
    """Fraction of a GPU reserved for an evaluation with where: gpu. Memory is not limited."""
    examples: Annotated[int, Field(ge=0, le=64)] = 8
    """Images, the same at every evaluation, that MLflow shows with prediction and attention; 0: none."""
    probes: Annotated[tuple[Annotated[str, NameOf(training_probes)], ...], Field(strict=False)] = ()
    """Scores of features, logits and attention at each evaluation, computed on one extra CPU or a spare GPU while
    training continues. With optim.ema they score the averaged weights."""
    probe_images: Annotated[int, Field(ge=16, le=MOST_PROBED)] = 1024
    """Images of train that probes learn from, and of the evaluated split that they are scored on: the same at every
    evaluation. A smaller split gives all that it has."""
    figures: Annotated[tuple[TrainingFigure, ...], Field(strict=False)] = ()
    """Figures of `vitray inspect` over the images of examples at each evaluation, computed where probes are."""

    @property
    def has_prober(self) -> bool:
        """Whether an extra device computes probes or figures while training continues."""
        return bool(self.probes or self.figures)

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.gpus < 1 and self.where != "gpu":
            raise ValueError(f"gpus {self.gpus:g} needs where: gpu, got {self.where}")
        for setting, names in (("probes", self.probes), ("figures", self.figures)):
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{setting}: got {', '.join(repeated)} more than once, expected each once")
        return self
