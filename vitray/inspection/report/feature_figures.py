"""The figures of features over images: similarity of levels, and lengths of tokens."""

from collections.abc import Sequence

from vitray.inspection.report.drawings import Drawing, FigureResult, Table, file_name
from vitray.inspection.report.feature_charts import draw_similarity, draw_token_norms
from vitray.inspection.report.subjects import Subject
from vitray.inspection.report.tables import similarity_rows, token_norm_rows
from vitray.inspection.similarity import cka, level_grams
from vitray.inspection.tokens import OUTLIER_FACTOR, token_norms

# Linear CKA is estimated from at least this many images.
FEWEST_IMAGES = 4
SIMILARITY_PROSE = (
    "Linear CKA between the tokens before the first level (0) and after each, all tokens of an image as one vector: 1"
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
    images = 0 if subjects[0].images is None else len(subjects[0].images)
    if images < FEWEST_IMAGES:
        prose = f"{SIMILARITY_PROSE} It needs at least {FEWEST_IMAGES} images and was given {images}."
        return FigureResult("similarity", "Similarity of levels", prose, [], [])
    grams = [level_grams(subject.vit, subject.batch()) for subject in subjects]
    drawings, tables = [], []
    places = [(0, 0)] if len(subjects) == 1 else [(0, 0), (1, 1), (0, 1)]
    for first, second in places:
        values, pair = cka(grams[first], grams[second]), (subjects[first].name, subjects[second].name)
        name, names = (pair[0], None) if first == second else (f"{pair[0]} and {pair[1]}", pair)
        file = file_name("similarity", *dict.fromkeys(pair))
        drawings.append(
            Drawing(
                file,
                f"Similarity of the levels of {name}",
                f"{name}: {images:,} images.",
                lambda theme, values=values, name=name, names=names: draw_similarity(values, theme, name, names),
            )
        )
        tables.append(Table(file, list(similarity_rows(values))))
    return FigureResult("similarity", "Similarity of levels", SIMILARITY_PROSE, drawings, tables)


def norms_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the lengths of each network's tokens by level."""
    drawings, tables = [], []
    for subject in subjects:
        norms = token_norms(subject.vit, subject.batch())
        _, images, patches = norms.patches.shape
        outliers = int(norms.is_outlier[-1].sum())
        caption = (
            f"{subject.name}: {images:,} images of {patches:,} patches. After the last level {outliers:,} of"
            f" {images * patches:,} patches stand out, in {int(norms.is_outlier[-1].any(dim=1).sum()):,} images."
        )
        drawings.append(
            Drawing(
                file_name("norms", subject.name),
                f"Lengths of the tokens of {subject.name} by level",
                caption,
                lambda theme, norms=norms, name=subject.name: draw_token_norms(norms, theme, name),
            )
        )
        tables.append(Table(file_name("norms", subject.name), list(token_norm_rows(norms))))
    return FigureResult("norms", "Lengths of tokens", NORMS_PROSE, drawings, tables)
