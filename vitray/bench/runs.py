"""Whole runs, turn by turn: `vitray train`, and a loop around a DataLoader with the same decode and no Ray.

Each is begun once, and then paused with all its processes whenever it is not its turn: what slows this machine for a
while meets both, and neither pays for the other's processes.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader

from vitray.augment.batch import normalised
from vitray.bench.ingest.pipelines import Batches
from vitray.bench.ingest.pipelines import ours as decode_ours
from vitray.bench.measure import circumstances, progress, ratio_of, spread_of, write_csv
from vitray.bench.train import Settings, bare_step, mode, recipe
from vitray.config import ConfigError, Run, RunError, load_run
from vitray.shards import open_dataset
from vitray.stream import Stream

# Seconds of a turn that count, in which Ray does what it does every few seconds; and those before them, in which its
# many processes make up for what they have missed, all at once.
SECONDS, SETTLES = 10.0, 3.0
# Seconds that a start may take.
PATIENCE = 600.0


class Point(NamedTuple):
    """A step that was done, and when by the clock."""

    at: float
    step: int


Points = Callable[[], list[Point]]


class Turn(NamedTuple):
    """When a run was not paused."""

    began: float
    ended: float


class Racer:
    """A run that works in turns, and says in a file how far it is."""

    def __init__(self, words: Sequence[str], more: dict[str, str], told: Path, points: Points) -> None:
        """Begin a module of Python with these words, and this in its environment; `told` takes what it prints."""
        self.points = points
        self.turns: list[Turn] = []
        self._began = time.time()
        with told.open("w") as output:
            self.process = subprocess.Popen([sys.executable, "-m", *words], stdout=output, env=os.environ | more)

    def start(self) -> None:
        """Wait until it has told of steps, and pause it."""
        until = time.monotonic() + PATIENCE
        while len(self.points()) < 2:
            if self.process.poll() is not None or time.monotonic() > until:
                raise RunError(f"{self.process.args}: no step within {PATIENCE:g} s, or an end before it")
            time.sleep(0.5)
        self.pause()

    def work(self, seconds: float) -> None:
        """Let it go on: two turns, of which the second lasts so long and counts."""
        self._began = time.time()
        self._signal(signal.SIGCONT)
        time.sleep(SETTLES)
        self.turns.append(Turn(self._began, time.time()))
        self._began = self.turns[-1].ended
        time.sleep(seconds)
        self.pause()

    def pause(self) -> None:
        """Hold all its processes, those too that are born meanwhile."""
        self._signal(signal.SIGSTOP)
        self.turns.append(Turn(self._began, time.time()))

    def end(self) -> None:
        """Tell it to end, and wait until it has."""
        self.process.terminate()
        self._signal(signal.SIGCONT)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        seen: set[int] = set()
        while new := {process.pid for process in _tree(self.process.pid)} - seen:
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            seen |= new


def _tree(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def speeds(points: Sequence[Point], turns: Sequence[Turn]) -> list[float]:
    """Steps a second of each turn; between two points it went on evenly, and not at all between two turns."""
    began, ended = np.array(turns).T
    # Working time before each turn, and with it before each point.
    before = np.concatenate([[0.0], np.cumsum(ended - began)])
    at, steps = np.array(points, float).T
    turn = np.clip(np.searchsorted(began, at, side="right") - 1, 0, len(turns) - 1)
    worked = before[turn] + np.clip(at - began[turn], 0, (ended - began)[turn])
    done = np.interp(before, worked, steps)
    return list(np.diff(done) / np.diff(before))


def measure_runs(settings: Settings, url: str) -> dict[str, Any]:
    """Measure, print the figures, write a CSV, and return the row."""
    if "RAY_ADDRESS" in os.environ:
        raise ConfigError("RAY_ADDRESS: wanted it unset: a cluster that runs already cannot be paused")
    dataset = open_dataset(url)
    changes = {"data.url": str(Path(dataset.url).absolute()), "data.val": None, "optim.duration": "1000000 steps"}
    run = recipe(settings, settings.models[0], len(dataset.classes)).replace(changes | {"tracking.experiment": "bench"})
    found, start = race(run, settings.rounds, settings.seconds or SECONDS)
    ours, theirs = ([speed * settings.batch for speed in some] for some in found)
    ratio = ratio_of(ours, theirs)
    print(f"\nimages/s of whole runs, median ± half the interquartile range of {settings.rounds} interleaved rounds")
    print(f"{circumstances(torch.device('cuda' if torch.cuda.is_available() else 'cpu'))}; {mode(settings)}")
    print(f"{run.model.name}, {settings.image_size} px, batches of {settings.batch}, one worker")
    print(f"\n  vitray train                      {spread_of(ours)!s:>18}")
    print(f"  DataLoader, same decode, no Ray   {spread_of(theirs)!s:>18}\n  ratio{ratio!s:>47}")
    print("\nseconds from the call of train() to: " + ", ".join(f"{name} {at:.1f}" for name, at in start.items()))
    row = {"model": run.model.name, "vitray": spread_of(ours).median, "loader": spread_of(theirs).median}
    row |= {"ratio": ratio.median, "spread": ratio.spread, **{f"start_{name}": at for name, at in start.items()}}
    write_csv(settings.out / "train_runs.csv", [row])
    return {"rows": [row]}


def race(run: Run, rounds: int, seconds: float) -> tuple[list[list[float]], dict[str, float]]:
    """Steps a second of `vitray train` and of the loop, turn by turn, and the seconds of vitray's start by stage."""
    with tempfile.TemporaryDirectory(prefix="vitray-") as name, _racing(run, Path(name)) as racers:
        for turn in range(rounds + 1):  # the last is not counted: of it the driver may not have heard all
            progress(f"turn {turn + 1} of {rounds + 1}")
            for racer in racers if turn % 2 == 0 else racers[::-1]:
                racer.work(seconds)
        # The first of all is the start.
        return [speeds(racer.points(), racer.turns)[2:-2:2] for racer in racers], _stages(Path(name))


@contextmanager
def _racing(run: Run, folder: Path) -> Iterator[list[Racer]]:
    """`vitray train` and the loop, both past their first steps, and paused."""
    recipe, told, racers = str(folder / "bench.yaml"), folder / "loop.txt", []
    Path(recipe).write_text(run.to_yaml())
    environment = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlruns.db", "VITRAY_HOME": str(folder)}
    sides: list[tuple[list[str], Path, Points]] = [
        (["pipelines.train", recipe, "--out", f"{folder}/runs"], folder / "ours.txt", lambda: _told(folder)),
        (["vitray.bench.runs", recipe], told, lambda: _printed(told)),
    ]
    try:
        for words, output, points in sides:
            racers.append(Racer(words, environment, output, points))
            racers[-1].start()
        yield racers
    finally:
        for racer in racers:
            racer.end()


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    """What the journal of the run holds: all of it, as long as it runs."""
    for path in (folder / "spool").glob("*/records.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def _told(folder: Path) -> list[Point]:
    found = (each for each in _records(folder) if each["kind"] == "metrics" and "train/loss" in each["values"])
    return [Point(each["time"] / 1000, each["step"]) for each in found]


def _stages(folder: Path) -> dict[str, float]:
    values = {key: value for each in _records(folder) for key, value in each.get("values", {}).items()}
    stages = {key.removeprefix("start/"): value for key, value in values.items() if key.startswith("start/")}
    return {stage.removesuffix("_seconds"): seconds for stage, seconds in stages.items()}


# ---- the loop --------------------------------------------------------------------------------------------------------


def _printed(told: Path) -> list[Point]:
    lines = [line.split() for line in told.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [Point(float(at), int(step)) for at, step in lines]


def loop_around_loader(run: Run) -> Iterator[None]:
    """The bare step on what one process of a DataLoader decodes, epoch after epoch."""
    dataset, size, crop = open_dataset(run.data.url or ""), run.model.image_shape, run.data.augment
    stream = Stream(dataset, run.data.train, batch=run.optim.batch, size=size, crop=crop)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step, epoch = bare_step(run, device), 0
    while True:
        batches = Batches(stream, epoch, stream.steps * stream.batch, decode_ours)
        for images, labels in DataLoader(batches, batch_size=None, num_workers=1, multiprocessing_context="fork"):
            step(normalised(images.to(device), run.data.normalise), labels.to(device))
            yield
        epoch += 1


if __name__ == "__main__":
    for number, _ in enumerate(loop_around_loader(load_run(sys.argv[1])), 1):
        print(time.time(), number, flush=True)
