"""The stream and its alternatives in interleaved rounds: CPU time per image, images per second, the first batch.

CPU time counts this process and its descendants; on a shared machine it is steadier than wall time. The start of worker
processes in each epoch counts, as it does in training. With --augment, the places of an augmentation: a task without
it, with all pixels and with `data.augment.decode: scaled`, a task with it, and the two halves of `data.augment.on:
device`, all in this process.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch

from vitray.bench.charts import draw_bars, write_results
from vitray.bench.loaders import Decode, blocks_of, loader, loop, ours, pil, torchvision_v2
from vitray.bench.process_tree import cpu_seconds_since, tree_cpu_seconds
from vitray.bench.rounds import circumstances, progress, ratio_of, rotated, spread_of, write_record
from vitray.config.augmentation import Augment, RandomResizedCrop
from vitray.data.augment.draws import read_draws
from vitray.data.augment.ops_tensor import apply_draws
from vitray.data.shards import open_dataset
from vitray.data.stream.batches import Share, StreamSpec
from vitray.data.stream.stream import Stream
from vitray.errors import ConfigError

BASELINE, CROP_ONLY = "loader, ours", "crop and flip"
CROP = Augment(crop=RandomResizedCrop(interpolation="bilinear"))

# Takes the number of an epoch and yields the sizes of batches.
Pipeline = Callable[[int], Iterator[int]]


class IngestSettings(NamedTuple):
    """Settings of `vitray bench ingest`."""

    url: str
    image_size: int
    batch: int
    workers: int
    images: int | None
    object_store: int | None
    """In MB; None is Ray's default."""
    rounds: int
    out: Path
    augment: str | None
    """The kind of a policy; None compares pipelines that only crop and flip."""


class Timing(NamedTuple):
    """Seconds of one epoch: until the first batch, and per image."""

    first_batch: float
    wall: float
    cpu: float


def measure_ingest(settings: IngestSettings) -> dict[str, Any]:
    """Measure every pipeline in turns, print and save the table, and return its rows."""
    if settings.augment:
        stream, images = _open_stream(settings)
        return _report(settings, _measure(settings, _places(settings, stream, images), images), images, CROP_ONLY)
    # Ray's workers run at nice 15 by default; here they get the same priority as the others.
    system = {"worker_niceness": 0}
    store = settings.object_store and settings.object_store * 10**6
    quiet: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.WARNING}
    start = partial(ray.init, "local", num_cpus=settings.workers, object_store_memory=store, _system_config=system)
    with nullcontext() if ray.is_initialized() else start(**quiet):
        stream, images = _open_stream(settings)
        return _report(settings, _measure(settings, _pipelines(settings, stream, images), images), images, BASELINE)


def _open_stream(settings: IngestSettings) -> tuple[Stream, int]:
    """Return the stream, and the measured images of an epoch, in whole batches."""
    size = (settings.image_size, settings.image_size)
    stream = Stream(open_dataset(settings.url), StreamSpec("train", settings.batch, size, CROP))
    wanted = settings.images or stream.images
    images = min(stream.images, wanted) // settings.batch * settings.batch
    if not images:
        raise ConfigError(f"--batch {settings.batch}: expected at most the {wanted} images of an epoch")
    return stream, images


def _pipelines(settings: IngestSettings, stream: Stream, images: int) -> dict[str, Pipeline]:
    """Return the stream and its alternatives."""

    def streamed(epoch: int) -> Iterator[int]:
        end = (epoch + 1) * stream.steps
        start = end - images // settings.batch  # with --images, the stream starts late in its epoch
        return (len(batch.images) for batch in stream.train(start, end, Share(0, 1)))

    def loaded(decode: Decode) -> Callable[[int], Iterator[int]]:
        return lambda epoch: loader(stream, epoch, images, settings.workers, decode)

    return {
        "plain loop": lambda epoch: loop(stream, epoch, images),
        "stream": streamed,
        BASELINE: loaded(ours),
        "loader, torchvision v2": loaded(torchvision_v2),
        "loader, PIL": loaded(pil),
    }


def _places(settings: IngestSettings, stream: Stream, images: int) -> dict[str, Pipeline]:
    """Return the work of a task: without a policy, with scaled decoding, with a policy, with its draws alone; and the
    worker's part."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    augment = Augment.model_validate({"crop": CROP.crop, "policy": settings.augment})
    sending = Augment.model_validate(augment.model_dump() | {"on": "device"})
    scaled = Augment(crop=CROP.crop, decode="scaled")
    in_tasks, on_device, fewer_pixels = (
        Stream(stream.dataset, stream.spec._replace(crop=crop)) for crop in (augment, sending, scaled)
    )
    crops = [(block["image"], read_draws(block, sending)) for block in blocks_of(on_device, 0, images)]

    def worker(_epoch: int) -> Iterator[int]:
        for image, draws in crops:
            images_BHWC = torch.from_numpy(image.copy()).to(device)
            apply_draws(images_BHWC, draws)
            yield len(images_BHWC)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return {
        CROP_ONLY: lambda epoch: loop(stream, epoch, images),
        f"{CROP_ONLY}, scaled": lambda epoch: loop(fewer_pixels, epoch, images),
        "on tasks: the task": lambda epoch: loop(in_tasks, epoch, images),
        "on device: the task": lambda epoch: loop(on_device, epoch, images),
        f"on device: the worker, {device.type}": worker,
    }


def _measure(settings: IngestSettings, pipelines: dict[str, Pipeline], images: int) -> dict[str, list[Timing]]:
    """Return the timings of each pipeline."""
    timings: dict[str, list[Timing]] = {name: [] for name in pipelines}
    for turn in range(settings.rounds + 1):
        for name in rotated(list(pipelines), turn):
            timing = _timed(pipelines[name](turn), images)
            if turn:  # the first turn warms the page cache and the worker processes
                timings[name].append(timing)
        progress(f"round {turn} of {settings.rounds}")
    return timings


def _timed(batches: Iterator[int], images: int) -> Timing:
    before, start = tree_cpu_seconds(), time.perf_counter()
    count = next(batches)
    first = time.perf_counter() - start
    count += sum(batches)
    assert count == images, f"got {count} images, expected {images}"
    wall = time.perf_counter() - start
    return Timing(first, wall / images, cpu_seconds_since(before) / images)


def _report(settings: IngestSettings, timings: dict[str, list[Timing]], images: int, baseline: str) -> dict[str, Any]:
    where = circumstances(torch.device("cpu"))
    who = f"policy {settings.augment}" if settings.augment else f"{settings.workers} workers"
    about = f"{images} images to {settings.image_size} px, batches of {settings.batch}, {who}"
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
        row |= cpu.columns("cpu_us", 4) | speed.columns("images_per_second", 4)
        rows.append(row | first.columns("first_batch", 4) | ratio.columns("cpu_ratio", 4))
    chart = draw_bars({row["pipeline"]: row["cpu_us"] for row in rows}, "CPU us per image", f"{where}\n{about}")
    stem = f"ingest_{settings.augment}" if settings.augment else "ingest"
    result = {"circumstances": where, "about": about} | write_results(settings.out, stem, rows, chart)
    device = torch.device("cuda" if settings.augment and torch.cuda.is_available() else "cpu")
    return write_record(settings.out / f"{stem}.json", device, result)
