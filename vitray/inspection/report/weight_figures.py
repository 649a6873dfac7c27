"""The figures of weights: LayerScale and spectra."""

from collections.abc import Sequence
from functools import partial

from vitray.inspection.report.drawings import FigureResult, Part
from vitray.inspection.report.subjects import Subject
from vitray.inspection.report.tables import layerscale_rows, spectrum_rows
from vitray.inspection.report.weight_charts import draw_layerscales, draw_spectra
from vitray.inspection.tensors import layerscales, spectra

LAYERSCALE_PROSE = (
    "The size of LayerScale by level: the median over channels, in a band from the 5th to the 95th percentile. It"
    " weighs the output of a branch before it is added to the residual stream."
)
SPECTRA_PROSE = (
    "The singular values of each matrix over its largest; the last level has the strongest color. A line that falls at"
    " once is a matrix of low rank. The kernel of a convolution is a matrix with a row for each output channel; of a"
    " network of torchvision, all matrices but the head's."
)


def layerscale_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the LayerScale of each network by level."""
    result = FigureResult("layerscale", "LayerScale", LAYERSCALE_PROSE, [], [])
    return result.of_each(subjects, "LayerScale by level", _show_layerscale)


def _show_layerscale(subject: Subject) -> Part | str:
    scales = layerscales(subject.vit)
    if scales is None:
        return f"{subject.name} has no LayerScale."
    caption = f"{len(scales[0].values):,} channels; {subject.vit.model.layerscale:g} at the start."
    return Part(caption, partial(draw_layerscales, scales), layerscale_rows(scales))


def spectra_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the singular values of each network's matrices."""
    result = FigureResult("spectra", "Spectra of weights", SPECTRA_PROSE, [], [])
    return result.of_each(subjects, "Singular values of the weights", _show_spectra)


def _show_spectra(subject: Subject) -> Part:
    found = spectra(subject.network)
    return Part(f"{len(found):,} matrices.", partial(draw_spectra, found), spectrum_rows(found))
