"""The figures of `vitray inspect` in the order of its page, and what each needs, for settings and help: no torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from vitray.config.sections import Model


class FigureNeeds(NamedTuple):
    """What a figure needs of the images and of the networks."""

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
NEEDS = {
    "rollout": FigureNeeds(),
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
