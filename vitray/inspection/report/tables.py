"""The numbers of each figure as rows of a CSV file, the heading first."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vitray.inspection.changes import FeatureChange, TensorChange
from vitray.inspection.filters import StemFilters
from vitray.inspection.positions import WindowTerms
from vitray.inspection.report.drawings import Rows
from vitray.inspection.tensors import LayerScale, Spectrum
from vitray.inspection.tokens import TokenNorms


def filter_rows(filters: StemFilters) -> Rows:
    """Return a row for each component: its share of the variance and its entries, color by color, row by row."""
    components, shares = filters.components
    entries = [f"{color}_{row}_{column}" for color, row, column in np.ndindex(*components.shape[1:])]
    numbered = enumerate(zip(shares.tolist(), components.flatten(1).tolist(), strict=True), start=1)
    return [["component", "variance_share", *entries], *([place, share, *flat] for place, (share, flat) in numbered)]


def kernel_rows(kernels_KCHW: Tensor) -> Rows:
    """Return a row for each filter: its entries, color by color, row by row."""
    entries = [f"{color}_{row}_{column}" for color, row, column in np.ndindex(*kernels_KCHW.shape[1:])]
    numbered = enumerate(kernels_KCHW.flatten(1).tolist(), start=1)
    return [["filter", *entries], *([place, *flat] for place, flat in numbered)]


def offset_rows(values_LPHK: Tensor) -> Rows:
    """Return a row for each head: the value of each offset, the most negative first."""
    *shape, offsets = values_LPHK.shape
    heading = ["level", "branch", "head", *(f"offset_{place - offsets // 2}" for place in range(offsets))]
    places = np.ndindex(*shape)
    return [
        heading,
        *([level, branch + 1, head + 1, *values_LPHK[level, branch, head].tolist()] for level, branch, head in places),
    ]


def window_rows(terms: Sequence[WindowTerms]) -> Rows:
    """Return a row for each offset of each head of each attention."""
    rows: Rows = [["attention", "stage", "head", "row_offset", "column_offset", "term"]]
    for each in terms:
        _, height, width = each.values.shape
        for head, row, column in np.ndindex(*each.values.shape):
            value = float(each.values[head, row, column])
            rows.append([each.name, each.level, head + 1, row - height // 2, column - width // 2, value])
    return rows


def position_rows(levels: Sequence[Tensor]) -> Rows:
    """Return a row for each level and position: its row and column, and its cosine to every position."""
    rows, columns = levels[0].shape[:2]
    heading = ["level", "row", "column", *(f"to_{row + 1}_{column + 1}" for row, column in np.ndindex(rows, columns))]
    return [
        heading,
        *(
            [level, row + 1, column + 1, *values[row, column].flatten().tolist()]
            for level, values in enumerate(levels)
            for row, column in np.ndindex(rows, columns)
        ),
    ]


def similarity_rows(cka_JK: Tensor) -> Rows:
    """Return a row for each state of the first network, a column for each of the second; empty where none varies."""
    heading = ["levels_passed", *(f"passed_{state}" for state in range(cka_JK.shape[1]))]
    cells = [[None if np.isnan(value) else value for value in row] for row in cka_JK.tolist()]
    return [heading, *([state, *row] for state, row in enumerate(cells))]


def token_norm_rows(norms: TokenNorms) -> Rows:
    """Return a row for each state: percentiles over patches, the class token's median, and the outliers."""
    heading = ["levels_passed", "p5", "median", "p95", "longest", "class_token_median", "outliers", "patches"]
    rows: Rows = [heading]
    for state, patches_BM in enumerate(norms.patches.double().cpu().numpy()):
        token = None if norms.class_token is None else float(np.median(norms.class_token[state].cpu().numpy()))
        outliers = int(norms.is_outlier[state].sum())
        numbers = [*np.percentile(patches_BM, [5, 50, 95]).tolist(), float(patches_BM.max())]
        rows.append([state, *numbers, token, outliers, patches_BM.size])
    return rows


def layerscale_rows(scales: Sequence[LayerScale]) -> Rows:
    """Return a row for each branch: percentiles of the size of its scale over channels."""
    rows: Rows = [["level", "branch", "p5", "median", "p95", "negative_share"]]
    for each in scales:
        values = each.values.detach().double().cpu().numpy()
        percentiles = np.percentile(np.abs(values), [5, 50, 95]).tolist()
        rows.append([each.level, each.branch, *percentiles, float((values < 0).mean())])
    return rows


def spectrum_rows(spectra: Sequence[Spectrum]) -> Rows:
    """Return a row for each matrix: its ranks and its singular values."""
    most = max((len(each.values) for each in spectra), default=0)
    heading = ["tensor", "kind", "level", "branch", "effective_rank", "stable_rank"]
    rows: Rows = [[*heading, *(f"value_{place + 1}" for place in range(most))]]
    for each in spectra:
        ranks = [each.effective_rank, each.stable_rank]
        values = each.values.tolist()
        rows.append([each.name, each.kind, each.level, each.branch, *ranks, *values, *[None] * (most - len(values))])
    return rows


def tensor_change_rows(changes: Sequence[TensorChange]) -> Rows:
    """Return a row for each tensor."""
    heading = ["tensor", "kind", "level", "branch", "status", "base_length", "change_length", "relative_change"]
    rows: Rows = [heading]
    for each in changes:
        lengths = [each.base, each.change, each.relative]
        rows.append([each.name, each.kind, each.level, each.branch, each.status, *lengths])
    return rows


def feature_change_rows(change: FeatureChange) -> Rows:
    """Return a row for each state: percentiles over images."""
    names = [f"{name}_{part}" for name in ("relative_change", "cosine") for part in ("p5", "median", "p95")]
    rows: Rows = [["levels_passed", *names]]
    for state in range(len(change.relative)):
        both = (change.relative[state], change.cosine[state])
        rows.append(
            [state, *(x for each in both for x in np.percentile(each.double().cpu().numpy(), [5, 50, 95]).tolist())]
        )
    return rows
