"""A report as a folder: index.html, which needs nothing else, its pictures, and every trial in results.csv."""

import csv
import io
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from vitray import storage
from vitray.config.parsing import parse_yaml
from vitray.errors import ConfigError
from vitray.sweep.report.comparisons import COSTS, draw_cost, draw_differences, draw_groups, draw_maps
from vitray.sweep.report.drawing import DARK, LIGHT, Drawing, png
from vitray.sweep.report.groups import Results, results_of
from vitray.sweep.report.page import Picture, render
from vitray.sweep.report.trends import draw_blocks, draw_branches, draw_curves, draw_rates
from vitray.sweep.report.trials import Sweep, best_first

FIELDS = ("name", "state", "reason", "goal", *(cost.field for cost in COSTS), "command", "run_url")


def write_report(sweep: Sweep, folder: Path) -> list[Path]:
    """Write or rewrite the report of a sweep; what is read meanwhile is a whole file, the old or the new one.

    Equal sweeps write equal bytes. Drawing takes seconds; the page comes last.
    """
    results = results_of(sweep)
    files: dict[str, bytes] = {}
    pictures: dict[str, list[Picture]] = {}
    for section, drawings in drawings_of(results).items():
        for drawing in drawings:
            light, dark = png(drawing.draw(LIGHT)), png(drawing.draw(DARK))
            files |= {f"{drawing.name}.png": light, f"{drawing.name}-dark.png": dark}
            pictures.setdefault(section, []).append(Picture(drawing.alt, drawing.caption, light, dark))
    # A reason may quote bytes that are no text.
    files["results.csv"] = table_of(sweep).encode(errors="backslashreplace")
    files["index.html"] = render(results, pictures, files["results.csv"]).encode(errors="backslashreplace")
    for name, content in files.items():
        storage.write_bytes(str(folder / name), content)
    return [folder / name for name in files]


def drawings_of(results: Results) -> dict[str, list[Drawing]]:
    """{section of the page: what there is to draw in it}."""
    found = {
        "groups": [draw_groups(results)],
        "differences": [draw_differences(results)],
        "depth": [*draw_blocks(results), draw_branches(results), *draw_maps(results)],
        "lr": [draw_rates(results)],
        "curves": [draw_curves(results, key) for key in dict.fromkeys((results.sweep.goal, "train/loss"))],
        "cost": [draw_cost(results, cost) for cost in COSTS],
    }
    drawn = {section: [each for each in drawings if each is not None] for section, drawings in found.items()}
    return {section: drawings for section, drawings in drawn.items() if drawings}


def table_of(sweep: Sweep) -> str:
    """Every trial as CSV, best first: its fields, and its settings spelled as on the command line.

    A setting that a trial does not have is an empty cell.
    """
    trials = best_first(sweep.trials, results_of(sweep).measure)
    paths = list(dict.fromkeys(path for trial in trials for path in trial.settings))
    told = io.StringIO()
    writer = csv.writer(told)
    writer.writerow([*FIELDS[:4], *paths, *FIELDS[4:]])
    for trial in trials:
        settings = [_word(trial.settings[path]) if path in trial.settings else "" for path in paths]
        fields = ["" if (value := getattr(trial, field)) is None else value for field in FIELDS]
        writer.writerow([*fields[:4], *settings, *fields[4:]])
    return told.getvalue()


def _word(value: Any) -> str:
    """A value as `setting=value` spells it."""
    if not isinstance(value, str):
        return json.dumps(value, default=str)
    with suppress(ConfigError):
        if value.isprintable() and parse_yaml(value, "")[0] == value:
            return value
    return yaml.safe_dump(value, default_style='"', width=math.inf).rstrip("\n")
