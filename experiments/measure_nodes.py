"""python experiments/measure_nodes.py DATASET: the stream on several nodes, with one execution and with one for each.

The nodes are logical ones on this machine, so the speeds say little; bytes between nodes and the coordinators' CPU time
are those of real nodes. Workers are actors, as many on each node.
"""

import argparse
import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vitray.bench.ingest import CROP
from vitray.cluster import session
from vitray.data.shards import open_dataset
from vitray.data.stream import ray_reader
from vitray.data.stream.batches import Share, StreamSpec
from vitray.data.stream.stream import Stream
from vitray.system.timing import circumstances, in_rounds, spread_of

# Of all nodes together, and of the driver's; CPUs of a node, which only Ray counts.
STORE, DRIVER_STORE, CPUS = 1600 * 10**6, 200 * 10**6, 64


def note_nodes() -> None:
    """Let each block of this process say on which node it was decoded."""
    decode = ray_reader._decode_piece

    @functools.wraps(decode)
    def decode_here(*arguments: Any, shared: Any) -> Iterator[Any]:
        for row in decode(*arguments, shared=shared):
            yield row | {"node": [ray.get_runtime_context().get_node_id()]}

    ray_reader._decode_piece = decode_here


@ray.remote(num_cpus=0)
class Exchange:
    """What workers tell each other, by the number of the call."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}

    async def put(self, call: int, value: Any) -> None:
        """Tell all."""
        self._values[call] = value

    async def get(self, call: int) -> Any:
        """Wait for what the teller says."""
        while call not in self._values:
            await asyncio.sleep(0.01)
        return self._values[call]


@ray.remote(num_cpus=0)
class Worker:
    """Reads its part of a stream."""

    def __init__(self) -> None:
        self._received: Counter[bool] = Counter()
        started, own = ray_reader._started, ray.get_runtime_context().get_node_id()

        def counted(iterator: Any) -> Iterator[Any]:
            for block in started(iterator):
                self._received[str(block.pop("node")) == own] += block["image"].nbytes
                yield block

        ray_reader._started = counted

    def read(self, options: argparse.Namespace, rank: int, nodes: int, exchange: Any) -> tuple[float, float, Any]:
        """Return when the first and the last batch arrived, and the bytes of blocks from this node and from others."""
        calls = 0

        def broadcast(value: Any, root: int = 0) -> Any:
            nonlocal calls
            calls += 1
            if rank == root:
                ray.get(exchange.put.remote(calls, value))
            return ray.get(exchange.get.remote(calls))

        size = options.image_size, options.image_size
        spec = StreamSpec("train", options.batch, size, CROP, seed=nodes, cpus=options.nodes)  # few tasks at a time
        stream = Stream(open_dataset(options.dataset), spec, ray_reader.RayReader)
        share = Share(rank, options.workers, broadcast, nodes)
        self._received.clear()
        times = [time.time() for _ in stream.train(0, options.images // options.batch, share)]
        return times[0], times[-1], Counter(self._received)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="a dataset written by vitray shard")
    parser.add_argument("--nodes", type=int, default=4, help="logical nodes on this machine (%(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="of all nodes together (%(default)s)")
    parser.add_argument("--images", type=int, default=12288, help="images of a pass (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="images of a global batch (%(default)s)")
    parser.add_argument("--image-size", type=int, default=64, help="pixels of a side (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (%(default)s)")
    options = parser.parse_args()
    session.prepare_environment()
    head = {"num_cpus": 0, "object_store_memory": DRIVER_STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(options.nodes):
            cluster.add_node(num_cpus=CPUS, object_store_memory=STORE // options.nodes)
        with ray.init(
            cluster.address, runtime_env={"worker_process_setup_hook": note_nodes}, logging_level=logging.ERROR
        ):
            report(options)
    finally:
        cluster.shutdown()


def report(options: argparse.Namespace) -> None:
    """Read in turns with one execution and with one for each node."""
    places = [node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU")]
    workers = [
        Worker.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(places[rank % options.nodes], soft=False)
        ).remote()
        for rank in range(options.workers)
    ]

    def read(nodes: int, _number: int = 0) -> tuple[float, float, float, float]:
        before, busiest = coordinators(), 0.0
        exchange, start = Exchange.remote(), time.time()
        waiting = [worker.read.remote(options, rank, nodes, exchange) for rank, worker in enumerate(workers)]
        asked = list(waiting)
        while waiting:  # a coordinator ends with its execution
            busiest = max([busiest, *(cpu for process, cpu in coordinators().items() if process not in before)])
            waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.5)[1]
        first, last, received = zip(*ray.get(asked), strict=True)
        total = sum(received, Counter())
        speed = options.images / (max(last) - start)
        return 100 * total[False] / total.total(), busiest, max(first) - start, speed

    for nodes in (1, options.nodes):
        read(nodes)  # starts the worker processes
    rounds = in_rounds({nodes: functools.partial(read, nodes) for nodes in (1, options.nodes)}, options.rounds)
    print(f"{circumstances(torch.device('cpu'))}; {options.nodes} logical nodes, {options.workers} workers\n")
    columns = ("executions", "bytes from other nodes, %", "busiest coordinator, CPU s", "first batch, s", "images/s")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for nodes, readings in rounds.items():
        cells = (str(spread_of(list(column))) for column in zip(*readings, strict=True))
        print(f"| {nodes} | {' | '.join(cells)} |")


def coordinators() -> dict[int, float]:
    """Return the CPU seconds of each coordinator of this cluster."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if "SplitCoordinator" in " ".join(child.cmdline()):
                found[child.pid] = sum(child.cpu_times()[:2])
    return found


if __name__ == "__main__":
    main()
