"""Change of the weights from one network to another: of every tensor, and the spectra of the changes."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from vitray.inspection.changes import TensorChange, tensor_changes
from vitray.inspection.report.drawings import DPI, FigureResult, Rows, Table, add_bar, file_name, prepare
from vitray.inspection.report.figures.spectra import draw_spectra, spectrum_rows
from vitray.inspection.report.subjects import Subject
from vitray.inspection.tensors import KINDS, Kind, spectra
from vitray.pages.plotting import Theme, heat, new_figure

# Levels with numbers in the cells of the heat map.
MOST_NUMBERED = 16
LABELS: dict[Kind, str] = {
    "class_token": "class token",
    "distillation_token": "distillation token",
    "layerscale": "LayerScale",
}
PROSE = (
    "The length of the change of the weights and biases over their length in the first network; an empty cell has not"
    " changed. Tensors of another shape, and those that only one of the networks has, are in the table alone. The"
    " levels of a network of torchvision are its stages; level 0 is the rest of it but the head."
)


def make(subjects: Sequence[Subject], result: FigureResult) -> FigureResult:
    """Return the result with the change of every tensor, and the singular values of the changes."""
    base, other = subjects
    changes, title = tensor_changes(base.network, other.network), f"{base.name} → {other.name}"
    counts = Counter(each.status for each in changes)
    caption = f"{', '.join(f'{count:,} tensors {status}' for status, count in sorted(counts.items()))}."
    heading = ["tensor", "kind", "level", "branch", "status", "base_length", "change_length", "relative_change"]
    rows: Rows = [heading]
    for each in changes:
        lengths = [each.base, each.change, each.relative]
        rows.append([each.name, each.kind, each.level, each.branch, each.status, *lengths])
    sizes = relative_by_kind(changes)
    if all(level is None for level, _ in sizes):
        result.tables.append(Table(file_name(result.name, title), rows))
        return result.without("The levels of the two networks have no tensor in common.")
    result.add(title, "Change of the weights", caption, partial(_draw, sizes), rows)
    if found := spectra(other.network, base.network):
        caption = f"the singular values of the {len(found):,} matrices that changed, over the largest."
        draw, rows = partial(draw_spectra, found), spectrum_rows(found)
        result.add(title, "Singular values of the changes", caption, draw, rows, file="spectra_of_changes")
    return result


def relative_by_kind(changes: Sequence[TensorChange]) -> dict[tuple[int | None, Kind], float]:
    """Return the relative change of all comparable tensors of a level and kind together; nan where they were zero."""
    squares: dict[tuple[int | None, Kind], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for each in changes:
        if each.status in ("equal", "changed"):
            squares[each.level, each.kind] += each.change**2, each.base**2
    return {
        place: 0.0 if change == 0 else math.sqrt(change / base) if base else math.nan
        for place, (change, base) in squares.items()
    }


def _draw(sizes: dict[tuple[int | None, Kind], float], theme: Theme, title: str) -> Figure:
    """The relative change by level and kind, empty where equal, and of the tensors outside the levels as bars."""
    levels = sorted({level for level, _ in sizes if level is not None})
    kinds: list[Kind] = [kind for kind in KINDS if any((level, kind) in sizes for level in levels)]
    others: list[Kind] = [kind for kind in KINDS if (None, kind) in sizes]
    figure = new_figure(theme, 2.2 + max(2.4, 0.34 * len(levels)), 0.9 + 0.3 * (len(kinds) + len(others)), DPI)
    upper, lower = figure.subplots(2, 1, height_ratios=(len(kinds), max(len(others), 1)))
    prepare(upper, theme, title)
    upper.grid(False)
    cells = np.array([[sizes.get((level, kind), np.nan) for level in levels] for kind in kinds])
    shown = np.where(cells > 0, cells, np.nan)
    drawn = upper.imshow(shown, cmap=heat(theme), vmin=0, aspect="auto", interpolation="nearest")
    upper.set_yticks(range(len(kinds)), [LABELS.get(kind, kind) for kind in kinds], color=theme.ink)
    upper.set_xticks(range(len(levels)), [str(level) for level in levels])
    upper.set_xlabel("level", color=theme.pale, fontsize=8)
    if len(levels) <= MOST_NUMBERED:
        most = np.nanmax(shown) if np.isfinite(shown).any() else 1
        for row, column in np.argwhere(np.isfinite(shown)):
            color = theme.paper if shown[row, column] > 0.5 * most else theme.ink
            text = f"{shown[row, column]:.2g}".replace("0.", ".")
            upper.text(column, row, text, ha="center", va="center", fontsize=5.5, color=color)
    add_bar(figure, upper, drawn, theme, "relative change")
    prepare(lower, theme, "")
    lower.grid(False, axis="y")
    outside = [sizes[None, kind] for kind in others]
    bars = lower.barh(range(len(others)), np.nan_to_num(outside), color=theme.series[0], height=0.6)
    texts = ["from zero" if math.isnan(size) else f"{size:.2g}" if size else "equal" for size in outside]
    lower.bar_label(bars, texts, padding=3, fontsize=7, color=theme.pale)
    lower.set_yticks(
        range(len(others)), ["final norm" if kind == "norm" else LABELS.get(kind, kind) for kind in others]
    )
    lower.tick_params(axis="y", labelcolor=theme.ink)
    lower.invert_yaxis()
    lower.margins(x=0.15)
    lower.set_xlabel("relative change", color=theme.pale, fontsize=8)
    return figure
