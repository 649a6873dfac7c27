"""The principal components of the patches' features as the colors of a picture (DINOv2, figure 1).

Shapes: B images, C colors, H x W pixels, N patches, P patches of all images, D width, R x Q the grid.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from vitray.inspection.levels import grid_of
from vitray.inspection.report.drawings import FigureResult, Rows, add_title
from vitray.inspection.report.subjects import Subject
from vitray.models.vit import ViT
from vitray.pages.plotting import Theme, new_figure

COMPONENTS = 3
# Of the values of a component: those outside have the color at the end.
PERCENTILES = (2, 98)
COLUMNS = 4
PROSE = (
    "Each image, then its patches in three colors: red, green and blue are the first three principal components of the"
    " patches' features after the last norm, over all images shown. Patches of one color are alike for the network."
    " Where the parts of an object have colors of their own, also from image to image, the features know these parts;"
    " where the colors follow the place in the image or its brightness alone, they do not."
)


class Components(NamedTuple):
    """The first principal components of vectors."""

    values: np.ndarray
    """Of each vector, P3; zeros where there are fewer components."""
    shares: np.ndarray
    """Of the variance that each component explains."""


def principal_components(features_PD: Tensor) -> Components:
    """Return the components of largest variance, each with its largest coefficient positive.

    Without that rule the sign, and so the color, could change from step to step.
    """
    centered_PD = features_PD.double() - features_PD.double().mean(dim=0)
    variance_D, vectors_DD = torch.linalg.eigh(centered_PD.mT @ centered_PD)  # ascending
    largest_DK = vectors_DD.flip(1)[:, :COMPONENTS]
    sign_K = largest_DK.gather(0, largest_DK.abs().argmax(dim=0, keepdim=True)).sign()
    values_PK, share_K = centered_PD @ (largest_DK * sign_K), variance_D.flip(0)[:COMPONENTS].clamp(min=0)
    missing = COMPONENTS - largest_DK.shape[1]
    shares = share_K / variance_D.clamp(min=0).sum().clamp(min=torch.finfo(torch.float64).tiny)
    return Components(
        torch.nn.functional.pad(values_PK, (0, missing)).numpy(), torch.nn.functional.pad(shares, (0, missing)).numpy()
    )


def make(subjects: Sequence[Subject], result: FigureResult) -> FigureResult:
    """Return the result with the components of the shown images' patches."""
    for subject in subjects:
        assert subject.chosen is not None
        components, (rows, columns) = _compute(subject)
        values_BRQK = components.values.reshape(-1, rows, columns, COMPONENTS)
        table: Rows = [["image", "row", "column", "first", "second", "third"]]
        for place, row, column in np.ndindex(*values_BRQK.shape[:3]):
            key = subject.chosen.shown[place].key
            table.append([key, row, column, *values_BRQK[place, row, column].tolist()])
        explained = ", ".join(f"{share:.0%}" for share in components.shares)
        caption = f"{subject.over(len(values_BRQK))}; the components have {explained} of the variance."
        draw = partial(_draw, subject, colors_of(values_BRQK))
        result.add(subject.name, "Components of patch features", caption, draw, table)
    return result


@torch.no_grad()
def _compute(subject: Subject) -> tuple[Components, tuple[int, int]]:
    vit, features, grid = subject.vit, [], (0, 0)
    for batch_BCHW in subject.batches("components of patches"):
        grid = grid_of(vit, batch_BCHW)
        features.append(patch_features(vit, batch_BCHW).cpu())
    return principal_components(torch.cat(features).flatten(0, 1)), grid


def patch_features(vit: ViT, images_BCHW: Tensor) -> Tensor:
    """Return the features of the patches after the last norm, BND."""
    return vit.norm(vit.tokens(images_BCHW)[:, vit.num_prefix :])


def colors_of(values_BRQK: np.ndarray) -> np.ndarray:
    """Return components as colors from 0 to 1, the same scale for all images."""
    low_K, high_K = np.percentile(values_BRQK, PERCENTILES, axis=(0, 1, 2))
    width_K = high_K - low_K
    return np.clip(np.where(width_K > 0, (values_BRQK - low_K) / np.where(width_K > 0, width_K, 1), 0.5), 0, 1)


def _draw(subject: Subject, colors_BRQK: np.ndarray, theme: Theme, title: str) -> Figure:
    """Pairs of an image and its patches in the colors of their components."""
    assert subject.images is not None
    _, height, width, _ = subject.images.shape
    columns = min(COLUMNS, len(colors_BRQK))
    lines = -(-len(colors_BRQK) // columns)
    figure = new_figure(theme, 3 * columns + 0.3, (1.5 * height / width + 0.1) * lines + 0.5)
    add_title(figure, theme, title)
    axes = figure.subplots(lines, 2 * columns, squeeze=False).flatten()
    for axis in axes:
        axis.set_axis_off()
    for place, colors_RQK in enumerate(colors_BRQK):
        axes[2 * place].imshow(subject.images[place], interpolation="nearest")
        axes[2 * place + 1].imshow(colors_RQK, interpolation="nearest", extent=(0, width, height, 0))
    return figure
