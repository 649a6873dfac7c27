"""One execution for many consumers on several nodes, against Ray Data's own reader and split.

The nodes are logical ones of one CPU on this machine, so a decoded image sleeps for some milliseconds: the machine then
has CPUs to spare, and the pipelines differ by how well they use the nodes. Consumers are threads of this process.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

import numpy as np
import ray
import ray.data
import torch
from ray.cluster_utils import Cluster

from vitray.bench.charts import draw_bars, write_results
from vitray.bench.ingest import CROP, tree_cpu_seconds
from vitray.bench.rounds import Spread, circumstances, progress, ratio_of, rotated, spread_of
from vitray.data.augment.image import augment_image
from vitray.data.augment.keyed_random import generator
from vitray.data.shards import open_dataset
from vitray.data.stream import Share, Stream, StreamSpec, decoding
from vitray.errors import ConfigError

NODE_STORE = 200 * 10**6
DECODE_MS = "VITRAY_BENCH_DECODE_MS"


class ScalingSettings(NamedTuple):
    """Settings of `vitray bench scaling`."""

    url: str
    image_size: int
    batch: int
    nodes: int
    consumers: list[int]
    images: int
    decode_ms: float
    rounds: int
    out: Path


class Reading(NamedTuple):
    """One pass over the images."""

    images_per_second: float
    """From the start to the last batch of any consumer."""
    first_batch: float
    """Seconds until each consumer has one."""
    slowest_batches: float
    """99th percentile of the time between two batches of a consumer, in seconds."""
    fairness: float
    """Time of the slowest consumer over that of the fastest, for equal shares."""
    cpu_us: float
    """CPU time of the process tree, per image."""


# Starts a pass and returns the iterators of the consumers, which yield the number of images of their batches.
Pipeline = Callable[[int, int], list[Iterator[int]]]


def measure_scaling(settings: ScalingSettings) -> dict[str, Any]:
    """Measure both pipelines for each number of consumers, print and save the table, and return its rows."""
    if ray.is_initialized() or "RAY_ADDRESS" in os.environ:
        raise ConfigError("RAY_ADDRESS: is set; this benchmark starts nodes of its own, wanted no cluster")
    os.environ |= {DECODE_MS: str(settings.decode_ms), "RAY_worker_niceness": "0"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": NODE_STORE})
    try:
        for _ in range(settings.nodes):
            cluster.add_node(num_cpus=1, object_store_memory=NODE_STORE)
        hook = {"worker_process_setup_hook": slow_decoding, "env_vars": {DECODE_MS: str(settings.decode_ms)}}
        with ray.init(cluster.address, runtime_env=hook, logging_level=logging.WARNING):
            return _report(settings, _measure(settings))
    finally:
        cluster.shutdown()


def slow_decoding() -> None:
    """Let each decoded image of this process take longer, without using a CPU."""
    decode, seconds = decoding.decode_image, float(os.environ[DECODE_MS]) / 1000

    def decode_slowly(content: bytes) -> np.ndarray:
        time.sleep(seconds)
        return decode(content)

    decoding.decode_image = decode_slowly


def _measure(settings: ScalingSettings) -> dict[tuple[str, int], list[Reading]]:
    pipelines: dict[str, Pipeline] = {"stream": partial(_streams, settings), "stock": partial(_stock, settings)}
    readings: dict[tuple[str, int], list[Reading]] = {}
    for turn in range(settings.rounds + 1):
        for consumers in settings.consumers:
            for name in rotated(list(pipelines), turn):
                reading = _read(pipelines[name](consumers, turn))
                if turn:  # the first turn starts the worker processes
                    readings.setdefault((name, consumers), []).append(reading)
                progress(f"round {turn} of {settings.rounds}: {name}, {consumers} consumers: {reading}")
    return readings


def _streams(settings: ScalingSettings, consumers: int, turn: int) -> list[Iterator[int]]:
    spec = StreamSpec("train", settings.batch, (settings.image_size, settings.image_size), CROP, seed=turn)
    broadcast = _Broadcast(consumers)
    dataset, steps = open_dataset(settings.url), settings.images // settings.batch
    streams = [Stream(dataset, spec).train(0, steps, Share(rank, consumers, broadcast)) for rank in range(consumers)]
    return [(len(batch.images) for batch in stream) for stream in streams]


class _Broadcast:
    """The first thread's value for all threads."""

    def __init__(self, threads: int) -> None:
        self._barrier, self._value = Barrier(threads), None

    def __call__(self, value: Any) -> Any:
        self._value = value or self._value
        self._barrier.wait()
        value = self._value
        self._barrier.wait()
        return value


def _stock(settings: ScalingSettings, consumers: int, turn: int) -> list[Iterator[int]]:
    """Return the pipeline of Ray's documentation, with a task for each row group."""
    rows = decoding.locate_rows(open_dataset(settings.url), "train")
    groups = np.arange(len(rows.groups))[np.cumsum(rows.groups) <= settings.images]
    items = ray.data.from_items([{"group": int(group)} for group in groups], override_num_blocks=len(groups))
    decode = partial(_decode_group, rows=rows, size=(settings.image_size, settings.image_size), seed=turn)
    images = items.map_batches(decode, batch_size=1)  # pyright: ignore[reportArgumentType]
    images.context.enable_progress_bars = images.context.print_on_execution_start = False

    def batches(split: ray.data.DataIterator) -> Iterator[int]:
        for batch in split.iter_batches(batch_size=settings.batch // consumers, batch_format="numpy"):
            yield len(batch["image"])

    return [batches(split) for split in images.streaming_split(consumers, equal=True)]


def _decode_group(
    item: dict[str, np.ndarray], rows: decoding.SplitRows, size: tuple[int, int], seed: int
) -> dict[str, np.ndarray]:
    torch.set_num_threads(1)
    group = int(item["group"][0])
    stored = decoding.read_rows(np.arange(rows.starts[group], rows.starts[group + 1]), rows)
    images = [
        augment_image(decoding.decode_image(data), CROP, size, generator(seed, 0, key))
        for data, _, key in stored.values()
    ]
    return {"image": np.stack(images), "label": np.array([label for _, label, _ in stored.values()])}


def _read(iterators: list[Iterator[int]]) -> Reading:
    def consume(batches: Iterator[int]) -> tuple[int, list[float]]:
        count, times = 0, []
        for size in batches:
            count += size
            times.append(time.perf_counter())
        return count, times

    before, start = tree_cpu_seconds(), time.perf_counter()
    with ThreadPoolExecutor(len(iterators)) as pool:
        counts, times = zip(*pool.map(consume, iterators), strict=True)
    cpu = sum(seconds - before.get(pid, 0.0) for pid, seconds in tree_cpu_seconds().items())
    first, last = max(each[0] for each in times), max(each[-1] for each in times)
    gaps = np.concatenate([np.diff(each) for each in times])
    ends = [each[-1] - start for each in times]
    return Reading(
        images_per_second=sum(counts) / (last - start),
        first_batch=first - start,
        slowest_batches=float(np.percentile(gaps, 99)) if len(gaps) else 0.0,
        fairness=max(ends) / min(ends),
        cpu_us=1e6 * cpu / sum(counts),
    )


def _report(settings: ScalingSettings, readings: dict[tuple[str, int], list[Reading]]) -> dict[str, Any]:
    where = circumstances(torch.device("cpu"))
    ideal = settings.nodes / settings.decode_ms * 1000
    about = (
        f"{settings.images} images to {settings.image_size} px, batches of {settings.batch}, {settings.nodes} nodes"
        f" of one CPU, {settings.decode_ms:g} ms an image (at most {ideal:.0f} images/s)"
    )
    print(f"{where}\n{about}; {settings.rounds} interleaved rounds, median ± half the interquartile range\n")
    columns = list(Reading._fields)
    print(f"{'pipeline':<10}{'consumers':>10}" + "".join(f"{name:>22}" for name in [*columns, "ratio"]))
    rows: list[dict[str, Any]] = []
    for (name, consumers), rounds in readings.items():
        spreads: dict[str, Spread] = {
            column: spread_of([getattr(reading, column) for reading in rounds]) for column in columns
        }
        speeds = [[reading.images_per_second for reading in readings[each, consumers]] for each in (name, "stock")]
        spreads["ratio"] = ratio_of(*speeds)
        print(f"{name:<10}{consumers:>10}" + "".join(f"{spread!s:>22}" for spread in spreads.values()))
        row: dict[str, Any] = {"pipeline": name, "consumers": consumers}
        for column, spread in spreads.items():
            row |= spread.columns(column, 4)
        rows.append(row)
    bars = {f"{row['pipeline']}, {row['consumers']} consumers": row["images_per_second"] for row in rows}
    chart = draw_bars(bars, "images per second", f"{where}\n{about}")
    return {"circumstances": where, "about": about} | write_results(settings.out, "scaling", rows, chart)
