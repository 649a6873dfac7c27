"""The stream and its alternatives in interleaved rounds: CPU-seconds per image, images a second, the first batch.

The first unit is CPU-seconds per image, of this process and of all that it started: on a shared machine wall time says
more about the neighbours. What starts workers anew for each epoch pays for it here, as it does in training.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
import torch

from vitray.bench.loaders import loader, loop, ours, pil, torchvision_v2
from vitray.bench.rounds import circumstances, draw_bars, progress, ratio_of, spread_of, write_csv
from vitray.config.augmentation import Augment, RandomResizedCrop
from vitray.data.shards import open_dataset
from vitray.data.stream import Cursor, Share, Stream
from vitray.errors import ConfigError

BASELINE = "loader, ours"
CROP = Augment(crop=RandomResizedCrop(interpolation="bilinear"))

# Starts an epoch, by its number, and gives the sizes of its batches.
Pipeline = Callable[[int], Iterator[int]]


class Settings(NamedTuple):
    """What is measured, and how long."""

    url: str
    split: str = "train"
    image_size: int = 224
    batch: int = 64
    workers: int = 2
    images: int | None = None
    object_store: int | None = None
    """Of a Ray that is started here, in MB; None leaves it to Ray."""
    rounds: int = 5
    out: Path = Path("bench_out")


class Timing(NamedTuple):
    """One epoch of one pipeline."""

    first_batch: float
    wall: float
    cpu: float


def measure_ingest(settings: Settings) -> dict[str, Any]:
    """Measure every pipeline in turns; print the table, write a CSV and a picture, return the rows."""
    with _running_ray(settings):
        stream, images = _stream(settings)
        return _measure(settings, _pipelines(settings, stream, images), images)


@contextmanager
def _running_ray(settings: Settings) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    # At equal priority: Ray's workers run at nice 15 unless told.
    system = {"worker_niceness": 0}
    store = settings.object_store and settings.object_store * 10**6
    quiet: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.WARNING}
    ray.init("local", num_cpus=settings.workers, object_store_memory=store, _system_config=system, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


def _stream(settings: Settings) -> tuple[Stream, int]:
    """The stream that is measured, and how many images of an epoch."""
    size = (settings.image_size, settings.image_size)
    stream = Stream(open_dataset(settings.url), settings.split, batch=settings.batch, size=size, crop=CROP)
    images = min(stream.images, settings.images or stream.images) // settings.batch * settings.batch
    if not images:
        raise ConfigError(
            f"--batch {settings.batch}: wanted at most the {settings.images or stream.images} images of an epoch"
        )
    return stream, images


def _pipelines(settings: Settings, stream: Stream, images: int) -> dict[str, Pipeline]:
    workers = settings.workers
    return {
        "plain loop": lambda epoch: loop(stream, epoch, images),
        "stream": lambda epoch: _streamed(stream, epoch, images),
        BASELINE: lambda epoch: loader(stream, epoch, images, workers, ours),
        "loader, torchvision v2": lambda epoch: loader(stream, epoch, images, workers, torchvision_v2),
        "loader, PIL": lambda epoch: loader(stream, epoch, images, workers, pil),
    }


def _streamed(stream: Stream, epoch: int, images: int) -> Iterator[int]:
    # Where fewer images are asked for, the stream gives the last part of its epoch.
    skipped = stream.steps - images // stream.batch
    return (len(batch.images) for batch in stream.train(Cursor(epoch, skipped), Share(0, 1)))


def _measure(settings: Settings, pipelines: dict[str, Pipeline], images: int) -> dict[str, Any]:
    timings: dict[str, list[Timing]] = {name: [] for name in pipelines}
    for turn in range(settings.rounds + 1):
        for name in [*pipelines][turn % len(pipelines) :] + [*pipelines][: turn % len(pipelines)]:
            timing = _timed(pipelines[name](turn), images)
            if turn:  # the first turn warms the page cache and the worker processes
                timings[name].append(timing)
        progress(f"round {turn} of {settings.rounds}")
    return _report(settings, timings, images)


def _timed(batches: Iterator[int], images: int) -> Timing:
    before, start = tree_cpu_seconds(), time.perf_counter()
    count = next(batches)
    first = time.perf_counter() - start
    count += sum(batches)
    assert count == images, f"{count} images came, {images} were asked for"
    wall = time.perf_counter() - start
    # Process by process: an idle worker of Ray that ended meanwhile takes its past with it.
    cpu = sum(seconds - before.get(pid, 0.0) for pid, seconds in tree_cpu_seconds().items())
    return Timing(first, wall / images, cpu / images)


def _report(settings: Settings, timings: dict[str, list[Timing]], images: int) -> dict[str, Any]:
    baseline = BASELINE if BASELINE in timings else next(iter(timings))
    where = circumstances(torch.device("cpu"))
    about = f"{images} images to {settings.image_size} px, batches of {settings.batch}, {settings.workers} workers"
    print(f"{where}\n{about}; {settings.rounds} interleaved rounds, median ± half the interquartile range\n")
    print(f"{'pipeline':<26}{'CPU us/image':>16}{'images/s':>18}{'first batch s':>18}{'CPU / ' + baseline:>24}")
    rows: list[dict[str, Any]] = []
    for name, rounds in timings.items():
        cpu = spread_of([1e6 * timing.cpu for timing in rounds])
        speed = spread_of([1 / timing.wall for timing in rounds])
        first = spread_of([timing.first_batch for timing in rounds])
        ratio = ratio_of([timing.cpu for timing in rounds], [timing.cpu for timing in timings[baseline]])
        print(f"{name:<26}{cpu!s:>16}{speed!s:>18}{first!s:>18}{ratio!s:>24}")
        row: dict[str, Any] = {"pipeline": name}
        for column, value in {
            "cpu_us": cpu,
            "images_per_second": speed,
            "first_batch": first,
            "cpu_ratio": ratio,
        }.items():
            row |= {column: round(value.median, 4), f"{column}_spread": round(value.spread, 4)}
        rows.append(row)
    files = [settings.out / "ingest.csv", settings.out / "ingest.png"]
    write_csv(files[0], rows)
    draw_bars(
        files[1],
        [row["pipeline"] for row in rows],
        [row["cpu_us"] for row in rows],
        "CPU us per image",
        f"{where}\n{about}",
    )
    print(f"\nwrote {files[0]} and {files[1]}")
    return {"circumstances": where, "about": about, "rows": rows, "files": list(map(str, files))}


def tree_cpu_seconds() -> dict[int, float]:
    """Return the CPU time of this process and of each living descendant, each with that of the children it reaped."""
    processes = [this := psutil.Process(), *this.children(recursive=True)]
    seconds = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended a moment ago, and its parent has its time
            seconds[process.pid] = sum(process.cpu_times()[:4])
    return seconds
