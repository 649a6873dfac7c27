"""Charts of the benchmarks: bars, speed over batch sizes, and costs of fine-tuning modes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vitray.plotting import LIGHT, new_figure, style_axis, to_png


def draw_bars(path: Path, bars: Mapping[str, float], unit: str, title: str) -> None:
    """Draw {name: value} as horizontal bars, each with its value."""
    figure = new_figure(LIGHT, 7, 0.5 * len(bars) + 1.4)
    axis = figure.add_subplot()
    style_axis(axis, LIGHT)
    drawn = axis.barh(list(bars), list(bars.values()), color=LIGHT.series[0], height=0.7)
    axis.bar_label(drawn, fmt="%.0f", padding=3, color=LIGHT.ink, fontsize=8)
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.tick_params(axis="y", labelcolor=LIGHT.ink)
    axis.set_xlabel(unit, color=LIGHT.pale, fontsize=8)
    axis.margins(x=0.12)
    _save(figure, path, title)


def draw_ratios(path: Path, rows: Sequence[Mapping[str, Any]], variants: Sequence[str], title: str) -> None:
    """Draw the speed of each variant over the batch size, a panel for each model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = new_figure(LIGHT, 5.5 * len(models), 4.2)
    for place, model in enumerate(models):
        axis = figure.add_subplot(1, len(models), place + 1)
        style_axis(axis, LIGHT)
        panel = [row for row in rows if row["model"] == model]
        for variant, marker, colour in zip(variants, ("s-", "^-", "o-"), LIGHT.series, strict=False):
            ratios = [row[f"{variant}_over_seq"] for row in panel]
            errors = [row[f"{variant}_over_seq_spread"] for row in panel]
            axis.errorbar(range(len(panel)), ratios, yerr=errors, fmt=marker, capsize=3, label=variant, color=colour)
        axis.axhline(1, color=LIGHT.ink, linewidth=1)
        axis.set_title(model, loc="left", color=LIGHT.ink, fontsize=10)
        axis.set_xticks(range(len(panel)), [str(row["batch"]) for row in panel])
        axis.set_xlabel("images in a batch", color=LIGHT.pale, fontsize=8)
        if place == 0:
            axis.set_ylabel("images/s relative to sequential", color=LIGHT.pale, fontsize=8)
            axis.legend(fontsize=8, frameon=False, labelcolor=LIGHT.ink)
    _save(figure, path, title)


def draw_costs(path: Path, rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, str], title: str) -> None:
    """Draw {kind of cost: its name} as groups of bars, a bar for each fine-tuning mode."""
    figure = new_figure(LIGHT, 1.6 * len(kinds) + 2, 4.2)
    axis = figure.add_subplot()
    style_axis(axis, LIGHT)
    width = 0.8 / len(rows)
    for index, row in enumerate(rows):
        places = [kind + (index - (len(rows) - 1) / 2) * width for kind in range(len(kinds))]
        colour = LIGHT.series[index % len(LIGHT.series)]
        axis.bar(places, [row[f"{kind}_ratio"] for kind in kinds], width, label=row["mode"], color=colour)
    axis.axhline(1, color=LIGHT.ink, linewidth=1)
    axis.set_xticks(range(len(kinds)), list(kinds.values()), color=LIGHT.ink)
    axis.set_ylabel(f"relative to {rows[0]['mode']}", color=LIGHT.pale, fontsize=8)
    axis.grid(False, axis="x")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False, labelcolor=LIGHT.ink)
    _save(figure, path, title)


def _save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=8, color=LIGHT.pale)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_png(figure))
