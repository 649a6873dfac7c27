"""The figures of the stem and the positions (ViT paper, figures 7 and 10)."""

from collections.abc import Sequence
from functools import partial

from vitray.inspection.filters import StemFilters, receptive_field, stem_filters
from vitray.inspection.positions import position_similarity
from vitray.inspection.report.drawings import FigureResult, Part
from vitray.inspection.report.subjects import Subject
from vitray.inspection.report.tables import filter_rows, position_rows
from vitray.inspection.report.weight_charts import draw_filters, draw_positions

FILTERS_PROSE = (
    "The leading principal components of the stem's filters, one filter for each channel of a token, the largest share"
    " of their variance first. Each is scaled to its largest entry; mid-grey is zero."
)
POSITIONS_PROSE = (
    "A tile for each position: the cosine between its embedding and those of all positions, which lie in the tile as in"
    " the image."
)

KINDS = {
    "learned": "learned positions",
    "learned2d": "learned positions of column and row",
    "sincos2d": "fixed sines and cosines",
}


def filters_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the leading components of each stem's filters."""
    result = FigureResult("filters", "Filters of the stem", FILTERS_PROSE, [], [])
    for subject in subjects:
        if subject.vit.model.shape.is_hybrid:
            note = f"{subject.name} has none: its tokens come from a ResNet, which reads the whole image."
            result = result._replace(prose=f"{result.prose} {note}")
    others = [subject for subject in subjects if not subject.vit.model.shape.is_hybrid]
    return result.of_each(others, "Leading components of the filters", _show_filters)


def _show_filters(subject: Subject) -> Part:
    filters = stem_filters(subject.vit, subject.batch())
    return Part(_filters_caption(subject, filters), partial(draw_filters, filters), filter_rows(filters))


def _filters_caption(subject: Subject, filters: StemFilters) -> str:
    shares, size = filters.components.shares, receptive_field(subject.vit).size
    caption = (
        f"{len(shares)} components of {size} x {size} pixels with {float(shares.sum()):.1%} of the"
        f" variance of {subject.vit.model.shape.size:,} filters."
    )
    if subject.vit.model.shape.stem in ("linear", "linear_bn"):
        return caption
    caption += " The stem is not linear: these are the derivatives of a token at an image of one colour,"
    if filters.linear_share is None or subject.images is None:
        return f"{caption} the mean of the normalisation."
    share = filters.linear_share
    images = subject.over(len(subject.images))
    return f"{caption} the mean of {images}. Of the variance of their tokens they predict {share:.1%}."


def positions_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the similarity of each network's position embeddings."""
    result = FigureResult("positions", "Similarity of positions", POSITIONS_PROSE, [], [])
    return result.of_each(subjects, "Similarity of the positions", _show_positions)


def _show_positions(subject: Subject) -> Part | str:
    similarity = position_similarity(subject.vit)
    if similarity is None:
        return f"{subject.name} has no position embedding."
    rows, columns = subject.vit.model.grid
    caption = f"{KINDS[subject.vit.model.positions.kind]} of a grid of {rows} x {columns} patches."
    return Part(caption, partial(draw_positions, similarity), position_rows(similarity))
