"""The figures that an inspection can make, by name."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vitray.errors import ConfigError, nearest
from vitray.inspection.report.attention_figures import distance_figure
from vitray.inspection.report.branch_figure import branches_figure
from vitray.inspection.report.change_figures import changes_figure, features_figure
from vitray.inspection.report.drawings import FigureResult
from vitray.inspection.report.feature_figures import norms_figure, similarity_figure
from vitray.inspection.report.rollout_figure import maps_figure
from vitray.inspection.report.stem_figures import filters_figure, positions_figure
from vitray.inspection.report.subjects import Subject
from vitray.inspection.report.weight_figures import layerscale_figure, spectra_figure


class Figure(NamedTuple):
    """One figure: the function that makes it, and the inputs that it needs."""

    make: Callable[[Sequence[Subject]], FigureResult]
    needs_images: bool = True
    needs_two: bool = False
    """Whether it compares two networks."""
    title: str = ""
    """Of a figure that only Vision Transformers have."""
    lack: str = ""
    """Why other networks are not in such a figure."""


NO_ATTENTION = "the figure reads the attention of these only."
# In the order of the page.
FIGURES = {
    "rollout": Figure(maps_figure),
    "distance": Figure(distance_figure, title="Attention distance and entropy", lack=NO_ATTENTION),
    "branches": Figure(branches_figure, title="Parallel branches", lack="it has no parallel branches."),
    "filters": Figure(filters_figure, needs_images=False),
    "positions": Figure(positions_figure, needs_images=False),
    "similarity": Figure(similarity_figure),
    "norms": Figure(norms_figure, title="Lengths of tokens", lack="the figure reads the tokens of these only."),
    "layerscale": Figure(
        layerscale_figure, False, title="LayerScale", lack="the figure reads the LayerScale of these only."
    ),
    "spectra": Figure(spectra_figure, needs_images=False),
    "changes": Figure(changes_figure, needs_images=False, needs_two=True),
    "features": Figure(features_figure, needs_two=True),
}


def make_figure(name: str, subjects: Sequence[Subject]) -> FigureResult:
    """Return a figure of the networks that have it, with a sentence for each of the others."""
    figure = FIGURES[name]
    having = [subject for subject in subjects if not figure.lack or subject.network.model.is_vit]
    result = figure.make(having) if having else FigureResult(name, figure.title, "", [], [])
    for subject in subjects:
        if all(subject is not each for each in having):
            text = f"{subject.name} is not in this figure: {subject.network.model.name} is not a ViT of vitray,"
            result = result.without(f"{text} and {figure.lack}")
    return result


def choose_figures(names: Sequence[str], has_images: bool, has_two: bool) -> list[str]:
    """Return the figures that are made: the named ones, checked, or by default all that the inputs allow."""
    for name in names:
        if name not in FIGURES:
            raise ConfigError(f"--figures: got {name}; expected some of {', '.join(FIGURES)}{nearest(name, FIGURES)}")
        if FIGURES[name].needs_images and not has_images:
            raise ConfigError(f"--figures: {name} needs images; expected a dataset or image files after the network")
        if FIGURES[name].needs_two and not has_two:
            raise ConfigError(f"--figures: {name} compares two networks; expected --compare MODEL")
    if names:
        return [name for name in FIGURES if name in names]
    return [
        name
        for name, figure in FIGURES.items()
        if (has_images or not figure.needs_images) and (has_two or not figure.needs_two)
    ]
