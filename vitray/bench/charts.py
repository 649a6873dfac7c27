"""The charts of the benchmarks."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitray.pages.plotting import LIGHT, new_figure, style_axis


def draw_bars(bars: Mapping[str, float], unit: str, title: str) -> Figure:
    """Draw {name: value} as horizontal bars, each with its value."""
    figure, (axis,) = _new_axes((7, 0.5 * len(bars) + 1.4), title)
    drawn = axis.barh(list(bars), list(bars.values()), color=LIGHT.series[0], height=0.7)
    axis.bar_label(drawn, fmt="%.0f", padding=3, color=LIGHT.ink, fontsize=8)
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.tick_params(axis="y", labelcolor=LIGHT.ink)
    axis.set_xlabel(unit, color=LIGHT.pale, fontsize=8)
    axis.margins(x=0.12)
    return figure


def draw_ratios(rows: Sequence[Mapping[str, Any]], variants: Sequence[str], title: str) -> Figure:
    """Draw the speed of each variant over the batch size, a panel for each model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = _new_axes((5.5 * len(models), 4.2), title, len(models))
    for axis, model in zip(axes, models, strict=True):
        panel = [row for row in rows if row["model"] == model]
        for variant, marker, color in zip(variants, ("s-", "^-", "o-"), LIGHT.series, strict=False):
            ratios = [row[f"{variant}_over_seq"] for row in panel]
            errors = [row[f"{variant}_over_seq_spread"] for row in panel]
            axis.errorbar(range(len(panel)), ratios, yerr=errors, fmt=marker, capsize=3, label=variant, color=color)
        axis.axhline(1, color=LIGHT.ink, linewidth=1)
        axis.set_title(model, loc="left", color=LIGHT.ink, fontsize=10)
        axis.set_xticks(range(len(panel)), [str(row["batch"]) for row in panel])
        axis.set_xlabel("images in a batch", color=LIGHT.pale, fontsize=8)
    axes[0].set_ylabel("images/s relative to sequential", color=LIGHT.pale, fontsize=8)
    axes[0].legend(fontsize=8, frameon=False, labelcolor=LIGHT.ink)
    return figure


def draw_costs(rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, str], title: str) -> Figure:
    """Draw {kind of cost: its name} as groups of bars, a bar for each fine-tuning mode."""
    figure, (axis,) = _new_axes((1.6 * len(kinds) + 2, 4.2), title)
    width = 0.8 / len(rows)
    for index, row in enumerate(rows):
        places = [kind + (index - (len(rows) - 1) / 2) * width for kind in range(len(kinds))]
        color = LIGHT.series[index % len(LIGHT.series)]
        axis.bar(places, [row[f"{kind}_ratio"] for kind in kinds], width, label=row["mode"], color=color)
    axis.axhline(1, color=LIGHT.ink, linewidth=1)
    axis.set_xticks(range(len(kinds)), list(kinds.values()), color=LIGHT.ink)
    axis.set_ylabel(f"relative to {rows[0]['mode']}", color=LIGHT.pale, fontsize=8)
    axis.grid(False, axis="x")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False, labelcolor=LIGHT.ink)
    return figure


def _new_axes(inches: tuple[float, float], title: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    figure = new_figure(LIGHT, *inches)
    figure.suptitle(title, fontsize=8, color=LIGHT.pale)
    axes = [figure.add_subplot(1, panels, place + 1) for place in range(panels)]
    for axis in axes:
        style_axis(axis, LIGHT)
    return figure, axes
