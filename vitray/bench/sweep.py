"""Runs of one sweep, against as many `vitray train`, and against as many calls of train() on one Ray.

The first unit is CPU-seconds of all processes, Ray's too: on a shared machine wall time says more about the neighbours.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from vitray import cluster, storage
from vitray.admission import Node
from vitray.bench.accounting import Cost, run_counted
from vitray.bench.calls import Span
from vitray.bench.measure import circumstances, draw_bars, progress, ratio_of, spread_of, write_csv
from vitray.config import ConfigError, Run, RunError, load_run
from vitray.search.driver import gpus_here, plan_sweep
from vitray.search.record import ended, read_record
from vitray.shards import open_dataset
from vitray.space import read_space

FIGURES = ("cpu", "wall", "beyond", "around")
ABOUT = """
CPU: user and system time of all processes, Ray's too. Beyond steps: what a run takes from its beginning to its end,
less the time of its steps; the mean of all. A trial, or a call, that follows another begins at the end of that one,
vitray train at the start of its process. Around runs: before the first and after the last. The overhead is what a trial
takes beyond its steps, less what a call does. Each turn has a tracking store of its own.
"""


class Settings(NamedTuple):
    """What is measured, and how long."""

    dataset: str
    model: str = "vit_u3x1_8"
    trials: int = 3
    steps: int = 60
    batch: int = 32
    image_size: int = 32
    cache: str = "none"
    rounds: int = 3
    out: Path = Path("bench_out")


class Job(NamedTuple):
    """The same runs for each variant, and a folder of its own, which holds its tracking store too."""

    folder: Path
    base: Run
    space: Path
    runs: list[Run]
    """Those of the sweep's trials."""

    def written(self, name: str, run: Run) -> str:
        """The recipe of a run, as a file."""
        path = self.folder / f"{name}.yaml"
        path.write_text(run.to_yaml())
        return str(path)

    def run(self, words: Sequence[str]) -> tuple[Any, Cost]:
        """Run a module with these words: the JSON of its last line, and what it cost."""
        told = {"MLFLOW_TRACKING_URI": f"sqlite:///{self.folder}/mlruns.db", "VITRAY_HOME": str(self.folder)}
        # At equal priority: Ray's workers run at nice 15 unless told, and a trial's driver is one of them.
        told["RAY_worker_niceness"] = "0"
        output, cost = run_counted([sys.executable, "-m", *words], os.environ | told)
        return json.loads(output.splitlines()[-1]), cost


class Turn(NamedTuple):
    """What all runs together took, once."""

    wall: float
    cpu: float
    seen: float
    """The part of the CPU time that is known from /proc alone."""
    beyond: float
    """Seconds that a run took beyond its steps, their mean."""
    around: float
    """Seconds before the first run and after the last."""


def measure_sweep(settings: Settings) -> dict[str, Any]:
    """Measure each variant in turns; print the table, write a CSV and a picture, return the rows."""
    if sys.platform != "linux":
        raise ConfigError(f"bench sweep: got {sys.platform}, wanted Linux, which tells what a process has started")
    if "RAY_ADDRESS" in os.environ:
        raise ConfigError("RAY_ADDRESS: wanted it unset: what a cluster that runs already does cannot be counted")
    if settings.trials < 2:
        raise ConfigError(f"--trials {settings.trials}: wanted 2 or more, which a sweep has to share Ray")
    base = recipe(settings)
    turns: dict[str, list[Turn]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="vitray-") as name:
        space = Path(name) / "space.yaml"
        space.write_text(f"space: {{seed: {{seeds: {settings.trials}}}}}\n")
        here = [Node(cpus=cluster.cpus_here(), gpus=gpus_here())]
        planned = plan_sweep(base, read_space(space), here)
        runs = [planned.base.replace(point.settings) for point in planned.points.values()]
        for number in range(settings.rounds):
            # The order turns round too: what comes first after a pause is not always the same.
            first = number % len(VARIANTS)
            for variant in [*VARIANTS][first:] + [*VARIANTS][:first]:
                progress(f"round {number + 1} of {settings.rounds}: {variant}")
                with tempfile.TemporaryDirectory(prefix="vitray-") as aside:
                    turns[variant].append(VARIANTS[variant](Job(Path(aside), base, space, runs)))
    return _report(settings, turns, planned.said)


def recipe(settings: Settings) -> Run:
    """The run of which a trial is made, with one evaluation, at its end."""
    dataset = open_dataset(settings.dataset)
    words = {
        "model.name": settings.model,
        "model.image_size": settings.image_size,
        "model.num_classes": len(dataset.classes),
        "data.url": storage.absolute(dataset.url),
        "data.cache": settings.cache,
        "optim.batch": settings.batch,
        "optim.duration": f"{settings.steps} steps",
        "optim.warmup": "0 steps",
        "evaluate.every": f"{settings.steps} steps",
        "checkpoint.every": f"{settings.steps} steps",
        "compute.workers": 1,
        "tracking.experiment": "bench",
    }
    return load_run(None, [f"{setting}={value}" for setting, value in words.items()])


# ---- one turn --------------------------------------------------------------------------------------------------------


def one_sweep(job: Job) -> Turn:
    """All as trials of one sweep."""
    words = ["pipelines.sweep", job.written("base", job.base), str(job.space), "--name", "sweep", "--out"]
    result, cost = job.run([*words, str(job.folder), "--json"])
    if result["finished"] != len(job.runs):
        raise RunError(f"the sweep finished {result['finished']} of {len(job.runs)} trials")
    spans = []
    for index in range(len(job.runs)):
        home = str(job.folder / "sweep" / f"seed={index}")
        record, over = read_record(home), ended(home)
        assert record.began is not None, home
        assert record.ended is not None, home
        assert over is not None, home
        spans.append(Span(record.began, record.ended, over["seconds"]))
    return turn_of(cost, spans)


def separate_runs(job: Job) -> Turn:
    """Each by a `vitray train` of its own."""
    costs, beyond = [], []
    for index, run in enumerate(job.runs):
        words = ["pipelines.train", job.written(f"run{index}", run), "--name", f"run{index}", "--out"]
        result, cost = job.run([*words, str(job.folder), "--json"])
        costs.append(cost)
        beyond.append(cost.wall - result["seconds"])
    wall, cpu, seen = map(sum, zip(*costs, strict=True))
    return Turn(wall, cpu, seen, fmean(beyond), 0.0)


def calls_on_one_ray(job: Job) -> Turn:
    """Each by a call of train(), in one process, on one Ray."""
    words = ["vitray.bench.calls", str(job.folder)]
    result, cost = job.run([*words, *(job.written(f"run{index}", run) for index, run in enumerate(job.runs))])
    return turn_of(cost, [Span(*span) for span in result])


VARIANTS: dict[str, Callable[[Job], Turn]] = {
    "one sweep": one_sweep,
    "vitray train, each": separate_runs,
    "calls on one Ray": calls_on_one_ray,
}


def turn_of(cost: Cost, spans: Sequence[Span]) -> Turn:
    """A command and the runs in it."""
    around = cost.wall - (max(span.ended for span in spans) - min(span.began for span in spans))
    return Turn(*cost, beyond=fmean(beyond_steps(spans)), around=around)


def beyond_steps(spans: Sequence[Span]) -> list[float]:
    """For each run the seconds that it took beyond its steps: from when there was a place for it until its end.

    A place is free from the beginning, or since a run before it has ended: what passes until the next run begins there
    is part of what that one costs.
    """
    spans, ends = sorted(spans), sorted(span.ended for span in spans)
    places = sum(span.began < ends[0] for span in spans)
    free = [span.began for span in spans[:places]] + ends[: len(spans) - places]
    return [span.ended - since - span.training for span, since in zip(spans, free, strict=True)]


# ---- what is shown ---------------------------------------------------------------------------------------------------


def _report(settings: Settings, turns: dict[str, list[Turn]], said: str) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = f"{circumstances(device)}, Ray {version('ray')}"
    about = f"{settings.model}, {settings.image_size} px; runs of {settings.steps} steps of {settings.batch} images"
    sweep, separate, called = (turns[variant] for variant in VARIANTS)
    rows = [_row(variant, some) for variant, some in turns.items()]
    cpu = ratio_of([turn.cpu for turn in sweep], [turn.cpu for turn in separate])
    wall = ratio_of([turn.wall for turn in sweep], [turn.wall for turn in separate])
    overhead = spread_of([mine.beyond - bare.beyond for mine, bare in zip(sweep, called, strict=True)])
    print(f"{where}\n{about} and one evaluation; the sweep: {said}")
    print(f"{settings.rounds} interleaved rounds, median ± half the interquartile range\n")
    print(f"{'':<20}" + "".join(f"{name:>18}" for name in ("CPU s", "wall s", "beyond steps s", "around runs s")))
    for variant, some in turns.items():
        cells = [spread_of([getattr(turn, name) for turn in some]) for name in FIGURES]
        print(f"{variant:<20}" + "".join(f"{cell!s:>18}" for cell in cells))
    print(f"\none sweep over vitray train, each: {cpu} in CPU time, {wall} in wall time")
    print(f"overhead of a trial over a bare run: {overhead} s")
    print(ABOUT)
    stem = f"sweep_{settings.model}_{settings.image_size}"
    files = [settings.out / f"{stem}.csv", settings.out / f"{stem}.png"]
    write_csv(files[0], rows)
    draw_bars(
        files[1],
        list(turns),
        [row["cpu"] for row in rows],
        f"CPU seconds of {settings.trials} runs",
        f"{where}\n{about}",
    )
    print(f"wrote {files[0]} and {files[1]}")
    ratios = {"cpu_ratio": cpu.median, "wall_ratio": wall.median, "overhead": overhead.median}
    return {"circumstances": where, "about": about, "rows": rows, **ratios, "files": list(map(str, files))}


def _row(variant: str, turns: Sequence[Turn]) -> dict[str, Any]:
    row: dict[str, Any] = {"variant": variant}
    for name in Turn._fields:
        value = spread_of([getattr(turn, name) for turn in turns])
        row |= {name: round(value.median, 3), f"{name}_spread": round(value.spread, 3)}
    return row
