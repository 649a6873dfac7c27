"""docs/faults.md from the cells' JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fault_subjects import LOOPS, ROOT, SCRIPTS, SUBJECTS, Settings

CELLS, PAGE = SCRIPTS / "cells", ROOT / "docs" / "faults.md"
# {(subject, fault): the cell's JSON}
Cells = Mapping[tuple[str, str], Mapping[str, Any]]

FAULT_TEXTS = {
    "none": ("No fault", "The same run a second time: whether a stack repeats itself at all."),
    "sigkill_driver": (
        "SIGKILL of the driver",
        "The launcher is killed at step 104 (torchrun, `composer`; `vitray train`).",
    ),
    "sigkill_worker": ("SIGKILL of a worker", "The worker of the highest rank is killed at step 104."),
    "sigterm": ("SIGTERM", "The launcher gets SIGTERM at step 104; all processes are killed 30 s later."),
    "checkpoint": (
        "A kill in the middle of a checkpoint",
        "All processes are killed as soon as the first file of a checkpoint changes.",
    ),
    "elastic": ("2, 1, 2 workers", "SIGTERM at step 72, one worker to step 136, SIGTERM, two workers to the end."),
    "disk_full": ("A full disk", "The disk of the output is full from step 104, for 45 s or until the run ends."),
}
# Of the loops around `vitray.Loader`; what else fails is the framework's to survive.
LOOP_FAULTS = ("none", "sigkill_driver", "sigkill_worker", "elastic")
COLUMNS = (
    "",
    "images repeated",
    "images skipped",
    "steps on other images",
    "steps lost",
    "final weights",
    "pause, s",
    "a person",
    "MLflow",
)


def read_cells() -> Cells:
    """Return the measured cells."""
    cells = [json.loads(path.read_text()) for path in sorted(CELLS.glob("*.json"))]
    return {(cell["subject"], cell["fault"]): cell for cell in cells}


def faults_page(cells: Cells) -> str:
    """Return the page."""
    settings = Settings()
    parts = [HEAD.format(summary=_summary(cells), steps=settings.steps, **settings._asdict())]
    parts.append(_subjects(cells))
    for fault, (title, text) in FAULT_TEXTS.items():
        parts.append(f"## {title}\n\n{text}\n\n{_table(cells, fault)}\n")
        parts += [f"{line}\n" for line in (best_line(cells, fault), _notes(cells, fault)) if line]
    parts.append(_loops(cells))
    parts.append(_commands(cells))
    return "\n".join(parts)


def _summary(cells: Cells) -> str:
    """Return a row for each measured stack, over all faults."""
    lines = ["|  | all images | equal weights | steps lost | started again by a person | one whole run in MLflow |"]
    lines.append("|---|---|---|---|---|---|")
    for name, subject in SUBJECTS.items():
        own = [cell for (each, fault), cell in cells.items() if each == name and fault != "none"]
        if own:
            lines.append(f"| {' | '.join([subject.title, *summary_of(own)])} |")
    return "\n".join(lines)


def summary_of(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of a stack's faults, without its name."""
    exact = sum(not cell["repeated"] and not cell["skipped"] for cell in cells)
    equal = sum(cell["weights_difference"] == 0 for cell in cells)
    again = sum(len(cell["commands"]) - 1 for cell in cells)
    whole = sum(is_whole(cell["tracking"]) for cell in cells)
    lost = sum(cell["lost"] for cell in cells)
    return [
        f"{exact} of {len(cells)}",
        f"{equal} of {len(cells)}",
        str(lost),
        f"{again} times",
        f"{whole} of {len(cells)}",
    ]


def is_whole(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether tracking has one finished run with every step once."""
    if len(runs) != 1 or runs[0]["status"] != "FINISHED" or runs[0]["twice"] or runs[0]["missing"]:
        return False
    return runs[0]["first"] is not None and runs[0]["last"] - runs[0]["first"] + 1 == Settings().steps


def _subjects(cells: Cells) -> str:
    lines = ["| stack | versions | saves and resumes |", "|---|---|---|"]
    for name, subject in SUBJECTS.items():
        versions = next((cell["versions"] for (each, _), cell in cells.items() if each == name), None)
        stated = ", ".join(f"{package} {version}" for package, version in versions.items()) if versions else "-"
        lines.append(f"| {subject.title} | {stated} | {subject.saves} |")
    places = sorted({f"{cell['machine']}, {cell['date']}" for cell in cells.values()})
    return "\n".join(lines) + (f"\n\nMeasured on {'; '.join(places)}.\n" if places else "\n")


def _table(cells: Cells, fault: str) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, subject in SUBJECTS.items():
        cell = cells.get((name, fault))
        values = ["not measured", *[""] * (len(COLUMNS) - 2)] if cell is None else row_of(cell)
        lines.append(f"| {' | '.join([subject.title, *values])} |")
    return "\n".join(lines) + "\n"


def row_of(cell: Mapping[str, Any]) -> list[str]:
    """Return the columns of a cell, without the name of the stack."""
    difference = cell["weights_difference"]
    return [
        f"{cell['repeated']:,}",
        f"{cell['skipped']:,}",
        f"{cell['other_steps']:,}",
        f"{cell['lost']:,}",
        "equal, bit for bit" if difference == 0 else f"differ by up to {difference:.1g}",
        "-" if cell["pause"] is None else f"{cell['pause']:.1f}",
        person_text(cell),
        tracking_text(cell["tracking"]),
    ]


def person_text(cell: Mapping[str, Any]) -> str:
    """Return how often a person had to act."""
    again = len(cell["commands"]) - 1
    by_hand = sum("by hand" in note or "killed" in note for note in cell["notes"])
    parts = [f"started it again{'' if again == 1 else f' {again} times'}"] if again else []
    return ", ".join(parts + (["ended or removed something"] if by_hand else [])) or "no"


def tracking_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return what tracking shows, in words."""
    if len(runs) == 1 and runs[0]["status"] is None:
        epochs = ", ".join(map(str, runs[0]["epochs"]))
        return f"summary.csv: epochs {epochs}" if epochs else "no summary.csv"
    parts = []
    for run in runs:
        steps = "no step" if run["first"] is None else f"steps {run['first']} to {run['last']}"
        flaws = [f"{run[flaw]} {flaw}" for flaw in ("twice", "missing") if run[flaw]]
        parts.append(f"{run['status']}: {', '.join([steps, *flaws])}")
    return "; ".join(parts) or "no run"


def best_line(cells: Cells, fault: str) -> str:
    """Return which measured stacks lost the fewest steps and kept all images; pauses are of several machines."""
    here = {SUBJECTS[name].title: cell for (name, each), cell in cells.items() if each == fault and name in SUBJECTS}
    if fault == "none" or len(here) < 2:
        return ""
    fewest = min(cell["lost"] for cell in here.values())
    exact = [title for title, cell in here.items() if not cell["repeated"] and not cell["skipped"]]
    lost = [title for title, cell in here.items() if cell["lost"] == fewest]
    text = f"Fewest steps lost ({fewest}): {', '.join(lost)}."
    return f"{text} Each image as often as without the fault: {', '.join(exact) or 'none'}."


def _loops(cells: Cells) -> str:
    """Return the table of the loops around `vitray.Loader`."""
    parts = [LOOPS_HEAD, f"| loop | {' | '.join(FAULT_TEXTS[fault][0] for fault in LOOP_FAULTS)} |"]
    parts.append("|---" * (len(LOOP_FAULTS) + 1) + "|")
    for name, loop in LOOPS.items():
        texts = [loop_text(cells, name, fault) for fault in LOOP_FAULTS]
        parts.append(f"| [{loop.title}]({LOOPS_FOLDER}/{loop.title}): {loop.saves} | {' | '.join(texts)} |")
    return "\n".join(parts) + "\n"


def has_cell(name: str, fault: str) -> bool:
    """Return whether a loop around the loader is measured with a fault."""
    return fault in LOOP_FAULTS and not (fault == "elastic" and LOOPS[name].is_alone)


def loop_text(cells: Cells, name: str, fault: str) -> str:
    """Return a cell of a loop: its images, its weights."""
    cell = cells.get((name, fault))
    if cell is None:
        return "not measured" if has_cell(name, fault) else "-"
    images = f"{cell['repeated']:,} repeated, {cell['skipped']:,} skipped"
    if cell["other_steps"]:
        images += f", {cell['other_steps']:,} steps on others"
    return f"{images}; weights {row_of(cell)[4]}"


def _notes(cells: Cells, fault: str) -> str:
    lines = [
        f"- {subject.title}: {'; '.join(cells[name, fault]['notes'])}."
        for name, subject in SUBJECTS.items()
        if (name, fault) in cells and cells[name, fault]["notes"]
    ]
    return "\n".join(lines)


def _commands(cells: Cells) -> str:
    """Return the first command of each stack, and the one after the death of its driver, where they differ."""
    parts = ["## Commands\n\nThe same command starts and resumes, where there is one.\n"]
    for name, subject in SUBJECTS.items():
        commands: list[str] = []
        for (each, fault), cell in cells.items():
            if each == name and fault in ("none", "sigkill_driver"):
                commands += [command for command in cell["commands"] if command not in commands]
        if commands:
            parts.append(f"{subject.title}:\n\n```text\n" + "\n".join(commands) + "\n```\n")
    return "\n".join(parts)


LOOPS_FOLDER = "../experiments/loops"
LOOPS_HEAD = """## The loader in loops of others

The same faults in loops around `vitray.Loader`: images that went into the final weights more or less often than
without the fault, and these weights. Each framework saves and resumes by its own means, and the loader's state with it.
timm's train.py cannot distribute to CPUs: it trains with one worker.
"""
HEAD = """# What a fault costs

What happens to a training run after a fault, in vitray and in other stacks that people use, and how to measure the
cells that say "not measured". Over all faults of this page:

{summary}

"All images": the faults after which each image is used as often as without the fault. The other columns are explained
below.

`python experiments/faults/measure_faults.py` makes this page. It trains the same network (width 64, 6 blocks, 2
heads, patch 8) on the same {images:,} synthetic images of 32 px: {epochs} epochs, {steps} steps of {batch} images,
{workers} workers over gloo, with random crops and flips. Each stack has an environment of its own, and saves and
resumes as its documentation recommends. A step takes at least {pace} s: otherwise a run would end before some stacks
notice a signal. Other work may use the same cores, so seconds are rough; images, steps and weights are exact. Cells
without a JSON in `experiments/faults/cells` are not measured; the command measures the missing ones.

- **Images repeated, skipped**: images that the whole run uses more often, or less often, than the undisturbed run;
  steps that are undone later do not count. **Steps on other images**: steps whose images are not those of the same step
  of the undisturbed run.
- **Steps lost**: taken back, and so computed again.
- **Final weights**: compared with the undisturbed run of the same stack.
- **Pause**: the longest time without a step after the fault. A person who starts the run again does so at once.
- **A person**: what someone had to do. A person ends processes that outlive their launcher by 5 s and runs that take
  no step for 150 s, and removes a checkpoint that cannot be loaded.
- **MLflow**: the runs that tracking shows, each with its status. timm's train.py has a summary.csv instead.

timm's package lacks train.py: clone timm at the same version, and pass `--timm CLONE/train.py`.
"""
