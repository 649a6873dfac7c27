"""The folder of a VTAB-1k evaluation: index.html, results.json and two CSV files; the page is written last."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitray.evaluation.report.charts import Line, interval_chart
from vitray.evaluation.report.texts import aligned
from vitray.pages.files import csv_text, list_of_files, write_files
from vitray.pages.markup import Column, Content, Html, command_box, fact_list, illustrated, joined, table, tag
from vitray.pages.shell import PageSection, html_page
from vitray.vtab.protocol import TASKS, Setting
from vitray.vtab.results import NetworkResult, TaskResult, VtabEvaluation, deviation

FILES = {
    "results.json": "all numbers of this page",
    "scores.csv": "a row for each network and dataset",
    "sweep.csv": "a row for each network, setting and dataset",
}


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
    lines.append(["setting", *(_setting_text(result.setting) for result in evaluation.results)])
    return f"{aligned(lines)}\n{_caveat(evaluation)}"


def render(evaluation: VtabEvaluation) -> str:
    """Return the page."""
    parts = [
        PageSection("datasets", "Datasets", _datasets(evaluation)),
        PageSection("groups", "Groups", _groups(evaluation)),
        PageSection("sweep", "The choice of the setting", _sweep(evaluation)),
        PageSection("origin", "How to reproduce", _origin(evaluation)),
    ]
    names = ", ".join(result.name for result in evaluation.results)
    return html_page(f"{names} by VTAB-1k", _headline(evaluation), parts, list_of_files(FILES))


def _headline(evaluation: VtabEvaluation) -> Html:
    best = max(evaluation.results, key=lambda result: result.mean.mean)
    count, names = len(best.tasks), [result.name for result in evaluation.results]
    label = f"{'highest ' if len(names) > 1 else ''}mean top-1 of {count} datasets"
    named = [tag("p", tag("strong", best.name))] if len(names) > 1 else []
    std = deviation([mean.mean for mean in best.seed_means])
    spread = [] if std is None else [tag("p", f"± {100 * std:.2f}, the standard deviation over {_seeds(evaluation)}.")]
    caveat = tag("p.pale", _caveat(evaluation))
    if len(names) > 1:
        beside = {result.name: _mean_text(result) for result in evaluation.results}
    else:
        beside = {group: _group_text(best, group) for group in best.mean.groups}
    lede = f"Fine-tuned on 1,000 images of each dataset, {_seeds(evaluation)}; one setting for all datasets."
    return tag(
        "header",
        tag("p.eyebrow", "Evaluation by the protocol of VTAB-1k"),
        tag("h1", " against ".join(names) if len(names) < 3 else f"{len(names)} networks"),
        tag("p.lede", lede),
        tag(
            "div.hero",
            tag("div", tag("p.big", f"{100 * best.mean.mean:.2f} %", tag("small", label)), *named, *spread, caveat),
            tag("div", fact_list({name: text.replace(" ", "\u00a0") for name, text in beside.items()})),
        ),
    )


def _datasets(evaluation: VtabEvaluation) -> Html:
    columns = [Column("dataset"), Column("group"), Column("classes", True), Column("test images", True)]
    columns += [Column(f"{result.name}, top-1", True) for result in evaluation.results]
    rows: list[list[Content]] = []
    for at, task in enumerate(evaluation.results[0].tasks):
        texts = [_task_text(result.tasks[at]) for result in evaluation.results]
        rows.append([task.name, task.group, f"{task.classes:,}", f"{task.images:,}", *texts])
    prose = f"After ±: the standard deviation over {_seeds(evaluation)}. In brackets: 95 % intervals for the images."
    left_out = sum(task.left_out for task in evaluation.results[0].tasks)
    note = tag("p", f"{left_out:,} test images cannot be decoded and do not count.") if left_out else None
    names = [result.name for result in evaluation.results]
    lines = [
        Line(name, [result.tasks[at].interval for result in evaluation.results])
        for at, name in enumerate(task.name for task in evaluation.results[0].tasks)
    ]
    caption = "The lines are 95 % intervals for the test images alone."
    chart = interval_chart("Top-1 of each dataset", lines, names, "%", caption).picture()
    return joined(illustrated([prose], [chart]), table("Datasets", columns, rows), note)


def _groups(evaluation: VtabEvaluation) -> Html:
    columns = [Column("group"), Column("datasets", True), *(Column(each.name, True) for each in evaluation.results)]
    tasks = evaluation.results[0].tasks
    rows: list[list[Content]] = []
    for group in evaluation.results[0].mean.groups:
        texts = [_group_text(result, group) for result in evaluation.results]
        rows.append([group, str(sum(task.group == group for task in tasks)), *texts])
    rows.append(["all", str(len(tasks)), *(_mean_text(result) for result in evaluation.results)])
    prose = "The mean of all is over datasets, not over groups. After ±: its standard deviation over the seeds."
    return joined(tag("p", prose), table("Groups", columns, rows))


def _sweep(evaluation: VtabEvaluation) -> Html:
    names = [task.name for task in evaluation.results[0].tasks]
    columns = [Column("network"), Column("learning rate", True), Column("steps", True), Column("mean", True)]
    columns += [Column(name, True) for name in names]
    rows: list[list[Content]] = []
    for result in evaluation.results:
        for setting, scores in sorted(result.development.items(), key=lambda pair: pair[0] != result.setting):
            mean = f"{np.mean(list(scores.values())):.1%}" + (" (chosen)" if setting == result.setting else "")
            cells = [f"{scores[name]:.1%}" for name in names]
            rows.append([result.name, f"{setting.lr:g}", f"{setting.steps:,}", mean, *cells])
    prose = (
        "Top-1 on 200 images, after training on 800 others, seed 0. The setting with the highest mean is used for all"
        " datasets of a network; its final training has all 1,000."
    )
    return joined(tag("p", prose), table("Sweep", columns, rows))


def _origin(evaluation: VtabEvaluation) -> Html:
    facts: dict[str, Content] = {}
    for result in evaluation.results:
        facts[result.name] = f"{result.spec.url}: {result.spec.network}; weights {result.spec.identity}"
    for task in evaluation.results[0].tasks:
        facts[task.name] = f"{task.url}, {task.split}; identity {task.identity}"
    facts["settings"] = ", ".join(f"{name}={json.dumps(value)}" for name, value in evaluation.settings.items())
    return joined(command_box(evaluation.command), fact_list(facts))


# ---- numbers as text -------------------------------------------------------------------------------------------------


def _seeds(evaluation: VtabEvaluation) -> str:
    return f"{evaluation.seeds} seeds" if evaluation.seeds > 1 else "1 seed"


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


def _setting_text(setting: Setting) -> str:
    return f"lr {setting.lr:g}, {setting.steps:,} steps"
