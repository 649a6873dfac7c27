"""The figures of two networks: the change of tensors and of features from the first to the second."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

from vitray.inspection.changes import FeatureChange, tensor_changes, tokens_of
from vitray.inspection.report.drawings import FigureResult, Table, file_name
from vitray.inspection.report.feature_charts import draw_feature_changes
from vitray.inspection.report.subjects import Subject
from vitray.inspection.report.tables import feature_change_rows, spectrum_rows, tensor_change_rows
from vitray.inspection.report.weight_charts import draw_spectra, draw_tensor_changes, relative_by_kind
from vitray.inspection.states import has_levels
from vitray.inspection.tensors import spectra

CHANGES_PROSE = (
    "The length of the change of the weights and biases over their length in the first network; an empty cell has not"
    " changed. Tensors of another shape, and those that only one of the networks has, are in the table alone. The"
    " levels of a network of torchvision are its stages; level 0 is the rest of it but the head."
)
FEATURES_PROSE = (
    "Above: the length of the change of an image's tokens over their length in the first network. Below: the cosine"
    " between both networks' tokens, averaged over tokens. Medians over images, in bands from the 5th to the 95th"
    " percentile, before the first level (0) and after each."
)


def changes_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the change of every tensor from the first network to the second, and the spectra of the changes."""
    base, other = subjects
    changes, title = tensor_changes(base.network, other.network), f"{base.name} → {other.name}"
    counts = Counter(each.status for each in changes)
    caption = f"{', '.join(f'{count:,} tensors {status}' for status, count in sorted(counts.items()))}."
    result = FigureResult("changes", "Change of the weights", CHANGES_PROSE, [], [])
    if not any(level is not None for level, _ in relative_by_kind(changes)):
        result.tables.append(Table(file_name("changes", title), tensor_change_rows(changes)))
        return result.without("The levels of the two networks have no tensor in common.")
    draw = partial(draw_tensor_changes, changes, title=title)
    result.add(title, "Change of the weights", caption, draw, tensor_change_rows(changes))
    if found := spectra(other.network, base.network):
        caption = f"the singular values of the {len(found):,} matrices that changed, over the largest."
        draw = partial(draw_spectra, found, title=title)
        # The same lists, under another file name.
        spectra_result = result._replace(name="spectra_of_changes")
        spectra_result.add(title, "Singular values of the changes", caption, draw, spectrum_rows(found))
    return result


def features_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the change of the features of images from the first network to the second."""
    base, other = subjects
    result = FigureResult("features", "Change of the features", FEATURES_PROSE, [], [])
    parts: Sequence[FeatureChange] = other.measured["features"]
    if not parts:
        first, second = (tokens_of(each.network, torch.empty(0, 3, *each.spec.size)) for each in subjects)
        reason = f"{base.name} has {first}, {other.name} has {second}: only the similarity of levels compares them."
        if first == second and not has_levels(other.network):
            reason = f"{base.name} and {other.name} are not in this figure: they have no numbered stages."
        return result.without(reason)
    change = FeatureChange(*(torch.cat(each, dim=1) for each in zip(*parts, strict=True)))
    title = f"{base.name} → {other.name}"
    caption = f"{other.over(change.relative.shape[1])}."
    draw = partial(draw_feature_changes, change, title=title)
    result.add(title, "Change of the features", caption, draw, feature_change_rows(change))
    return result
