"""The report as a folder: index.html, which contains its pictures, the pictures as files, and results.csv."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from vitray.config.parsing import parse_yaml
from vitray.errors import ConfigError
from vitray.pages.files import FORMULA_STARTS, csv_text
from vitray.pages.plotting import DARK, LIGHT, to_png
from vitray.pages.rendering import Picture
from vitray.sweeps.report.comparisons import draw_cost, draw_differences, draw_groups, draw_maps
from vitray.sweeps.report.drawing import Drawing
from vitray.sweeps.report.groups import Results, results_of
from vitray.sweeps.report.page import render
from vitray.sweeps.report.trends import draw_blocks, draw_branches, draw_curves, draw_rates
from vitray.sweeps.report.trials import COSTS, Measure, SweepResult, best_first
from vitray.system import storage

FIELDS = ("name", "state", "reason", "goal", *(cost.field for cost in COSTS), "command", "run_url")


def write_report(sweep: SweepResult, folder: Path) -> list[Path]:
    """Write or replace the report of a sweep and return its files, the page last.

    Files are replaced whole, so that a reader sees the old or the new one. Equal sweeps write equal bytes.
    """
    results = results_of(sweep)
    files: dict[str, bytes] = {}
    pictures: dict[str, list[Picture]] = {}
    for section, drawings in drawings_of(results).items():
        for drawing in drawings:
            light, dark = to_png(drawing.draw(LIGHT)), to_png(drawing.draw(DARK))
            files |= {f"{drawing.name}.png": light, f"{drawing.name}-dark.png": dark}
            pictures.setdefault(section, []).append(Picture(drawing.alt, drawing.caption, light, dark))
    # A reason may quote bytes that are not valid text.
    files["results.csv"] = table_of(sweep).encode(errors="backslashreplace")
    files["index.html"] = render(results, pictures, files["results.csv"]).encode(errors="backslashreplace")
    for name, content in files.items():
        storage.write_bytes(str(folder / name), content)
    return [folder / name for name in files]


def drawings_of(results: Results) -> dict[str, list[Drawing]]:
    """Return {section of the page: its drawings}, without empty sections."""
    candidates = {
        "groups": [draw_groups(results)],
        "differences": [draw_differences(results)],
        "depth": [*draw_blocks(results), draw_branches(results), *draw_maps(results)],
        "lr": [draw_rates(results)],
        "curves": [draw_curves(results, key) for key in dict.fromkeys((results.sweep.goal, "train/loss"))],
        "cost": [draw_cost(results, cost) for cost in COSTS],
    }
    drawn = {section: [each for each in drawings if each is not None] for section, drawings in candidates.items()}
    return {section: drawings for section, drawings in drawn.items() if drawings}


def table_of(sweep: SweepResult) -> str:
    """Return every trial as CSV, the best first, with settings spelled as on the command line.

    An absent setting is an empty cell.
    """
    trials = best_first(sweep.trials, Measure(sweep.goal, sweep.mode))
    paths = list(dict.fromkeys(path for trial in trials for path in trial.settings))
    rows: list[list[Any]] = [[*FIELDS[:4], *paths, *FIELDS[4:]]]
    for trial in trials:
        settings = [_spelled(trial.settings[path]) if path in trial.settings else "" for path in paths]
        fields = ["" if (value := getattr(trial, field)) is None else value for field in FIELDS]
        rows.append([*fields[:4], *settings, *fields[4:]])
    return csv_text(rows)


def _spelled(value: Any) -> str:
    """A value as an override spells it."""
    if not isinstance(value, str):
        return json.dumps(value, default=str)
    with suppress(ConfigError):
        is_plain = value.isprintable() and not value.startswith(FORMULA_STARTS)
        if is_plain and parse_yaml(value, "")[0] == value:
            return value
    return yaml.safe_dump(value, default_style='"', width=math.inf).rstrip("\n")
