"""Cluster capacity: the number of complete trials that fit at the same time.

Ray may place a part of a trial and then wait forever for the rest. A trial takes workers, each on one node and with its
GPU share on one GPU; a driver; and whole CPUs for image decoding on any node. Or it is a single process.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

# Workers that are priced together. Prices repeat within 100 workers, as CPUs per worker have two decimals.
BATCH = 100


class TrialResources(NamedTuple):
    """The resources of one trial."""

    workers: int
    cpus: float
    """CPUs per worker."""
    gpus: float
    """GPUs per worker: a whole number, or a share of one GPU."""
    data_cpus: float
    """CPUs kept free for image decoding, each a whole one on any node."""
    driver_cpus: float
    """At most 1, rounded up to 1/n of a CPU: 0.3 counts as 1/3."""
    is_alone: bool = False
    """Whether its one worker is the driver, whose CPUs include those that decode."""


class Node(NamedTuple):
    """The resources of one machine."""

    cpus: float
    gpus: float = 0


class Capacity(NamedTuple):
    """The trials that fit on a cluster."""

    concurrent: int
    """Complete trials at the same time."""
    workers: tuple[int, ...]
    """Workers per node."""
    resources: TrialResources
    limit: str
    """The reason why no further trial fits."""

    def waves(self, trials: int) -> int:
        """Return the number of rounds in which this many trials run."""
        assert self.concurrent, self.limit
        return -(-trials // self.concurrent)


class _Free(NamedTuple):
    """Free CPUs of a node."""

    whole: int
    """Whole CPUs, for image decoding."""
    drivers: int
    """Drivers that fit; `whole` if drivers reserve no CPU."""


def fit_trials(nodes: Sequence[Node], resources: TrialResources, trials: int = 1000) -> Capacity:
    """Pack up to this many trials onto the nodes, greedily.

    Each worker goes to the node where it and the next ones cost the fewest whole CPUs. Ray can place every returned
    packing. The packing loses less than a CPU per node to fractions, so the optimum has at most
    ceil(nodes / CPUs per trial) trials more. The tests compare it with an exhaustive search and find no difference.
    """
    workers, data = resources.workers, math.ceil(resources.data_cpus)
    assert workers > 0, resources
    assert 0 <= resources.driver_cpus <= 1, resources
    assert resources.cpus > 0 or resources.gpus > 0, resources
    drivers_per_cpu = int(1 / _exact(resources.driver_cpus)) if resources.driver_cpus else 0
    # A whole CPU for decoding takes the place of `drivers_per_cpu` drivers.
    drivers = data * drivers_per_cpu + (drivers_per_cpu > 0)
    free: list[list[_Free]] = []  # of each node with 0, 1, 2, ... workers on it
    for node in nodes:
        counts = range(min(_room(node, resources), trials * workers) + 1)
        left = [_exact(node.cpus) - count * _exact(resources.cpus) for count in counts]
        free.append([_Free(int(cpus), int(cpus * max(1, drivers_per_cpu))) for cpus in left])
    prices = [_price(steps, 0, index) for index, steps in enumerate(free) if len(steps) > 1]
    heapq.heapify(prices)
    free_cpus, driver_slots = sum(steps[0].whole for steps in free), sum(steps[0].drivers for steps in free)
    placed, best, spread = [0] * len(nodes), 0, [0] * len(nodes)
    while prices and sum(placed) < trials * workers:
        *_, index = heapq.heappop(prices)
        before, after = free[index][placed[index] : placed[index] + 2]
        placed[index] += 1
        free_cpus += after.whole - before.whole
        driver_slots += after.drivers - before.drivers
        if placed[index] + 1 < len(free[index]):
            heapq.heappush(prices, _price(free[index], placed[index], index))
        number, rest = divmod(sum(placed), workers)
        if not rest and free_cpus >= number * data and driver_slots >= number * drivers:
            best, spread = number, list(placed)
    return Capacity(best, tuple(spread), resources, _limit(nodes, resources, trials, best))


def describe_capacity(capacity: Capacity, trials: int, nodes: Sequence[Node]) -> str:
    """Return one line, as in `24 trials, 6 at a time on 8 GPUs, 4 waves`."""
    concurrent = f"{min(trials, capacity.concurrent)} at a time on {_devices(nodes, capacity.resources)}"
    return f"{_count(trials, 'trial')}, {concurrent}, {_count(capacity.waves(trials), 'wave')}"


def _exact(number: float) -> Fraction:
    """Return 0.1 as 1/10."""
    return Fraction(str(number))


def _gpu_room(node: Node, resources: TrialResources) -> int:
    """Return the number of workers that the GPUs of a node hold."""
    gpus = _exact(resources.gpus)
    return int(int(node.gpus) // gpus) if gpus >= 1 else int(node.gpus) * int(1 / gpus)


def _room(node: Node, resources: TrialResources) -> int:
    """Return the number of workers that a node holds."""
    rooms = [_gpu_room(node, resources)] if resources.gpus else []
    rooms += [int(_exact(node.cpus) // _exact(resources.cpus))] if resources.cpus else []
    return min(rooms)


def _price(free: list[_Free], placed: int, index: int) -> tuple[float, float, int, int]:
    """Return the lowest cost per worker of the next batch on a node; on a tie, nodes with more free CPUs come first."""
    now = free[placed]
    batches = enumerate(free[placed + 1 : placed + 1 + BATCH], start=1)
    cost = min(((now.whole - then.whole) / count, (now.drivers - then.drivers) / count) for count, then in batches)
    return *cost, -free[placed + 1].drivers, index


def _devices(nodes: Sequence[Node], resources: TrialResources) -> str:
    if resources.gpus:
        return _count(sum(int(node.gpus) for node in nodes), "GPU")
    return _count(sum(node.cpus for node in nodes), "CPU")


def _limit(nodes: Sequence[Node], resources: TrialResources, trials: int, best: int) -> str:
    """Return the reason why no further trial fits."""
    gpu_trials = sum(_gpu_room(node, resources) for node in nodes) // resources.workers if resources.gpus else None
    cpus = _count(sum(node.cpus for node in nodes), "CPU")
    if best:
        full = _devices(nodes, resources) if gpu_trials == best else cpus
        return "all fit" if best == trials else f"no more than {best} fit on {full}"
    worker = _count(resources.cpus, "CPU")
    worker = f"{_count(resources.gpus, 'GPU')} and {worker}" if resources.gpus else worker
    has = f"{_devices(nodes, resources)} and {cpus}" if resources.gpus else cpus
    lacks = "too few GPUs" if gpu_trials == 0 else "too few CPUs"
    if not any(_room(node, resources) for node in nodes):
        lacks = f"and no node has enough for {'it' if resources.is_alone else 'one worker'}"
    takes = f"{_count(resources.workers, 'worker')} of {worker}, {_count(resources.data_cpus, 'CPU')} to decode images"
    takes = f"{worker}, on one node" if resources.is_alone else f"{takes} and {resources.driver_cpus:g} for its driver"
    has = f"the cluster has {has} on {_count(len(nodes), 'node')}, {lacks}"
    return f"not one trial fits: it takes {takes}; {has}"


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"
