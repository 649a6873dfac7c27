"""The figures of weights: LayerScale and spectra."""

from collections.abc import Sequence
from functools import partial

from vitray.inspection.report.drawings import FigureResult
from vitray.inspection.report.subjects import Subject
from vitray.inspection.report.tables import layerscale_rows, spectrum_rows
from vitray.inspection.report.weight_charts import draw_layerscales, draw_spectra
from vitray.inspection.tensors import layerscales, spectra

LAYERSCALE_PROSE = (
    "The size of LayerScale by level: the median over channels, in a band from the 5th to the 95th percentile. It"
    " weighs the output of a branch before it is added to the residual stream."
)
SPECTRA_PROSE = (
    "The singular values of each matrix over its largest; the last level has the strongest colour. A line that falls at"
    " once is a matrix of low rank."
)


def layerscale_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the LayerScale of each network by level."""
    result = FigureResult("layerscale", "LayerScale", LAYERSCALE_PROSE, [], [])
    for subject in subjects:
        scales = layerscales(subject.vit)
        if scales is None:
            result = result._replace(prose=f"{result.prose} {subject.name} has no LayerScale.")
            continue
        caption = f"{len(scales[0].values):,} channels; {subject.vit.model.layerscale:g} at the start."
        draw = partial(draw_layerscales, scales, title=subject.name)
        result.add(subject.name, "LayerScale by level", caption, draw, layerscale_rows(scales))
    return result


def spectra_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the singular values of each network's matrices."""
    result = FigureResult("spectra", "Spectra of weights", SPECTRA_PROSE, [], [])
    for subject in subjects:
        found = spectra(subject.vit)
        draw = partial(draw_spectra, found, title=subject.name)
        caption = f"{len(found):,} matrices."
        result.add(subject.name, "Singular values of the weights", caption, draw, spectrum_rows(found))
    return result
