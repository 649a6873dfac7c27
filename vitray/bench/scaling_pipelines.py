"""The two pipelines of `vitray bench scaling`, with decoding that sleeps, and a log of their tasks.

Ray's processes import this module; it loads torch only where images are decoded.
"""

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

import numpy as np
import ray
import ray.data

from vitray.config.augmentation import Augment, RandomResizedCrop
from vitray.data.augment.keyed_random import generator
from vitray.data.shards import open_dataset
from vitray.data.stream import decoding
from vitray.data.stream.batches import Share, StreamSpec
from vitray.data.stream.stream import Stream

CROP = Augment(crop=RandomResizedCrop(interpolation="bilinear"))
DECODE_MS, TASK_LOG = "VITRAY_BENCH_DECODE_MS", "VITRAY_BENCH_TASK_LOG"


class Epoch(NamedTuple):
    """The input of a pipeline."""

    url: str
    image_size: int
    batch: int
    """Images of a global batch."""
    images: int
    seed: int


class ThreadBroadcast:
    """The first consumer's value for all consumers, where these are threads."""

    def __init__(self, threads: int) -> None:
        self._barrier, self._value = Barrier(threads, timeout=120), None

    def __call__(self, value: Any) -> Any:
        self._value = value or self._value
        self._barrier.wait()
        value = self._value
        self._barrier.wait()
        return value


def stream(epoch: Epoch, consumers: int) -> list[Iterator[int]]:
    """Return the sizes of the stream's batches for each consumer."""
    spec = StreamSpec("train", epoch.batch, (epoch.image_size, epoch.image_size), CROP, seed=epoch.seed)
    broadcast = ThreadBroadcast(consumers)
    dataset, steps = open_dataset(epoch.url), epoch.images // epoch.batch
    streams = [Stream(dataset, spec).train(0, steps, Share(rank, consumers, broadcast)) for rank in range(consumers)]
    return [(len(batch.images) for batch in batches) for batches in streams]


def stock(epoch: Epoch, consumers: int) -> list[Iterator[int]]:
    """Return the same of the pipeline of Ray's documentation, with a task for each row group."""
    rows = decoding.locate_rows(open_dataset(epoch.url), "train")
    groups = np.arange(len(rows.groups))[np.cumsum(rows.groups) <= epoch.images]
    items = ray.data.from_items([{"group": int(group)} for group in groups], override_num_blocks=len(groups))
    decode = partial(_decode_group, rows=rows, size=(epoch.image_size, epoch.image_size), seed=epoch.seed)
    images = items.map_batches(decode, batch_size=1)  # pyright: ignore[reportArgumentType]
    images.context.enable_progress_bars = images.context.print_on_execution_start = False

    def batches(split: ray.data.DataIterator) -> Iterator[int]:
        for batch in split.iter_batches(batch_size=epoch.batch // consumers, batch_format="numpy"):
            yield len(batch["image"])

    return [batches(split) for split in images.streaming_split(consumers, equal=True)]


def _decode_group(
    item: dict[str, np.ndarray], rows: decoding.SplitRows, size: tuple[int, int], seed: int
) -> dict[str, np.ndarray]:
    import torch

    from vitray.data.augment.crops import augment_image

    torch.set_num_threads(1)
    group = int(item["group"][0])
    stored = decoding.read_rows(np.arange(rows.starts[group], rows.starts[group + 1]), rows)
    images = [
        augment_image(decoding.decode_image(data), CROP, size, generator(seed, 0, key))
        for data, _, key in stored.values()
    ]
    return {"image": np.stack(images), "label": np.array([label for _, label, _ in stored.values()])}


def slow_decoding() -> None:
    """Let each decoded image of this process take longer without using a CPU, and log its task and time."""
    decode, seconds = decoding.decode_image, float(os.environ[DECODE_MS]) / 1000
    log = Path(os.environ[TASK_LOG], str(os.getpid()))

    def decode_slowly(content: bytes) -> np.ndarray:
        start = time.monotonic()
        time.sleep(seconds)
        image = decode(content)
        with log.open("a") as file:
            print(ray.get_runtime_context().get_task_id(), start, time.monotonic(), file=file)
        return image

    decoding.decode_image = decode_slowly


def tasks_in_flight(log: Path, start: float, end: float) -> tuple[int, float]:
    """Return the most tasks that decode at the same time, and their mean between two readings of the clock."""
    spans: dict[str, tuple[float, float]] = {}
    for line in "".join(path.read_text() for path in log.iterdir()).splitlines():
        task, begun, ended = line.split()
        if start <= float(begun) <= end:
            spans[task] = spans.get(task, (float(begun), 0.0))[0], float(ended)
    begins, ends = np.sort(np.array([*spans.values()]).T)
    at_once = np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins)
    return int(at_once.max()), float((ends - begins).sum() / (end - start))
