"""The figures of weights: LayerScale and spectra."""

from collections.abc import Sequence

from vitray.inspection.report.drawings import Drawing, FigureResult, Table, file_name
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
    prose, drawings, tables = LAYERSCALE_PROSE, [], []
    for subject in subjects:
        scales = layerscales(subject.vit)
        if scales is None:
            prose += f" {subject.name} has no LayerScale."
            continue
        caption = f"{subject.name}: {len(scales[0].values):,} channels; {subject.vit.model.layerscale:g} at the start."
        drawings.append(
            Drawing(
                file_name("layerscale", subject.name),
                f"LayerScale of {subject.name} by level",
                caption,
                lambda theme, scales=scales, name=subject.name: draw_layerscales(scales, theme, name),
            )
        )
        tables.append(Table(file_name("layerscale", subject.name), list(layerscale_rows(scales))))
    return FigureResult("layerscale", "LayerScale", prose, drawings, tables)


def spectra_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the singular values of each network's matrices."""
    drawings, tables = [], []
    for subject in subjects:
        found = spectra(subject.vit)
        drawings.append(
            Drawing(
                file_name("spectra", subject.name),
                f"Singular values of the weights of {subject.name}",
                f"{subject.name}: {len(found):,} matrices.",
                lambda theme, found=found, name=subject.name: draw_spectra(found, theme, name),
            )
        )
        tables.append(Table(file_name("spectra", subject.name), list(spectrum_rows(found))))
    return FigureResult("spectra", "Spectra of weights", SPECTRA_PROSE, drawings, tables)
