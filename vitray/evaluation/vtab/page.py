"""The folder of a VTAB-1k evaluation: index.html, results.json and two CSV files; the page is written last."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitray.evaluation.charts import Line, interval_chart
from vitray.evaluation.texts import aligned
from vitray.evaluation.vtab.scores import TASKS, NetworkResult, TaskResult, VtabEvaluation, deviation
from vitray.pages.files import csv_text, write_files
from vitray.pages.rendering import Column, PageSection, Table, render_page


def write_vtab(evaluation: VtabEvaluation, folder: str) -> str:
    """Write or replace the files of an evaluation and return the address of the page."""
    files = {
        "results.json": json.dumps(evaluation.flat(), indent=1) + "\n",
        "scores.csv": scores_csv(evaluation),
        "sweep.csv": sweep_csv(evaluation),
    }
    return write_files(folder, files, render(evaluation))


def scores_csv(evaluation: VtabEvaluation) -> str:
    """Return a row for each network and dataset."""
    rows: list[Sequence[Any]] = []
    for result in evaluation.results:
        for task in result.tasks:
            flat = {name: value for name, value in task.flat().items() if name != "seeds"}
            seeds = {f"top1_seed{seed}": score for seed, score in enumerate(task.scores)}
            values = {"model": result.name, **flat, **seeds, **result.setting._asdict()}
            rows += [list(values)] if not rows else []
            rows.append(list(values.values()))
    return csv_text(rows)


def sweep_csv(evaluation: VtabEvaluation) -> str:
    """Return a row for each network, setting and dataset."""
    rows: list[Sequence[Any]] = [["model", "lr", "steps", "dataset", "top1"]]
    for result in evaluation.results:
        for setting, scores in result.development.items():
            rows += [[result.name, *setting, dataset, score] for dataset, score in scores.items()]
    return csv_text(rows)


def vtab_text(evaluation: VtabEvaluation) -> str:
    """Return the tables for a terminal."""
    lines = [["", *(result.name for result in evaluation.results)]]
    for at, task in enumerate(evaluation.results[0].tasks):
        texts = [_task_text(result.tasks[at]) for result in evaluation.results]
        lines.append([f"{task.name} ({task.group}, {task.images:,} images)", *texts])
    for group in evaluation.results[0].mean.groups:
        lines.append([f"mean of {group}", *(_group_text(result, group) for result in evaluation.results)])
    count = len(evaluation.results[0].tasks)
    lines.append([f"mean of {count} datasets", *(_mean_text(result) for result in evaluation.results)])
    settings = [result.setting for result in evaluation.results]
    lines.append(["setting", *(f"lr {each.lr:g}, {each.steps:,} steps" for each in settings)])
    return f"{aligned(lines)}\n{_caveat(evaluation)}"


def render(evaluation: VtabEvaluation) -> str:
    """Return the page."""
    names = [result.name for result in evaluation.results]
    best = max(evaluation.results, key=lambda result: result.mean.mean)
    std = deviation([mean.mean for mean in best.seed_means])
    if len(names) > 1:
        beside = {result.name: _mean_text(result) for result in evaluation.results}
    else:
        beside = {group: _group_text(best, group) for group in best.mean.groups}
    seeds = f"{evaluation.seeds} seeds" if evaluation.seeds > 1 else "1 seed"
    values = {
        "title": f"{', '.join(names)} by VTAB-1k",
        "eyebrow": "Evaluation by the protocol of VTAB-1k",
        "heading": " against ".join(names) if len(names) < 3 else f"{len(names)} networks",
        "lede": f"Fine-tuned on 1,000 images of each dataset, {seeds}; one setting for all datasets.",
        "best": {
            "mean": f"{100 * best.mean.mean:.2f} %",
            "title": f"{'highest ' if len(names) > 1 else ''}mean top-1 of {len(best.tasks)} datasets",
            "name": best.name if len(names) > 1 else "",
            "spread": None if std is None else f"{100 * std:.2f}",
        },
        "seeds": seeds,
        "caveat": _caveat(evaluation),
        "beside": {name: text.replace(" ", "\u00a0") for name, text in beside.items()},
    }
    sections = [
        PageSection("datasets", "Datasets", _datasets(evaluation)),
        PageSection("groups", "Groups", _groups(evaluation)),
        PageSection("sweep", "The choice of the setting", _sweep(evaluation)),
        PageSection("origin", "How to reproduce", _origin(evaluation)),
    ]
    return render_page("vtab.html", values, sections)


def _datasets(evaluation: VtabEvaluation) -> Mapping[str, Any]:
    columns = [Column("dataset"), Column("group"), Column("classes", True), Column("test images", True)]
    columns += [Column(f"{result.name}, top-1", True) for result in evaluation.results]
    rows, lines = [], []
    for at, task in enumerate(evaluation.results[0].tasks):
        own = [result.tasks[at] for result in evaluation.results]
        rows.append([task.name, task.group, f"{task.classes:,}", f"{task.images:,}", *map(_task_text, own)])
        lines.append(Line(task.name, [each.interval for each in own]))
    left_out = sum(task.left_out for task in evaluation.results[0].tasks)
    names = [result.name for result in evaluation.results]
    caption = "The lines are 95 % intervals for the test images alone."
    return {
        "chart": interval_chart("Top-1 of each dataset", lines, names, "%", caption),
        "table": Table("Datasets", columns, rows),
        "left_out": f"{left_out:,}" if left_out else None,
    }


def _groups(evaluation: VtabEvaluation) -> Table:
    columns = [Column("group"), Column("datasets", True), *(Column(each.name, True) for each in evaluation.results)]
    tasks = evaluation.results[0].tasks
    rows = []
    for group in evaluation.results[0].mean.groups:
        texts = [_group_text(result, group) for result in evaluation.results]
        rows.append([group, str(sum(task.group == group for task in tasks)), *texts])
    rows.append(["all", str(len(tasks)), *(_mean_text(result) for result in evaluation.results)])
    return Table("Groups", columns, rows)


def _sweep(evaluation: VtabEvaluation) -> Table:
    names = [task.name for task in evaluation.results[0].tasks]
    columns = [Column("network"), Column("learning rate", True), Column("steps", True), Column("mean", True)]
    columns += [Column(name, True) for name in names]
    rows = []
    for result in evaluation.results:
        for setting, scores in sorted(result.development.items(), key=lambda pair: pair[0] != result.setting):
            mean = f"{np.mean(list(scores.values())):.1%}" + (" (chosen)" if setting == result.setting else "")
            cells = [f"{scores[name]:.1%}" for name in names]
            rows.append([result.name, f"{setting.lr:g}", f"{setting.steps:,}", mean, *cells])
    return Table("Sweep", columns, rows)


def _origin(evaluation: VtabEvaluation) -> Mapping[str, Any]:
    facts = {}
    for result in evaluation.results:
        facts[result.name] = f"{result.spec.url}: {result.spec.network}; weights {result.spec.identity}"
    for task in evaluation.results[0].tasks:
        facts[task.name] = f"{task.url}, {task.split}; identity {task.identity}"
    facts["settings"] = ", ".join(f"{name}={json.dumps(value)}" for name, value in evaluation.settings.items())
    return {"command": evaluation.command, "facts": facts}


# ---- numbers as text -------------------------------------------------------------------------------------------------


def _caveat(evaluation: VtabEvaluation) -> str:
    missing = evaluation.missing
    if not missing:
        return f"These are the {len(TASKS)} tasks of VTAB, by name."
    return f"Not the mean of VTAB: {len(missing)} of its {len(TASKS)} tasks are missing, by name."


def _task_text(task: TaskResult) -> str:
    interval = task.interval
    return f"{_text(interval.estimate, deviation(task.scores))} ({100 * interval.low:.2f} to {100 * interval.high:.2f})"


def _group_text(result: NetworkResult, group: str) -> str:
    return f"{_text(result.mean.groups[group], result.group_std(group))} %"


def _mean_text(result: NetworkResult) -> str:
    return f"{_text(result.mean.mean, deviation([mean.mean for mean in result.seed_means]))} %"


def _text(share: float, std: float | None) -> str:
    return f"{100 * share:.2f}" + ("" if std is None else f" ± {100 * std:.2f}")
