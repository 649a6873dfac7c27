"""Parts that several figures share: axes with a title, color maps of the theme, color bars, bands over levels."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vitray.plotting import Theme, one_line, style_axis


def to_array(values: Tensor) -> np.ndarray:
    """Return a tensor as an array in float64."""
    return values.detach().double().cpu().numpy()


def prepare(axis: Axes, theme: Theme, title: str, label: str = "") -> None:
    """Style an axis, and write its title and the name of its values."""
    style_axis(axis, theme)
    axis.set_title(one_line(title, 64), loc="left", color=theme.ink, fontsize=9.5)
    axis.set_ylabel(label, color=theme.pale, fontsize=8)


def number_levels(axis: Axes, theme: Theme, label: str = "levels passed") -> None:
    """Number the horizontal axis by levels, or by states: 0 before the first level, then after each."""
    axis.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axis.set_xlabel(label, color=theme.pale, fontsize=8)


def add_legend(axis: Axes, theme: Theme) -> None:
    """Draw a legend where the fewest points are."""
    axis.legend(fontsize=7.5, frameon=False, labelcolor=theme.ink)


def heat(theme: Theme) -> LinearSegmentedColormap:
    """Return the colors of a heat map; cells without a value are transparent."""
    return LinearSegmentedColormap.from_list("heat", [theme.low, theme.high])


def add_bar(figure: Figure, axes: Axes | Sequence[Axes], image: AxesImage, theme: Theme, label: str) -> None:
    """Draw the scale of a heat map beside its axis, or beside all axes that share it."""
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=35, pad=0.02)
    bar.ax.tick_params(length=0, labelsize=7, labelcolor=theme.pale)
    bar.outline.set_visible(False)  # type: ignore[operator] - the stubs call it a method
    bar.set_label(label, color=theme.pale, fontsize=8)


def draw_band(axis: Axes, values_SX: np.ndarray, color: str, label: str) -> None:
    """Draw the median of each row as a line over the rows, in a band from the 5th to the 95th percentile."""
    low, middle, high = np.nanpercentile(values_SX, [5, 50, 95], axis=1)
    places = np.arange(len(values_SX))
    axis.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
    axis.plot(places, middle, color=color, linewidth=1.4, marker="o" if len(places) < 30 else "", ms=3, label=label)


def tiled(tiles_RQHWC: np.ndarray, gap: float) -> np.ndarray:
    """Return rows and columns of tiles as one image, with one pixel of the value `gap` between them."""
    padded = np.pad(tiles_RQHWC, ((0, 0), (0, 0), (1, 0), (1, 0), (0, 0)), constant_values=gap)
    rows, columns, height, width, colors = padded.shape
    image = padded.transpose(0, 2, 1, 3, 4).reshape(rows * height, columns * width, colors)
    return image[1:, 1:]
