"""The figures of two networks: the change of tensors and of features from the first to the second."""

from collections import Counter
from collections.abc import Sequence

from vitray.inspection.changes import feature_changes, tensor_changes, tokens_of
from vitray.inspection.report.drawings import Drawing, FigureResult, Table, file_name
from vitray.inspection.report.feature_charts import draw_feature_changes
from vitray.inspection.report.subjects import Subject
from vitray.inspection.report.tables import feature_change_rows, spectrum_rows, tensor_change_rows
from vitray.inspection.report.weight_charts import draw_spectra, draw_tensor_changes, relative_by_kind
from vitray.inspection.tensors import spectra

CHANGES_PROSE = (
    "The length of the change of the weights and biases over their length in the first network; an empty cell has not"
    " changed. Tensors of another shape, and those that only one of the networks has, are in the table alone."
)
FEATURES_PROSE = (
    "Above: the length of the change of an image's tokens over their length in the first network. Below: the cosine"
    " between both networks' tokens, averaged over tokens. Medians over images, in bands from the 5th to the 95th"
    " percentile, before the first level (0) and after each."
)


def changes_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the change of every tensor from the first network to the second, and the spectra of the changes."""
    base, other = subjects
    changes = tensor_changes(base.vit, other.vit)
    title, file = f"{base.name} → {other.name}", file_name("changes", base.name, other.name)
    counts = Counter(each.status for each in changes)
    caption = f"{title}: {', '.join(f'{count:,} tensors {status}' for status, count in sorted(counts.items()))}."
    result = FigureResult("changes", "Change of the weights", CHANGES_PROSE, [], [])
    result.tables.append(Table(file, list(tensor_change_rows(changes))))
    if not any(level is not None for level, _ in relative_by_kind(changes)):
        return result._replace(prose=f"{CHANGES_PROSE} The levels of the two networks have no tensor in common.")
    result.drawings.append(
        Drawing(
            file, f"Change of the weights of {title}", caption, lambda theme: draw_tensor_changes(changes, theme, title)
        )
    )
    if found := spectra(other.vit, base.vit):
        file = file_name("spectra_of_changes", base.name, other.name)
        alt = f"Singular values of the changes of {title}"
        caption = f"{title}: the singular values of the {len(found):,} matrices that changed, over the largest."
        result.drawings.append(Drawing(file, alt, caption, lambda theme: draw_spectra(found, theme, title)))
        result.tables.append(Table(file, list(spectrum_rows(found))))
    return result


def features_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the change of the features of images from the first network to the second."""
    base, other = subjects
    first, second = (tokens_of(subject.vit, subject.batch()) for subject in subjects)
    if first != second:
        reason = f"{base.name} has {first}, {other.name} has {second}: only the similarity of levels compares them."
        return FigureResult("features", "Change of the features", f"{FEATURES_PROSE} {reason}", [], [])
    change = feature_changes(base.vit, other.vit, base.batch(), other.batch())
    title, file = f"{base.name} → {other.name}", file_name("features", base.name, other.name)
    drawing = Drawing(
        file,
        f"Change of the features of {title}",
        f"{title}: {change.relative.shape[1]:,} images.",
        lambda theme: draw_feature_changes(change, theme, title),
    )
    tables = [Table(file, list(feature_change_rows(change)))]
    return FigureResult("features", "Change of the features", FEATURES_PROSE, [drawing], tables)
