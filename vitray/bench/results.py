"""What a benchmark writes: its table as CSV and JSON with hardware and versions, and its chart."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitray.pages.files import csv_text
from vitray.pages.plotting import LIGHT, new_figure, style_axis, to_png
from vitray.system import host_facts


class Results:
    """The rows of a benchmark, with hardware and versions; saved after each row, since a long one may be stopped."""

    def __init__(self, path: Path, device: torch.device, about: Mapping[str, Any]) -> None:
        """`path` is that of the files, without a suffix."""
        self._path, self._device, self._about = path, device, about
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Save one more row."""
        self.rows.append(row)
        self._write_json({"rows": self.rows, "is_partial": True})

    def finish(self, more: Mapping[str, Any] | None = None, chart: Figure | None = None) -> dict[str, Any]:
        """Write all files, print their paths, and return all of the JSON; `more` enters it too."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        table = [names, *([row.get(name) for name in names] for row in self.rows)]
        files = [self._file("csv")]
        files[0].parent.mkdir(parents=True, exist_ok=True)
        files[0].write_text(csv_text(table), newline="")
        if chart is not None:
            files.append(self._file("png"))
            files[-1].write_bytes(to_png(chart))
        files.append(self._file("json"))
        record = self._write_json({**(more or {}), "rows": self.rows, "files": [str(file) for file in files]})
        print(f"\nwrote {', '.join(record['files'])}")
        return record

    def _file(self, suffix: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{suffix}")

    def _write_json(self, content: Mapping[str, Any]) -> dict[str, Any]:
        facts, is_gpu = host_facts.facts(), self._device.type == "cuda"
        record = {
            "device": self._device.type,
            "hardware": torch.cuda.get_device_name(self._device) if is_gpu else facts["hardware.cpu"],
            "device_bytes": torch.cuda.get_device_properties(self._device).total_memory if is_gpu else None,
            "threads": torch.get_num_threads(),
            "cores": facts["hardware.cores"],
            "versions": {name.removeprefix("version."): text for name, text in facts.items() if "version." in name},
            "commit": facts.get("git.commit"),
            **self._about,
            **content,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file("json").write_text(json.dumps(record, indent=1) + "\n")
        return record


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
