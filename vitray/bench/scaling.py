"""One execution for many consumers on several nodes, against Ray Data's own reader and split.

The nodes are logical ones on this machine, so a decoded image sleeps for some milliseconds: the machine then has CPUs
to spare, and the pipelines differ by how well they use the nodes. Consumers are threads of this process.
"""

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster

from vitray.bench.charts import draw_bars, write_results
from vitray.bench.process_tree import Usage, cpu_seconds_since, highest_usage, tree_cpu_seconds, tree_usage
from vitray.bench.rounds import Spread, circumstances, progress, ratio_of, rotated, spread_of
from vitray.bench.scaling_pipelines import DECODE_MS, TASK_LOG, Epoch, slow_decoding, stock, stream, tasks_in_flight
from vitray.errors import ConfigError
from vitray.system.storage import scratch_folder

# Object store of all nodes together, and of the driver's.
STORE, DRIVER_STORE = 1200 * 10**6, 200 * 10**6
# Reading the memory of a process tree takes a tenth of a second.
SAMPLE_SECONDS = 3.0
PIPELINES = {"stream": stream, "stock": stock}


class ScalingSettings(NamedTuple):
    """Settings of `vitray bench scaling`."""

    url: str
    image_size: int
    batch: int
    nodes: int
    cpus: int
    """Of all nodes together."""
    consumers: list[int]
    images: int
    decode_ms: float
    rounds: int
    out: Path


class Reading(NamedTuple):
    """One pass over the images."""

    images_per_second: float
    """From the start to the last batch of any consumer."""
    cpu_us: float
    """CPU time of the process tree, per image."""
    first_batch: float
    """Seconds until each consumer has one."""
    tasks_highest: float
    """The most tasks that decode at the same time."""
    tasks_mean: float
    """The mean number of tasks that decode, from the start to the last batch."""
    memory_mb: float
    """Memory of the process tree above that of the idle cluster, per consumer."""
    threads: float
    """Threads of the process tree above those of the idle cluster, per consumer."""
    slowest_batches: float
    """99th percentile of the time between two batches of a consumer, in seconds."""
    fairness: float
    """Time of the slowest consumer over that of the fastest, for equal shares."""


HEADINGS = {
    "images_per_second": "images/s",
    "ratio": "over stock",
    "cpu_us": "CPU us/image",
    "first_batch": "first batch, s",
    "tasks_highest": "most tasks",
    "tasks_mean": "mean tasks",
    "memory_mb": "MB/consumer",
    "threads": "threads/consumer",
    "slowest_batches": "99 % between batches, s",
    "fairness": "slowest/fastest",
}


def measure_scaling(settings: ScalingSettings) -> dict[str, Any]:
    """Measure both pipelines for each number of consumers, print and save the table, and return its rows."""
    if settings.cpus % settings.nodes:
        raise ConfigError(f"--cpus {settings.cpus}: expected a multiple of --nodes {settings.nodes}")
    if ray.is_initialized() or "RAY_ADDRESS" in os.environ:
        raise ConfigError("RAY_ADDRESS: is set; this benchmark starts nodes of its own, expected no cluster")
    os.environ |= {"RAY_worker_niceness": "0"}
    head = {"num_cpus": 0, "object_store_memory": DRIVER_STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(settings.nodes):
            cluster.add_node(num_cpus=settings.cpus // settings.nodes, object_store_memory=STORE // settings.nodes)
        with scratch_folder() as log:
            variables = {DECODE_MS: str(settings.decode_ms), TASK_LOG: str(log)}
            hook = {"worker_process_setup_hook": slow_decoding, "env_vars": variables}
            with ray.init(cluster.address, runtime_env=hook, logging_level=logging.WARNING):
                return _report(settings, _measure(settings, log))
    finally:
        cluster.shutdown()


def _measure(settings: ScalingSettings, log: Path) -> dict[tuple[str, int], list[Reading]]:
    idle = tree_usage()
    # The first turn starts the worker processes.
    turns = [(0, max(settings.consumers))]
    turns += [(turn, consumers) for turn in range(1, settings.rounds + 1) for consumers in settings.consumers]
    readings: dict[tuple[str, int], list[Reading]] = {}
    for turn, consumers in turns:
        for name in rotated(list(PIPELINES), turn):
            epoch = Epoch(settings.url, settings.image_size, settings.batch, settings.images, turn)
            reading = _read(partial(PIPELINES[name], epoch, consumers), log, idle)
            if turn:
                readings.setdefault((name, consumers), []).append(reading)
            progress(f"round {turn} of {settings.rounds}: {name}, {consumers} consumers: {reading}")
            gc.collect()  # ends the execution before the next begins
    return readings


def _read(pipeline: Callable[[], list[Iterator[int]]], log: Path, idle: Usage) -> Reading:
    def consume(batches: Iterator[int]) -> tuple[int, list[float]]:
        count, times = 0, []
        for size in batches:
            count += size
            times.append(time.monotonic())
        return count, times

    before, start = tree_cpu_seconds(), time.monotonic()
    iterators = pipeline()
    with highest_usage(SAMPLE_SECONDS) as highest, ThreadPoolExecutor(len(iterators)) as pool:
        counts, times = zip(*pool.map(consume, iterators), strict=True)
    cpu = cpu_seconds_since(before)
    first, last = max(each[0] for each in times), max(each[-1] for each in times)
    gaps = np.concatenate([np.diff(each) for each in times])
    ends = [each[-1] - start for each in times]
    most, mean = tasks_in_flight(log, start, last)
    return Reading(
        images_per_second=sum(counts) / (last - start),
        cpu_us=1e6 * cpu / sum(counts),
        first_batch=first - start,
        tasks_highest=most,
        tasks_mean=mean,
        memory_mb=(highest[0] - idle.memory) / 1e6 / len(iterators),
        threads=(highest[1] - idle.threads) / len(iterators),
        slowest_batches=float(np.percentile(gaps, 99)) if len(gaps) else 0.0,
        fairness=max(ends) / min(ends),
    )


def _report(settings: ScalingSettings, readings: dict[tuple[str, int], list[Reading]]) -> dict[str, Any]:
    where = circumstances(torch.device("cpu"))
    ideal = settings.cpus / settings.decode_ms * 1000
    about = (
        f"{settings.images} images to {settings.image_size} px, batches of {settings.batch}, {settings.cpus} CPUs on"
        f" {settings.nodes} nodes, {settings.decode_ms:g} ms an image (at most {ideal:.0f} images/s)"
    )
    spread = "one round" if settings.rounds == 1 else f"{settings.rounds} interleaved rounds, median ± half the IQR"
    print(f"{where}\n{about}; {spread}\n")
    headings = ["pipeline", "consumers", *HEADINGS.values()]
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    rows: list[dict[str, Any]] = []
    for (name, consumers), rounds in readings.items():
        speeds = [[reading.images_per_second for reading in readings[each, consumers]] for each in (name, "stock")]
        spreads: dict[str, Spread] = {"ratio": ratio_of(*speeds)}
        spreads |= {column: spread_of([getattr(each, column) for each in rounds]) for column in Reading._fields}
        cells = [str(spreads[column]) for column in HEADINGS]
        if settings.rounds == 1:
            cells = [cell.removesuffix(" ± 0") for cell in cells]
        print(f"| {' | '.join([name, str(consumers), *cells])} |")
        row: dict[str, Any] = {"pipeline": name, "nodes": settings.nodes, "consumers": consumers}
        for column in HEADINGS:
            row |= spreads[column].columns(column, 4)
        rows.append(row)
    bars = {f"{row['pipeline']}, {row['consumers']} consumers": row["images_per_second"] for row in rows}
    chart = draw_bars(bars, "images per second", f"{where}\n{about}")
    return {"circumstances": where, "about": about} | write_results(settings.out, "scaling", rows, chart)
