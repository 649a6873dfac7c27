"""The figures that an inspection can make: one module and one row each."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vitray.config.evaluation import NEEDS
from vitray.errors import ConfigError, nearest
from vitray.inspection.report.drawings import FigureResult
from vitray.inspection.report.figures import (
    branches,
    changes,
    components,
    distance,
    features,
    filters,
    layerscale,
    norms,
    positions,
    rollout,
    similarity,
    spectra,
)
from vitray.inspection.report.subjects import Subject, View


class Figure(NamedTuple):
    """One figure: its texts and its functions. The row of its name in `NEEDS` says what it needs."""

    title: str
    prose: str
    make: Callable[[Sequence[Subject], FigureResult], FigureResult]
    """Takes the networks that can have it and a result without drawings, and returns the result with them."""
    measure: Callable[[View], Any] | None = None
    """Of a figure over many images: the values of a network for a chunk of them; None where it has no such values."""


FIGURES = {
    "rollout": Figure("Attention maps", rollout.PROSE, rollout.make),
    "components": Figure("Components of patch features", components.PROSE, components.make),
    "distance": Figure("Attention distance and entropy", distance.PROSE, distance.make, distance.measure),
    "branches": Figure("Parallel branches", branches.PROSE, branches.make, branches.measure),
    "filters": Figure("Filters of the stem", filters.PROSE, filters.make),
    "positions": Figure("Similarity of positions", positions.PROSE, positions.make),
    "similarity": Figure("Similarity of levels", similarity.PROSE, similarity.make, similarity.measure),
    "norms": Figure("Lengths of tokens", norms.PROSE, norms.make, norms.measure),
    "layerscale": Figure("LayerScale", layerscale.PROSE, layerscale.make),
    "spectra": Figure("Spectra of weights", spectra.PROSE, spectra.make),
    "changes": Figure("Change of the weights", changes.PROSE, changes.make),
    "features": Figure("Change of the features", features.PROSE, features.make, features.measure),
}


def make_figure(name: str, subjects: Sequence[Subject]) -> FigureResult:
    """Return a figure of the networks that have it, with a sentence for each of the others."""
    figure, vit_only = FIGURES[name], NEEDS[name].vit_only
    having = [subject for subject in subjects if not vit_only or subject.network.model.is_vit]
    result = FigureResult(name, figure.title, figure.prose if having else "", [], [])
    if having:
        result = figure.make(having, result)
    for subject in subjects:
        if vit_only and not subject.network.model.is_vit:
            text = f"{subject.name} is not in this figure: {subject.network.model.name} is not a ViT of vitray,"
            result = result.without(f"{text} and {vit_only}")
    return result


def choose_figures(names: Sequence[str], has_images: bool, has_two: bool) -> list[str]:
    """Return the figures that are made: the named ones, checked, or by default all that the inputs allow."""
    for name in names:
        if name not in NEEDS:
            raise ConfigError(f"--figures: got {name}; expected some of {', '.join(NEEDS)}{nearest(name, NEEDS)}")
        if NEEDS[name].images and not has_images:
            raise ConfigError(f"--figures: {name} needs images; expected a dataset or image files after the network")
        if NEEDS[name].two and not has_two:
            raise ConfigError(f"--figures: {name} compares two networks; expected --compare MODEL")
    if names:
        return [name for name in NEEDS if name in names]
    return [name for name, needs in NEEDS.items() if (has_images or not needs.images) and (has_two or not needs.two)]
