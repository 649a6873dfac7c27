"""python experiments/faults/measure_faults.py: what a fault costs in vitray and in other stacks, as docs/faults.md.

Cells that have a JSON in experiments/faults/cells are not run again. Everything is made on first use: an environment
for each stack (about 2 GB each), the images, an undisturbed run of each stack. A cell is a run, a fault in it, and the
starts that a person makes afterwards. Its cost comes from the records of the workers: a line for each optimizer step
with time, process, rank, step and images. The steps that are in the final weights are the run's history: a start from a
checkpoint of step s takes back all later steps of earlier processes.
"""

import argparse
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from fault_page import CELLS, PAGE, faults_page, has_cell, read_cells
from fault_subjects import (
    LOOPS,
    SUBJECTS,
    Place,
    Settings,
    environment,
    make_environment,
    make_images,
    make_mds,
    python_of,
    shown,
    versions_of,
)
from safetensors.numpy import load_file

from vitray.errors import RunError
from vitray.system import host_facts

# Steps, halfway between two checkpoints: of the fault, in the second epoch; of the elastic run's changes.
FAULT_STEP, ELASTIC_STEPS = 104, (72, 136)
# Seconds: GRACE from SIGTERM to SIGKILL (as in Kubernetes); HANG without a step, before a person kills the run (a start
# on a busy machine takes a minute); SURVIVAL of processes without their driver; FULL of a full disk; LIMIT of a cell.
GRACE, HANG, SURVIVAL, FULL, LIMIT = 30.0, 150.0, 5.0, 45.0, 600.0
DISK_BYTES = 64 * 2**20
MOST_STARTS = 5


# ---- the steps of a run ----------------------------------------------------------------------------------------------


class StepRecord(NamedTuple):
    """One optimizer step of one worker."""

    time: float
    process: int
    rank: int
    step: int
    """Steps that the weights had taken before this one."""
    images: tuple[int, ...]


class History(NamedTuple):
    """The steps that led to the final weights, and those that were taken back."""

    images: dict[int, Counter[int]]
    """The images of all workers by step."""
    lost: int
    """Steps taken back, and so computed again."""
    starts: tuple[int, ...]
    """The first step of each start."""


class Cost(NamedTuple):
    """The difference between a run with a fault and the undisturbed one."""

    steps: int
    lost: int
    repeated: int
    """Images trained on more often than without the fault; one that is seen twice too often counts twice."""
    skipped: int
    """Images trained on less often than without the fault."""
    other_steps: int
    """Steps on other images than the same step of the undisturbed run, missing and further steps included."""


def parse_records(lines: Iterable[str]) -> list[StepRecord]:
    """Return the records of a file in the order of their times."""
    records = []
    for line in lines:
        time, process, rank, step, *images = line.split()
        records.append(StepRecord(float(time), int(process), int(rank), int(step), tuple(map(int, images))))
    return sorted(records)


def starts_of(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """Return the records of each start of the run: of all processes that began together."""
    starts: list[list[StepRecord]] = []
    start_of: dict[int, int] = {}
    ranks: set[int] = set()
    for record in records:
        if record.process not in start_of:
            if not starts or record.rank in ranks or record.step != starts[-1][0].step:
                starts.append([])
                ranks = set()
            ranks.add(record.rank)
            start_of[record.process] = len(starts) - 1
        starts[start_of[record.process]].append(record)
    return starts


def history_of(records: Sequence[StepRecord]) -> History:
    """Return the history of a run."""
    images: dict[int, Counter[int]] = {}
    lost, firsts = 0, []
    for start in starts_of(records):
        first = min(record.step for record in start)
        taken_back = [step for step in images if step >= first]
        lost += len(taken_back)
        for step in taken_back:
            del images[step]
        firsts.append(first)
        for record in start:
            images.setdefault(record.step, Counter()).update(record.images)
    return History(images, lost, tuple(firsts))


def cost_of(run: History, undisturbed: History) -> Cost:
    """Compare a run with the undisturbed one."""
    seen, wanted = (sum(history.images.values(), Counter()) for history in (run, undisturbed))
    steps = run.images.keys() | undisturbed.images.keys()
    other = sum(run.images.get(step) != undisturbed.images.get(step) for step in steps)
    return Cost(len(run.images), run.lost, (seen - wanted).total(), (wanted - seen).total(), other)


def longest_pause(records: Sequence[StepRecord], since: float) -> float | None:
    """Return the longest time without a step of any worker that ends after `since`; None if no step follows."""
    pauses = [after.time - before.time for before, after in pairwise(records) if after.time > since]
    return max(pauses, default=None)


# ---- a run and its processes -----------------------------------------------------------------------------------------


class Tree:
    """A command and all processes that it starts; ended by process id."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                start_new_session=True,
            )
        self._root = psutil.Process(self.process.pid)
        self._seen: dict[int, psutil.Process] = {self.process.pid: self._root}

    @property
    def status(self) -> int | None:
        """The exit status of the command; None while it runs."""
        return self.process.poll()

    def note_children(self) -> None:
        """Note the present descendants, to know them after the command has died."""
        with suppress(psutil.NoSuchProcess):
            for child in self._root.children(recursive=True):
                self._seen.setdefault(child.pid, child)

    def alive(self) -> list[psutil.Process]:
        """Return the processes of the tree that run, those of a dead parent included."""
        self.note_children()
        self.process.poll()
        alive = []
        for process in list(self._seen.values()):
            with suppress(psutil.NoSuchProcess):
                # A process id may be in use again: `is_running` compares the times of start.
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        if not alive:  # its first thread has ended, others may need a moment
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        return alive

    def await_end(self, seconds: float) -> int:
        """Wait until no process of the tree runs, and return the number of those that still do."""
        end = time.monotonic() + seconds
        while (left := len(self.alive())) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def kill(self) -> None:
        """Kill every process of the tree."""
        for process in self.alive():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.await_end(10)


class Cell:
    """A run of one subject and its starts."""

    def __init__(self, name: str, place: Place, settings: Settings) -> None:
        self.subject, self.place, self.settings = (SUBJECTS | LOOPS)[name], place, settings
        self.workers = 1 if self.subject.is_alone else settings.workers
        self.commands: list[str] = []
        self.notes: list[str] = []
        self.since: float | None = None
        """The time of the fault."""
        self._end = time.monotonic() + LIMIT
        self._processes: int | None = None
        """Processes that had taken a step at the last restart."""

    def start(self, workers: int | None = None) -> None:
        """Start or resume the run, as a person does."""
        self.workers = workers or self.workers
        command = self.subject.command(self.place, self.settings, self.workers)
        self.commands.append(shown(command, self.place))
        variables = dict(environment(self.place, self.settings, self.workers))
        variables |= {
            "MLFLOW_TRACKING_URI": f"sqlite:///{self.place.folder}/mlflow.db",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "VITRAY_HOME": str(self.place.folder / "home"),
            "OMP_NUM_THREADS": "1",
        }
        self.tree = Tree(command, variables, self.place.folder / "log.txt")

    def records(self) -> list[StepRecord]:
        """Return the steps so far."""
        return parse_records(self.place.record.read_text().splitlines()) if self.place.record.exists() else []

    @property
    def is_finished(self) -> bool:
        """Whether the final weights are there and the command has ended well."""
        return self.tree.status == 0 and (self.place.out / self.subject.weights).exists()

    def check_time(self) -> None:
        """Raise an error at the end of the cell's time."""
        if time.monotonic() > self._end:
            raise RunError(f"{self.subject.title}: not finished within {LIMIT:.0f} s; see {self.place.folder}/log.txt")

    def await_step(self, step: int) -> list[StepRecord]:
        """Wait until every worker of the present start has taken a step, and return its last records by rank."""
        while True:
            self.check_time()
            if self.tree.status is not None:
                raise RunError(f"{self.subject.title} ended before step {step}; see {self.place.folder}/log.txt")
            self.tree.note_children()
            last = {record.rank: record for record in self.records()}
            latest = [last[rank] for rank in range(self.workers) if rank in last and last[rank].step >= step]
            if len(latest) == self.workers:
                return latest
            time.sleep(0.03)

    def send_signal(self, process: int, number: int) -> None:
        """Send a signal, and note the time of the first one."""
        self.since = self.since or time.time()
        os.kill(process, number)

    def stop(self) -> None:
        """Send SIGTERM to the command, and SIGKILL to all after the grace time."""
        self.send_signal(self.tree.process.pid, signal.SIGTERM)
        if self.tree.await_end(GRACE):
            self.notes.append(f"did not end within {GRACE:.0f} s of SIGTERM")  # the machine's SIGKILL, not a person's
            self.tree.kill()

    def await_success(self) -> None:
        """Do what a person does until the run is finished: end what hangs, remove broken checkpoints, start again."""
        seen, changed = 0, time.monotonic()
        while not self.is_finished:
            self.check_time()
            steps = len(self.records())
            if steps != seen:
                seen, changed = steps, time.monotonic()
            if self.tree.status is not None:
                self._start_again()
                changed = time.monotonic()
            elif time.monotonic() - changed > HANG:
                self.notes.append(f"took no step for {HANG:.0f} s and was killed")
                self.tree.kill()
            time.sleep(0.1)
        self.tree.await_end(SURVIVAL)

    def _start_again(self) -> None:
        if len(self.commands) == MOST_STARTS:
            raise RunError(f"{self.subject.title}: {MOST_STARTS} starts, and no end; see {self.place.folder}/log.txt")
        if left := self.tree.await_end(SURVIVAL):
            self.notes.append(f"{left} processes outlived the command by {SURVIVAL:.0f} s and were killed")
            self.tree.kill()
        processes = len({record.process for record in self.records()})
        if self._processes == processes:  # the last start took no step
            newest = max(
                self.place.out.glob(self.subject.checkpoints), key=lambda path: path.stat().st_mtime, default=None
            )
            if newest is None:
                raise RunError(f"{self.subject.title} takes no step; see {self.place.folder}/log.txt")
            self.notes.append(f"{newest.name} could not be loaded and was removed by hand")
            shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
        self._processes = processes
        self.start()


# ---- faults ----------------------------------------------------------------------------------------------------------


def _none(cell: Cell) -> None:
    cell.since = None


def _sigterm(cell: Cell) -> None:
    cell.await_step(FAULT_STEP)
    cell.stop()


def _kill_worker(cell: Cell) -> None:
    cell.send_signal(cell.await_step(FAULT_STEP)[-1].process, signal.SIGKILL)


def _kill_driver(cell: Cell) -> None:
    cell.await_step(FAULT_STEP)
    cell.send_signal(cell.tree.process.pid, signal.SIGKILL)


def _kill_in_checkpoint(cell: Cell) -> None:
    """Kill all processes as soon as a checkpoint appears, the one that writes it first."""
    writer = cell.await_step(FAULT_STEP)[0].process
    before = _newest_write(cell.place.out)
    while _newest_write(cell.place.out) == before:
        cell.check_time()
        time.sleep(0.0005)
    cell.send_signal(writer, signal.SIGKILL)
    cell.tree.kill()
    files = [path for path in cell.place.out.rglob("*") if path.is_file() and path.stat().st_mtime_ns > before]
    cell.notes.append(
        f"files of the interrupted checkpoint: {', '.join(sorted(path.name for path in files)) or 'none'}"
    )


def _newest_write(folder: Path) -> int:
    newest = 0
    for root, _, names in os.walk(folder):
        for path in [root, *(os.path.join(root, name) for name in names)]:
            with suppress(FileNotFoundError):
                newest = max(newest, os.stat(path).st_mtime_ns)
    return newest


def _disk_full(cell: Cell) -> None:
    """Fill the disk of the output until the run has ended, or for some time."""
    cell.await_step(FAULT_STEP)
    cell.since = time.time()
    ballast = cell.place.out / "ballast"
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    end = time.monotonic() + FULL
    while cell.tree.status is None and time.monotonic() < end:
        cell.tree.note_children()
        time.sleep(0.1)
    cell.notes.append("ended while the disk was full" if cell.tree.status is not None else "outlived the full disk")
    ballast.unlink()


def _elastic(cell: Cell) -> None:
    """Go on with one worker, and then with two again."""
    for step, workers in zip(ELASTIC_STEPS, (1, 2), strict=True):
        cell.await_step(step)
        cell.stop()
        cell.start(workers)


FAULTS: dict[str, Callable[[Cell], None]] = {
    "none": _none,
    "sigkill_driver": _kill_driver,
    "sigkill_worker": _kill_worker,
    "sigterm": _sigterm,
    "checkpoint": _kill_in_checkpoint,
    "elastic": _elastic,
    "disk_full": _disk_full,
}


# ---- measurement -----------------------------------------------------------------------------------------------------


def run_cell(name: str, fault: str, place: Place, undisturbed: Place | None, settings: Settings) -> dict[str, Any]:
    """Run a subject with a fault, and return its cost against the undisturbed run."""
    shutil.rmtree(place.folder, ignore_errors=True)
    place.out.mkdir(parents=True)
    if place.store.exists():
        shutil.copy(place.store, place.folder / "mlflow.db")
    cell = Cell(name, place, settings)
    with _small_disk(place.out) if fault == "disk_full" else nullcontext():
        try:
            cell.start()
            FAULTS[fault](cell)
            cell.await_success()
        finally:
            cell.tree.kill()
        shutil.copy(place.out / cell.subject.weights, place.folder / "final.safetensors")
        tracking = tracking_of(cell)
    result: dict[str, Any] = {"subject": name, "fault": fault, "settings": settings._asdict()}
    result |= {"commands": cell.commands, "notes": cell.notes, "tracking": tracking}
    if undisturbed is not None:
        result |= measured_cost(place, undisturbed, cell.since)
    return result


def measured_cost(place: Place, undisturbed: Place, since: float | None) -> dict[str, Any]:
    """Return the cost of a fault, from the records and the final weights of two runs."""
    records, before = (parse_records(each.record.read_text().splitlines()) for each in (place, undisturbed))
    cost = cost_of(history_of(records), history_of(before))
    weights, wanted = (load_file(each.folder / "final.safetensors") for each in (place, undisturbed))
    difference = max(float(np.abs(weights[key] - wanted[key]).max()) for key in wanted)
    pause = None if since is None else longest_pause(records, since)
    return cost._asdict() | {"weights_difference": difference, "pause": pause}


def tracking_of(cell: Cell) -> list[dict[str, Any]]:
    """Return the runs that tracking shows: status, first and last step, steps twice and steps missing."""
    if cell.subject.loss is None:
        summary = next(cell.place.out.rglob("summary.csv"), None)
        epochs = (
            []
            if summary is None
            else [int(line.split(",")[0]) for line in summary.read_text().split() if line[0].isdecimal()]
        )
        return [{"status": None, "epochs": epochs}]
    with sqlite3.connect(cell.place.folder / "mlflow.db") as store:
        rows = store.execute("SELECT run_uuid, status FROM runs ORDER BY start_time").fetchall()
        query = "SELECT step FROM metrics WHERE run_uuid = ? AND key = ?"
        runs = [(status, [step for (step,) in store.execute(query, (run, cell.subject.loss))]) for run, status in rows]
    return [{"status": status} | step_summary(steps) for status, steps in runs]


def step_summary(steps: list[int]) -> dict[str, Any]:
    """Return the range of the steps of a metric, and how many of it are twice or missing."""
    if not steps:
        return {"first": None, "last": None, "twice": 0, "missing": 0}
    counts, first, last = Counter(steps), min(steps), max(steps)
    twice = sum(count > 1 for count in counts.values())
    return {"first": first, "last": last, "twice": twice, "missing": last - first + 1 - len(counts)}


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Make a folder a disk of its own, which needs root."""
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options]).returncode:
        raise RunError("disk_full needs root, to mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# ---- all cells -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the missing cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--stacks", nargs="+", choices=SUBJECTS | LOOPS, default=list(SUBJECTS | LOOPS), metavar="STACK"
    )
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--work", type=Path, default=Path("bench_out/faults"), help="folder of all files (%(default)s)")
    parser.add_argument("--timm", type=Path, help="train.py of timm's repository, at the version of the package")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the processes of the cell too
    if not options.page:
        run_cells(options.stacks, options.faults, options.work.absolute(), options.timm and options.timm.absolute())
    PAGE.write_text(faults_page(read_cells()))
    print(PAGE)


def run_cells(stacks: list[str], faults: list[str], work: Path, timm: Path | None) -> None:
    """Run the cells that have no JSON, fault by fault."""
    settings, data = Settings(), work / "data"
    make_images(data, settings)
    for fault in faults:
        for name in stacks:
            path = CELLS / f"{name}-{fault}.json"
            if path.exists() or (name in LOOPS and not has_cell(name, fault)):
                continue
            if "timm" in name and timm is None:
                print(f"{name}: skipped, as its package does not hold train.py; see --timm", file=sys.stderr)
                continue
            make_environment(name, work)
            if name == "composer":
                make_mds(data, work)
            python = python_of(name, work)
            place, before = (
                Place(data, work / "runs" / f"{name}-{each}", python, timm) for each in (fault, "undisturbed")
            )
            try:
                if not (before.folder / "final.safetensors").exists():
                    print(f"{name}: an undisturbed run", file=sys.stderr)
                    run_cell(name, "none", before, None, settings)
                print(f"{name}: {fault}", file=sys.stderr)
                result = run_cell(name, fault, place, before, settings)
            except RunError as error:  # a person looks at it; the other cells go on
                print(error, file=sys.stderr)
                continue
            machine = f"{os.cpu_count()} cores of {host_facts.facts()['hardware.cpu']}"
            facts = {"versions": versions_of(name, work), "machine": machine, "date": time.strftime("%Y-%m-%d")}
            path.write_text(json.dumps(result | facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
