"""The figures of features over images: similarity of levels, and lengths of tokens."""

from collections.abc import Sequence
from functools import partial

from vitray.inspection.report.drawings import FigureResult, Part
from vitray.inspection.report.feature_charts import draw_similarity, draw_token_norms
from vitray.inspection.report.subjects import Subject
from vitray.inspection.report.tables import similarity_rows, token_norm_rows
from vitray.inspection.similarity import FEWEST_IMAGES, cka
from vitray.inspection.states import has_levels
from vitray.inspection.tokens import OUTLIER_FACTOR, join_token_norms

SIMILARITY_PROSE = (
    "Linear CKA between the tokens before the first level (0) and after each, all tokens of an image as one vector (the"
    " levels of a network of torchvision are its stages, its tokens the positions of an image): 1"
    " where two representations differ by a rotation and a scale, 0 where they have nothing in common. It is the"
    " mini-batch estimate with unbiased HSIC, so that few images do not raise it, but make it noisy."
)
NORMS_PROSE = (
    "The length of the tokens before the first level (0) and after each: medians, in bands from the 5th to the 95th"
    f" percentile over patches and images. A patch stands out if it is longer than {OUTLIER_FACTOR:g} times the median"
    " of its level; large networks use such patches as registers (Darcet et al., 2024)."
)


def similarity_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the CKA between the levels of each network, and between those of two."""
    result = FigureResult("similarity", "Similarity of levels", SIMILARITY_PROSE, [], [])
    for subject in subjects:
        if not has_levels(subject.network):
            model = subject.network.model.name
            result = result.without(f"{subject.name} is not in this figure: {model} has no numbered stages.")
    subjects = [subject for subject in subjects if has_levels(subject.network)]
    grams = [subject.measured["similarity"] for subject in subjects]
    if not any(grams):
        return result.without(f"It needs at least {FEWEST_IMAGES} images.") if subjects else result
    over = subjects[0].over(sum(gram_JBB.shape[-1] for gram_JBB in grams[0]))
    names = [subject.name for subject in subjects]
    pairs = list(zip(names, grams, grams, strict=True))
    if len(subjects) == 2:
        pairs.append((" and ".join(names), grams[0], grams[1]))
    for title, first, second in pairs:
        values = cka(first, second)
        of_two = None if first is second else (names[0], names[1])
        draw = partial(draw_similarity, values, title=title, names=of_two)
        result.add(title, "Similarity of the levels", f"{over}.", draw, similarity_rows(values))
    return result


def norms_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the lengths of each network's tokens by level."""
    result = FigureResult("norms", "Lengths of tokens", NORMS_PROSE, [], [])
    return result.of_each(subjects, "Lengths of the tokens by level", _show_norms)


def _show_norms(subject: Subject) -> Part:
    norms = join_token_norms(subject.measured["norms"])
    _, images, patches = norms.patches.shape
    outliers = int(norms.is_outlier[-1].sum())
    caption = (
        f"{subject.over(images)}, {patches:,} patches each. After the last level {outliers:,} of"
        f" {images * patches:,} patches stand out, in {int(norms.is_outlier[-1].any(dim=1).sum()):,} images."
    )
    return Part(caption, partial(draw_token_norms, norms), token_norm_rows(norms))
