"""python experiments/measure_scaling.py DATASET: many consumers of one stream on several nodes, as docs/scaling.md.

The alternative is Ray Data's own reader and split. The nodes are logical ones on this machine, so a decoded image
sleeps for some milliseconds: the machine then has CPUs to spare, and the pipelines differ by how well they use the
nodes. Consumers are threads of this process.
"""

import argparse
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import Any, NamedTuple

import numpy as np
import psutil
import ray
import ray.data
import torch
from ray.cluster_utils import Cluster

from vitray.bench.charts import draw_bars
from vitray.bench.ingest import CROP, cpu_seconds_since, process_tree, tree_cpu_seconds
from vitray.bench.results import Results
from vitray.data.augment.keyed_random import generator
from vitray.data.shards import open_dataset
from vitray.data.stream import decoding
from vitray.data.stream.batches import Share, StreamSpec
from vitray.data.stream.ray_reader import RayReader
from vitray.data.stream.stream import Stream
from vitray.system.storage import scratch_folder
from vitray.system.timing import Spread, circumstances, in_rounds, progress, ratio_of, spread_of

# Object store of all nodes together, and of the driver's.
STORE, DRIVER_STORE = 1200 * 10**6, 200 * 10**6
# Reading the memory of a process tree takes a tenth of a second.
SAMPLE_SECONDS = 3.0


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


def main() -> None:
    """Measure both pipelines for each number of consumers, print and save the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="a dataset written by vitray shard")
    parser.add_argument("--nodes", type=int, default=6, help="logical nodes on this machine (%(default)s)")
    parser.add_argument("--cpus", type=int, default=6, help="CPUs of all nodes together (%(default)s)")
    parser.add_argument("--consumers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="(%(default)s)")
    parser.add_argument("--images", type=int, default=3072, help="images of a pass (%(default)s)")
    parser.add_argument("--decode-ms", type=float, default=10.0, help="time to decode an image (%(default)s)")
    parser.add_argument("--batch", type=int, default=192, help="images of a global batch (%(default)s)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of a side (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the results (%(default)s)")
    options = parser.parse_args()
    if options.cpus % options.nodes:
        parser.error("--cpus: expected a multiple of --nodes")
    if "RAY_ADDRESS" in os.environ:
        parser.error("RAY_ADDRESS is set, and this script starts nodes of its own")
    os.environ |= {"RAY_worker_niceness": "0"}
    head = {"num_cpus": 0, "object_store_memory": DRIVER_STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(options.nodes):
            cluster.add_node(num_cpus=options.cpus // options.nodes, object_store_memory=STORE // options.nodes)
        with scratch_folder() as log:

            def start_process() -> None:
                slow_decoding(options.decode_ms / 1000, log)

            runtime: Any = {"worker_process_setup_hook": start_process}
            with ray.init(cluster.address, runtime_env=runtime, logging_level=logging.WARNING):
                report(options, measure(options, log))
    finally:
        cluster.shutdown()


def measure(options: argparse.Namespace, log: Path) -> dict[tuple[str, int], list[Reading]]:
    """Return the readings of each pipeline and number of consumers."""
    idle = tree_usage()

    def read(pipeline: Callable[..., list[Iterator[int]]], consumers: int, number: int) -> Reading:
        reading = read_pass(partial(pipeline, options, number, consumers), log, idle)
        progress(f"round {number} of {options.rounds}: {pipeline.__name__}, {consumers} consumers: {reading}")
        gc.collect()  # ends the execution before the next begins
        return reading

    for pipeline in (stream, stock):
        read(pipeline, max(options.consumers), options.rounds)  # starts the worker processes
    variants = {
        (pipeline.__name__, consumers): partial(read, pipeline, consumers)
        for consumers in options.consumers
        for pipeline in (stream, stock)
    }
    return in_rounds(variants, options.rounds)


def read_pass(pipeline: Callable[[], list[Iterator[int]]], log: Path, idle: tuple[int, int]) -> Reading:
    """Return what one pass of a pipeline takes, by all consumers at once."""

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
        memory_mb=(highest[0] - idle[0]) / 1e6 / len(iterators),
        threads=(highest[1] - idle[1]) / len(iterators),
        slowest_batches=float(np.percentile(gaps, 99)) if len(gaps) else 0.0,
        fairness=max(ends) / min(ends),
    )


def report(options: argparse.Namespace, readings: dict[tuple[str, int], list[Reading]]) -> None:
    """Print and save the table."""
    device = torch.device("cpu")
    ideal = options.cpus / options.decode_ms * 1000
    about = (
        f"{options.images} images to {options.image_size} px, batches of {options.batch}, {options.cpus} CPUs on"
        f" {options.nodes} nodes, {options.decode_ms:g} ms an image (at most {ideal:.0f} images/s)"
    )
    spread = "one round" if options.rounds == 1 else f"{options.rounds} interleaved rounds, median ± half the IQR"
    print(f"{circumstances(device)}\n{about}; {spread}\n")
    headings = ["pipeline", "consumers", *HEADINGS.values()]
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    results = Results(options.out / "scaling", device, {"circumstances": circumstances(device), "about": about})
    for (name, consumers), rounds in readings.items():
        speeds = [[reading.images_per_second for reading in readings[each, consumers]] for each in (name, "stock")]
        spreads: dict[str, Spread] = {"ratio": ratio_of(*speeds)}
        spreads |= {column: spread_of([getattr(each, column) for each in rounds]) for column in Reading._fields}
        cells = [str(spreads[column]).removesuffix(" ± 0") for column in HEADINGS]
        print(f"| {' | '.join([name, str(consumers), *cells])} |")
        row: dict[str, Any] = {"pipeline": name, "nodes": options.nodes, "consumers": consumers}
        for column in HEADINGS:
            row |= spreads[column].columns(column, 4)
        results.add(row)
    bars = {f"{row['pipeline']}, {row['consumers']} consumers": row["images_per_second"] for row in results.rows}
    results.finish(chart=draw_bars(bars, "images per second", f"{circumstances(device)}\n{about}"))


# ---- the pipelines ---------------------------------------------------------------------------------------------------


class ThreadBroadcast:
    """One consumer's value for all consumers, where these are threads."""

    def __init__(self, threads: int) -> None:
        self._barrier, self._value = Barrier(threads, timeout=120), None

    def __call__(self, value: Any, _rank: int = 0) -> Any:
        if value is not None:  # the others' is None, or equal
            self._value = value
        self._barrier.wait()
        value = self._value
        self._barrier.wait()
        return value


def stream(options: argparse.Namespace, seed: int, consumers: int) -> list[Iterator[int]]:
    """Return the sizes of the stream's batches for each consumer."""
    spec = StreamSpec("train", options.batch, (options.image_size, options.image_size), CROP, seed=seed)
    broadcast = ThreadBroadcast(consumers)
    dataset, steps = open_dataset(options.dataset), options.images // options.batch
    shares = [Share(rank, consumers, broadcast) for rank in range(consumers)]
    streams = [Stream(dataset, spec, RayReader).train(0, steps, share) for share in shares]
    return [(len(batch.images) for batch in batches) for batches in streams]


def stock(options: argparse.Namespace, seed: int, consumers: int) -> list[Iterator[int]]:
    """Return the same of the pipeline of Ray's documentation, with a task for each row group."""
    rows = decoding.locate_rows(open_dataset(options.dataset), "train")
    groups = np.arange(len(rows.groups))[np.cumsum(rows.groups) <= options.images]
    items = ray.data.from_items([{"group": int(group)} for group in groups], override_num_blocks=len(groups))
    decode = partial(decode_group, rows=rows, size=(options.image_size, options.image_size), seed=seed)
    images: Any = items.map_batches(decode, batch_size=1)
    images.context.enable_progress_bars = images.context.print_on_execution_start = False

    def batches(split: ray.data.DataIterator) -> Iterator[int]:
        for batch in split.iter_batches(batch_size=options.batch // consumers, batch_format="numpy"):
            yield len(batch["image"])

    return [batches(split) for split in images.streaming_split(consumers, equal=True)]


def decode_group(
    item: dict[str, np.ndarray], rows: decoding.SplitRows, size: tuple[int, int], seed: int
) -> dict[str, np.ndarray]:
    """Return the images of a row group, in a task of Ray's."""
    from vitray.data.augment.crops import augment_image

    torch.set_num_threads(1)
    group = int(item["group"][0])
    stored = decoding.read_rows(np.arange(rows.starts[group], rows.starts[group + 1]), rows)
    images = [
        augment_image(decoding.decode_image(data), CROP, size, generator(seed, 0, key))
        for data, _, key in stored.values()
    ]
    return {"image": np.stack(images), "label": np.array([label for _, label, _ in stored.values()])}


def slow_decoding(seconds: float, folder: Path) -> None:
    """Let each decoded image of this process take longer without using a CPU, and log its task and time."""
    decode, log = decoding.decode_image, folder / str(os.getpid())

    def decode_slowly(content: bytes) -> np.ndarray:
        start = time.monotonic()
        time.sleep(seconds)
        image = decode(content)
        with log.open("a") as file:
            print(ray.get_runtime_context().get_task_id(), start, time.monotonic(), file=file)
        return image

    decoding.decode_image = decode_slowly


# ---- tasks, memory and threads ---------------------------------------------------------------------------------------


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


def tree_usage() -> tuple[int, int]:
    """Return the memory of the process tree, its shared memory counted once, and its threads."""
    memory = threads = 0
    for process in process_tree():
        with suppress(psutil.NoSuchProcess):
            memory += process.memory_full_info().pss
            threads += process.num_threads()
    return memory, threads


@contextmanager
def highest_usage(every: float) -> Iterator[list[int]]:
    """Sample the process tree every some seconds; the list holds the most memory and the most threads afterwards."""
    done, highest = Event(), [*tree_usage()]

    def sample() -> None:
        while not done.wait(every):
            highest[:] = map(max, highest, tree_usage())

    with ThreadPoolExecutor(1) as pool:
        sampler = pool.submit(sample)
        try:
            yield highest
        finally:
            done.set()
            sampler.result()


if __name__ == "__main__":
    main()
