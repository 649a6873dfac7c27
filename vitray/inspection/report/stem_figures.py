"""The figures of the stem and the positions (ViT paper, figures 7 and 10)."""

from collections.abc import Sequence
from functools import partial

from vitray.inspection.filters import StemFilters, first_filters, receptive_field, stem_filters
from vitray.inspection.positions import (
    WindowTerms,
    position_similarity,
    relative_lengths,
    relative_terms,
    window_terms,
)
from vitray.inspection.report.drawings import FigureResult, Part
from vitray.inspection.report.subjects import Subject
from vitray.inspection.report.tables import filter_rows, kernel_rows, offset_rows, position_rows, window_rows
from vitray.inspection.report.weight_charts import (
    draw_filters,
    draw_offset_terms,
    draw_positions,
    draw_window_terms,
)
from vitray.models.torchvision_networks import TorchvisionNetwork
from vitray.models.vit import ViT

# Filters of a first convolution that are drawn.
MOST_KERNELS = 112

FILTERS_PROSE = (
    "The leading principal components of the stem's filters, one filter for each channel of a token, the largest share"
    " of their variance first; of a network of torchvision, the filters of its first convolution themselves. Each is"
    " scaled to its largest entry; mid-gray is zero."
)
POSITIONS_PROSE = (
    "A tile for each position: the cosine between its embedding and those of all positions, which lie in the tile as in"
    " the image. Relative positions have no embeddings: of them, a term of the logits by offset of query and key."
)

KINDS = {
    "learned": "learned positions",
    "learned2d": "learned positions of column and row",
    "sincos2d": "fixed sines and cosines",
    "rope": "rotary positions (the cosine between a query and a key whose channels are all 1, after their rotation: the"
    " same for every level and head)",
}


def filters_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the leading components of each stem's filters."""
    result = FigureResult("filters", "Filters of the stem", FILTERS_PROSE, [], [])
    return result.of_each(subjects, "Filters", _show_filters)


def _show_filters(subject: Subject) -> Part | str:
    if isinstance(subject.network, TorchvisionNetwork):
        kernels_KCHW = first_filters(subject.network)
        shown, size = kernels_KCHW[:MOST_KERNELS], " x ".join(map(str, kernels_KCHW.shape[2:]))
        of_all = "" if len(shown) == len(kernels_KCHW) else f"the first {len(shown)} of "
        caption = f"{of_all}the {len(kernels_KCHW)} filters of {size} pixels of its first convolution."
        return Part(caption, partial(draw_filters, shown), kernel_rows(kernels_KCHW))
    if subject.vit.model.shape.is_hybrid:
        return f"{subject.name} has none: its tokens come from a ResNet, which reads the whole image."
    filters = stem_filters(subject.vit, subject.batch())
    draw = partial(draw_filters, filters.components.components)
    return Part(_filters_caption(subject, filters), draw, filter_rows(filters))


def _filters_caption(subject: Subject, filters: StemFilters) -> str:
    shares, size = filters.components.shares, receptive_field(subject.vit).size
    caption = (
        f"{len(shares)} components of {size} x {size} pixels with {float(shares.sum()):.1%} of the"
        f" variance of {subject.vit.model.shape.size:,} filters."
    )
    if subject.vit.model.shape.stem in ("linear", "linear_bn"):
        return caption
    caption += " The stem is not linear: these are the derivatives of a token at an image of one color,"
    if filters.linear_share is None or subject.images is None:
        return f"{caption} the mean of the normalization."
    share = filters.linear_share
    images = subject.over(len(subject.images))
    return f"{caption} the mean of {images}. Of the variance of their tokens they predict {share:.1%}."


def positions_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the similarity of each network's position embeddings."""
    result = FigureResult("positions", "Similarity of positions", POSITIONS_PROSE, [], [])
    return result.of_each(subjects, "Similarity of the positions", _show_positions)


def _show_positions(subject: Subject) -> Part | str:
    if subject.network.model.positions.kind == "relative":
        return _show_relative(subject)
    if terms := window_terms(subject.network):
        return _show_windows(terms)
    similarity = position_similarity(subject.network)
    if similarity is None:
        return f"{subject.name} has no position embedding."
    rows, columns = similarity.shape[:2]
    kind, grid = KINDS[subject.network.model.positions.kind], f"on a grid of {rows} x {columns} patches"
    where = subject.vit.positions_added_at if isinstance(subject.network, ViT) else "stem"
    if where != "levels":
        again = ", added before every level," if where == "shared" else ","
        return Part(f"{kind}{again} {grid}.", partial(draw_positions, [similarity]), position_rows([similarity]))
    levels = [position_similarity(subject.network, level=level) for level in range(len(subject.vit.blocks))]
    similarities = [each for each in levels if each is not None]
    caption = f"{kind}, those of each level, {grid}."
    return Part(caption, partial(draw_positions, similarities), position_rows(similarities))


def _show_relative(subject: Subject) -> Part:
    images_BCHW = subject.batch()
    if images_BCHW is None:
        lengths_LPK = relative_lengths(subject.vit)
        assert lengths_LPK is not None
        values_LPHK, label = lengths_LPK[:, :, None], "length of the key"
        caption = "the length of the learned key of each offset, which the heads of a branch share."
    else:
        terms_LPHK = relative_terms(subject.vit, images_BCHW)
        assert terms_LPHK is not None
        values_LPHK, label = terms_LPHK, "added to the logit"
        over = subject.over(len(images_BCHW))
        caption = (
            f"{over}; a line for each head, in the color of its branch: the product of a query with the learned key of"
            " an offset, which attention adds to the logit, as the mean over images and all pairs of patches with that"
            " offset."
        )
    rows, columns = subject.vit.model.grid
    caption += (
        " Offsets are places of queries minus those of keys in raster order,"
        f" of {columns} for a row; {rows} x {columns} patches."
    )
    return Part(caption, partial(draw_offset_terms, values_LPHK, label=label), offset_rows(values_LPHK))


def _show_windows(terms: list[WindowTerms]) -> Part:
    caption = (
        "the learned term that attention in windows (of MaxViT, also in grids) adds to the logit, by the offset, query"
        " minus key: rows down,"
        " columns across, zero in the middle of a tile. A row of tiles is an attention, with its stage, and a column a"
        " head."
    )
    return Part(caption, partial(draw_window_terms, terms), window_rows(terms))
