"""python experiments/measure_blocks.py: blocks per second that one Ray Data execution hands to its consumers.

The blocks are trivial, so the time is that of Ray's coordinator, tasks and calls. Training on 64 workers has eight
blocks a task, on up to eight workers one.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import psutil
import ray.data

from vitray.cluster.session import ray_session

CONSUMERS = 8


def main() -> None:
    """Print a table."""
    print("| tasks | blocks a task | first block, s | blocks/s | coordinator CPU us/block |\n|---|---|---|---|---|")
    with ray_session(cpus=2):
        measure(16, 1, shown=False)  # starts the worker processes
        for blocks_of_task in (8, 1):
            measure(1024, blocks_of_task)


def measure(tasks: int, blocks_of_task: int, shown: bool = True) -> None:
    """Print a row of the table."""
    start = time.monotonic()
    items = ray.data.from_items([{"piece": piece} for piece in range(tasks)], override_num_blocks=tasks)
    blocks: Any = items.map_batches(partial(yield_blocks, count=blocks_of_task), batch_size=1)
    blocks.context.execution_options.preserve_order = True
    blocks.context.target_max_block_size = 1
    blocks.context.enable_progress_bars = blocks.context.print_on_execution_start = False
    splits = blocks.streaming_split(CONSUMERS, equal=False)
    with ThreadPoolExecutor(CONSUMERS) as pool:
        times = [time for consumed in pool.map(consume, splits) for time in consumed]
    (coordinator,) = [
        child for child in psutil.Process().children(recursive=True) if "SplitCoordinator" in " ".join(child.cmdline())
    ]
    cpu = 1e6 * sum(coordinator.cpu_times()[:2]) / len(times)
    speed = len(times) / (max(times) - min(times))
    if shown:
        print(f"| {tasks} | {blocks_of_task} | {min(times) - start:.1f} | {speed:.0f} | {cpu:.0f} |", flush=True)


def consume(split: ray.data.DataIterator) -> list[float]:
    """Return the times at which blocks arrived."""
    return [time.monotonic() for _ in split.iter_batches(batch_size=None, prefetch_batches=2)]


def yield_blocks(item: dict[str, np.ndarray], count: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield some blocks of one row."""
    for _ in range(count):
        yield item


if __name__ == "__main__":
    main()
