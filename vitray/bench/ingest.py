"""How fast images come: vitray's stream against a plain loop and torch's DataLoader, doing the same to each image.

The first unit is CPU-seconds per image, of this process and of all that it started: on a shared machine wall time says
more about the neighbours. What starts workers anew for each epoch pays for it here, as it does in training.
"""

import io
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from vitray.bench.measure import circumstances, draw_bars, progress, ratio_of, spread_of, write_csv
from vitray.config import ConfigError
from vitray.config.augmentation import Augment, RandomResizedCrop
from vitray.shards import open_dataset
from vitray.stream import Cursor, Share, Stream
from vitray.stream.decoding import Order, Rows, View, decode_rows, read_rows

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BASELINE = "loader, ours"
CROP = Augment(crop=RandomResizedCrop(interpolation="bilinear"))


class Settings(NamedTuple):
    """What is measured, and how long."""

    url: str
    split: str = "train"
    image_size: int = 224
    batch: int = 64
    workers: int = 2
    images: int | None = None
    rounds: int = 5
    out: Path = Path("bench_out")


class Timing(NamedTuple):
    """One epoch of one pipeline."""

    first_batch: float
    wall: float
    cpu: float


def measure_ingest(settings: Settings) -> dict[str, Any]:
    """Measure every pipeline in turns; print the table, write a CSV and a picture, return the rows."""
    started_here = not ray.is_initialized()
    if started_here:
        # At equal priority: Ray's workers run at nice 15 unless told.
        system = {"worker_niceness": 0}
        ray.init(
            "local",
            num_cpus=settings.workers,
            include_dashboard=False,
            logging_level=logging.WARNING,
            _system_config=system,
        )
    try:
        return _measure(settings)
    finally:
        if started_here:
            ray.shutdown()


def _measure(settings: Settings) -> dict[str, Any]:
    dataset = open_dataset(settings.url)
    size = (settings.image_size, settings.image_size)
    stream = Stream(dataset, settings.split, batch=settings.batch, size=size, crop=CROP)
    images = min(stream.images, settings.images or stream.images) // settings.batch * settings.batch
    if not images:
        raise ConfigError(
            f"--batch {settings.batch}: wanted at most the {settings.images or stream.images} images of an epoch"
        )
    # Where fewer images are asked for, the stream gives the last part of its epoch.
    skipped = stream.steps - images // settings.batch
    pipelines: dict[str, Callable[[int], Iterator[int]]] = {
        "plain loop": lambda epoch: _loop(stream, epoch, images),
        "stream": lambda epoch: (len(batch.images) for batch in stream.train(Cursor(epoch, skipped), Share(0, 1))),
        BASELINE: lambda epoch: _loader(stream, epoch, images, settings, _ours),
        "loader, torchvision v2": lambda epoch: _loader(stream, epoch, images, settings, _torchvision_v2),
        "loader, PIL": lambda epoch: _loader(stream, epoch, images, settings, _pil),
    }
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


def tree_cpu_seconds() -> dict[int, float]:
    """CPU time of this process and each living descendant, with that of the children each has waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended, and its parent has its time
            continue
        parents[int(path.parent.name)] = int(fields[1])
        ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return {pid: ticks[pid] / os.sysconf("SC_CLK_TCK") for pid in mine & ticks.keys()}


# ---- pipelines -------------------------------------------------------------------------------------------------------


def _loop(stream: Stream, epoch: int, images: int) -> Iterator[int]:
    """The limit: the same decoding in this process, with nothing around it."""
    order = stream.order(epoch)
    view = View(stream.size, stream.crop, stream.seed, epoch)
    for start in range(0, images, stream.batch):
        positions = np.arange(start, start + stream.batch)
        for block in decode_rows(positions, stream.rows, order, view):
            yield len(block["image"])


Decode = Callable[[np.ndarray, Rows, Order, View], Any]


class Batches(IterableDataset):
    """An epoch of the plan, a batch an item, dealt to the workers of a DataLoader."""

    def __init__(self, stream: Stream, epoch: int, images: int, decode: Decode) -> None:
        self.plan = stream.rows, stream.order(epoch), View(stream.size, stream.crop, stream.seed, epoch)
        self.starts, self.batch, self.decode = range(0, images, stream.batch), stream.batch, decode

    def __iter__(self) -> Iterator[Any]:
        torch.set_num_threads(1)
        worker = get_worker_info()
        mine = self.starts if worker is None else self.starts[worker.id :: worker.num_workers]
        for start in mine:
            yield self.decode(np.arange(start, start + self.batch), *self.plan)


def _loader(stream: Stream, epoch: int, images: int, settings: Settings, decode: Decode) -> Iterator[int]:
    batches = Batches(stream, epoch, images, decode)
    # Forked, as is usual on Linux; the processes touch neither Ray nor threads.
    loader = DataLoader(batches, batch_size=None, num_workers=settings.workers, multiprocessing_context="fork")
    for pixels, _ in loader:
        yield len(pixels)


def _ours(positions: np.ndarray, rows: Rows, order: Order, view: View) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = list(decode_rows(positions, rows, order, view))
    image, label = (np.concatenate([block[name] for block in blocks]) for name in ("image", "label"))
    return torch.from_numpy(image), torch.from_numpy(label)


def _torchvision_v2(positions: np.ndarray, rows: Rows, order: Order, view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """Its tensor pipeline: decode_jpeg, crop, resize and flip on uint8."""
    change: Any = v2.Compose([v2.RandomResizedCrop(view.size, antialias=True), v2.RandomHorizontalFlip()])
    found = read_rows(order.rows[positions], rows)
    chosen = [found[int(row)] for row in order.rows[positions]]
    pixels = [
        decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB) for data, _, _ in chosen
    ]
    return torch.stack([change(image) for image in pixels]), torch.tensor([label for _, label, _ in chosen])


def _pil(positions: np.ndarray, rows: Rows, order: Order, view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual way: Pillow, ToTensor, Normalize, float32."""
    change: Any = transforms.Compose(
        [
            transforms.RandomResizedCrop(view.size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    found = read_rows(order.rows[positions], rows)
    chosen = [found[int(row)] for row in order.rows[positions]]
    pixels = [change(Image.open(io.BytesIO(data)).convert("RGB")) for data, _, _ in chosen]
    return torch.stack(pixels), torch.tensor([label for _, label, _ in chosen])


# ---- reporting -------------------------------------------------------------------------------------------------------


def _report(settings: Settings, timings: dict[str, list[Timing]], images: int) -> dict[str, Any]:
    where = circumstances(torch.device("cpu"))
    about = f"{images} images to {settings.image_size} px, batches of {settings.batch}, {settings.workers} workers"
    print(f"{where}\n{about}; {settings.rounds} interleaved rounds, median ± half the interquartile range\n")
    print(f"{'pipeline':<26}{'CPU us/image':>16}{'images/s':>18}{'first batch s':>18}{'CPU / ' + BASELINE:>24}")
    rows: list[dict[str, Any]] = []
    for name, rounds in timings.items():
        cpu = spread_of([1e6 * timing.cpu for timing in rounds])
        speed = spread_of([1 / timing.wall for timing in rounds])
        first = spread_of([timing.first_batch for timing in rounds])
        ratio = ratio_of([timing.cpu for timing in rounds], [timing.cpu for timing in timings[BASELINE]])
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
