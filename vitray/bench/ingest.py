"""The stream and its alternatives in interleaved rounds: CPU time per image, images per second, the first batch.

CPU time counts this process and its descendants; on a shared machine it is steadier than wall time. The start of worker
processes in each epoch counts, as it does in training. With --augment, the places of an augmentation: a task without
it, with all pixels and with `data.augment.decode: scaled`, a task with it, and the two halves of `data.augment.on:
device`, all in this process.
"""

import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import ray
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from vitray.bench.charts import draw_bars
from vitray.bench.results import Results
from vitray.config.augmentation import Augment, RandomResizedCrop
from vitray.data.augment.draws import read_draws
from vitray.data.augment.ops_tensor import apply_draws
from vitray.data.shards import open_dataset
from vitray.data.stream.batches import Share, StreamSpec
from vitray.data.stream.decoding import Images, SplitRows, ViewSettings, decode_positions, read_rows
from vitray.data.stream.epoch_order import EpochOrder
from vitray.data.stream.ray_reader import RayReader
from vitray.data.stream.stream import Stream
from vitray.errors import ConfigError
from vitray.system.timing import circumstances, in_rounds, ratio_of, spread_of

BASELINE, CROP_ONLY = "loader, ours", "crop and flip"
CROP = Augment(crop=RandomResizedCrop(interpolation="bilinear"))
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Takes the number of an epoch and yields the sizes of batches.
Pipeline = Callable[[int], Iterator[int]]


class Timing(NamedTuple):
    """Seconds of one epoch: until the first batch, and per image."""

    first_batch: float
    wall: float
    cpu: float


class EpochInput(NamedTuple):
    """The images of an epoch, their order, and their crop."""

    rows: SplitRows
    order: EpochOrder
    view: ViewSettings

    def encoded(self, positions: np.ndarray) -> tuple[list[bytes], Tensor]:
        """The encoded images at some positions, and their labels."""
        rows = self.order.at(positions)[0]
        stored = read_rows(rows, self.rows)
        contents, labels, _ = zip(*(stored[int(row)] for row in rows), strict=True)
        return list(contents), torch.tensor(labels)


# Returns images and labels of some positions of an epoch.
Decode = Callable[[np.ndarray, EpochInput], tuple[Tensor, Tensor]]


def measure_ingest(
    dataset: str,
    image_size: int,
    batch: int,
    workers: int,
    images: int | None,
    object_store: int | None,
    rounds: int,
    out: Path,
    augment: str | None,
) -> dict[str, Any]:
    """Measure every pipeline in turns, print and save the table, and return its rows.

    `images` is None for all images of an epoch, `object_store` in MB and None for Ray's default, `augment` the kind of
    a policy and None to compare pipelines that only crop and flip.
    """
    # Ray's workers run at nice 15 by default; here they get the same priority as the others.
    options: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.WARNING}
    options |= {"num_cpus": workers, "_system_config": {"worker_niceness": 0}}
    options |= {"object_store_memory": object_store and object_store * 10**6}
    with nullcontext() if augment or ray.is_initialized() else ray.init("local", **options):
        spec = StreamSpec("train", batch, (image_size, image_size), CROP)
        stream = Stream(open_dataset(dataset), spec, RayReader)
        wanted = images or stream.images
        images = min(stream.images, wanted) // batch * batch
        if not images:
            raise ConfigError(f"--batch {batch}: expected at most the {wanted} images of an epoch")
        pipelines = _places(augment, stream, images) if augment else _pipelines(workers, stream, images)
        calls = {name: partial(_timed, pipeline, images) for name, pipeline in pipelines.items()}
        # The first round warms the page cache and the worker processes.
        timings = in_rounds(calls, rounds, warm_up=1, shown=True)
    baseline = CROP_ONLY if augment else BASELINE
    where, who = circumstances(torch.device("cpu")), f"policy {augment}" if augment else f"{workers} workers"
    about = f"{images} images to {image_size} px, batches of {batch}, {who}"
    print(f"{where}\n{about}; {rounds} interleaved rounds, median ± half the interquartile range\n")
    print(f"{'pipeline':<26}{'CPU us/image':>16}{'images/s':>18}{'first batch s':>18}{'CPU / ' + baseline:>24}")
    device = torch.device("cuda" if augment and torch.cuda.is_available() else "cpu")
    stem = f"ingest_{augment}" if augment else "ingest"
    results = Results(out / stem, device, {"circumstances": where, "about": about})
    for name, measured in timings.items():
        cpu = spread_of([1e6 * timing.cpu for timing in measured])
        speed = spread_of([1 / timing.wall for timing in measured])
        first = spread_of([timing.first_batch for timing in measured])
        ratio = ratio_of([timing.cpu for timing in measured], [timing.cpu for timing in timings[baseline]])
        print(f"{name:<26}{cpu!s:>16}{speed!s:>18}{first!s:>18}{ratio!s:>24}")
        row: dict[str, Any] = {"pipeline": name} | cpu.columns("cpu_us", 4) | speed.columns("images_per_second", 4)
        results.add(row | first.columns("first_batch", 4) | ratio.columns("cpu_ratio", 4))
    bars = {row["pipeline"]: row["cpu_us"] for row in results.rows}
    return results.finish(chart=draw_bars(bars, "CPU us per image", f"{where}\n{about}"))


def _timed(pipeline: Pipeline, images: int, epoch: int) -> Timing:
    before, start = tree_cpu_seconds(), time.perf_counter()
    batches = pipeline(epoch)
    count = next(batches)
    first = time.perf_counter() - start
    count += sum(batches)
    assert count == images, f"got {count} images, expected {images}"
    wall = time.perf_counter() - start
    return Timing(first, wall / images, cpu_seconds_since(before) / images)


def _pipelines(workers: int, stream: Stream, images: int) -> dict[str, Pipeline]:
    """Return the stream and its alternatives."""

    def streamed(epoch: int) -> Iterator[int]:
        end = (epoch + 1) * stream.steps
        start = end - images // stream.spec.batch  # with --images, the stream starts late in its epoch
        return (len(batch.images) for batch in stream.train(start, end, Share(0, 1)))

    def loaded(decode: Decode) -> Pipeline:
        return lambda epoch: loader(stream, epoch, images, workers, decode)

    return {
        "plain loop": lambda epoch: loop(stream, epoch, images),
        "stream": streamed,
        BASELINE: loaded(ours),
        "loader, torchvision v2": loaded(torchvision_v2),
        "loader, PIL": loaded(pil),
    }


def _places(policy: str, stream: Stream, images: int) -> dict[str, Pipeline]:
    """Return the work of a task: without a policy, with scaled decoding, with a policy, with its draws alone; and the
    worker's part."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    augment = Augment.model_validate({"crop": CROP.crop, "policy": policy})
    sending = Augment.model_validate(augment.model_dump() | {"on": "device"})
    scaled = Augment(crop=CROP.crop, decode="scaled")
    in_tasks, on_device, fewer_pixels = (
        Stream(stream.dataset, stream.spec._replace(crop=crop), RayReader) for crop in (augment, sending, scaled)
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


# ---- a plain loop, and torch's DataLoader with three ways to decode and crop -----------------------------------------


def loop(stream: Stream, epoch: int, images: int) -> Iterator[int]:
    """Yield batch sizes of the lower limit: the stream's decoding in this process, without any overhead."""
    return (len(block["image"]) for block in blocks_of(stream, epoch, images))


def blocks_of(stream: Stream, epoch: int, images: int) -> Iterator[Images]:
    """Yield the batches of an epoch, decoded in this process."""
    source = EpochInput(stream.rows, stream.order(epoch), stream.view(epoch))
    for start in range(0, images, stream.spec.batch):
        yield from decode_positions([np.arange(start, start + stream.spec.batch)], *source)


def loader(stream: Stream, epoch: int, images: int, workers: int, decode: Decode) -> Iterator[int]:
    """Yield batch sizes of a DataLoader over the same epoch."""
    source = EpochInput(stream.rows, stream.order(epoch), stream.view(epoch))
    starts: Any = range(0, images, stream.spec.batch)

    def decode_batch(start: Any) -> tuple[Tensor, Tensor]:
        return decode(np.arange(start, start + stream.spec.batch), source)

    # Forked, as is usual on Linux; the processes use neither Ray nor threads.
    forked: Any = {"num_workers": workers, "multiprocessing_context": "fork"}
    for pixels, _ in DataLoader(starts, batch_size=None, collate_fn=decode_batch, **forked):
        yield len(pixels)


def ours(positions: np.ndarray, source: EpochInput) -> tuple[Tensor, Tensor]:
    """Decode as the stream does."""
    blocks = list(decode_positions([positions], *source))
    image, label = (np.concatenate([block[name] for block in blocks]) for name in ("image", "label"))
    return torch.from_numpy(image), torch.from_numpy(label)


def torchvision_v2(positions: np.ndarray, source: EpochInput) -> tuple[Tensor, Tensor]:
    """Decode by torchvision's tensor pipeline: decode_jpeg, crop, resize and flip on uint8."""
    transform: Any = v2.Compose(
        [v2.RandomResizedCrop(source.view.kinds[0].size, antialias=True), v2.RandomHorizontalFlip()]
    )
    contents, labels = source.encoded(positions)
    buffers = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    return torch.stack([transform(decode_jpeg(buffer, ImageReadMode.RGB)) for buffer in buffers]), labels


def pil(positions: np.ndarray, source: EpochInput) -> tuple[Tensor, Tensor]:
    """Decode by the most common pipeline: Pillow, ToTensor, Normalize, float32."""
    transform: Any = transforms.Compose(
        [
            transforms.RandomResizedCrop(source.view.kinds[0].size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    contents, labels = source.encoded(positions)
    return torch.stack([transform(Image.open(io.BytesIO(content)).convert("RGB")) for content in contents]), labels


# ---- CPU time --------------------------------------------------------------------------------------------------------


def process_tree() -> list[psutil.Process]:
    """Return this process and all of its descendants."""
    return [this := psutil.Process(), *this.children(recursive=True)]


def tree_cpu_seconds() -> dict[int, float]:
    """Return the CPU time of this process and of each living descendant, each with that of the children it reaped."""
    seconds = {}
    for process in process_tree():
        with suppress(psutil.NoSuchProcess):  # it exited a moment ago, and its parent has its time
            seconds[process.pid] = sum(process.cpu_times()[:4])
    return seconds


def cpu_seconds_since(before: dict[int, float]) -> float:
    """Return the CPU time since an earlier `tree_cpu_seconds`."""
    # Summed by process: an idle Ray worker that exits meanwhile takes its earlier CPU time with it.
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in tree_cpu_seconds().items())
