"""The stages of a recipe, measured on the nodes of a cluster: its decoding on each, its step on one device."""

from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vitray.bench.recipe_stages import background_load, measure_cpu, measure_stages, open_stream, scale_to_full_load
from vitray.bench.verdict import Machines, StageSeconds
from vitray.config import Run
from vitray.errors import ConfigError, RunError
from vitray.system import storage

# Seconds for a node to start the task, which imports torch, beside those of the measurement.
START_SECONDS = 180


class NodeSeconds(NamedTuple):
    """The seconds per image of a node's CPU."""

    node: str
    cpus: float
    read: float
    decode: float
    augment: float


def measure_cluster(run: Run, placement: Any, seconds: float) -> tuple[Machines, StageSeconds, list[NodeSeconds]]:
    """Return what a run has on the cluster, its stages, and those of each node.

    `placement` is the run's Placement, `seconds` the time of all measurements. The device is one of those that Ray
    gives a worker, and the stages of its node slow each other down as in training.
    """
    lowest, workers = placement.workers
    if lowest != workers:
        raise ConfigError(f"compute.workers: got {run.compute.workers}, expected one number")
    cpus, gpus = ray.cluster_resources()["CPU"], workers * run.compute.gpus if placement.use_gpu else 0
    machines = Machines(workers, cpus - workers * placement.cpus, cpus, gpus, placement.threads)
    run = run.replace({"data.url": storage.absolute(str(run.data.url))})
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    tasks: Any = ray.remote(num_cpus=1)(_measure_node)
    strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in alive]
    pending, shares = [], [node["Resources"]["CPU"] / cpus for node in alive]
    for strategy, node_share in zip(strategies, shares, strict=True):
        of_node = machines._replace(decoding_cpus=node_share * machines.decoding_cpus)
        pending.append(tasks.options(scheduling_strategy=strategy).remote(run, of_node, seconds / 3))
    node_stages = _results(pending, seconds)
    nodes = [
        NodeSeconds(node["NodeManagerAddress"], node_share * cpus, *each)
        for node, node_share, each in zip(alive, shares, node_stages, strict=True)
    ]
    share = len(alive) or 1
    local = machines._replace(
        workers=-(-machines.workers // share), decoding_cpus=max(1.0, machines.decoding_cpus / share)
    )
    device: Any = ray.remote(num_cpus=1, num_gpus=machines.gpus / machines.workers)(_measure_device)
    (stages,) = _results([device.remote(run, machines.workers, local, 2 * seconds / 3)], seconds)
    return machines, mean_stages(stages, nodes), nodes


def mean_stages(stages: StageSeconds, nodes: list[NodeSeconds]) -> StageSeconds:
    """Return the stages with the nodes' mean CPU times, weighted by the images that each node decodes in a second.

    Decoding and steps slow each other down as on the node of `stages`.
    """
    rates = [node.cpus / (node.read + node.decode + node.augment) for node in nodes]
    means = {
        part: sum(rate * getattr(node, part) for rate, node in zip(rates, nodes, strict=True)) / sum(rates)
        for part in ("read", "decode", "augment")
    }
    return stages._replace(**means)


def _measure_node(run: Run, machines: Machines, seconds: float) -> tuple[float, float, float]:
    torch.set_num_threads(1)
    own, stream = open_stream(run, machines)
    parts = measure_cpu(own, stream, seconds / 2)
    with background_load(own, machines._replace(workers=1)) as load:
        return scale_to_full_load(parts, load, seconds / 2)[0]


def _measure_device(run: Run, workers: int, machines: Machines, seconds: float) -> StageSeconds:
    # The batch of one worker, whatever the number of workers on this node.
    own = run.replace({"optim.batch": run.optim.batch // workers * machines.workers})
    return measure_stages(own, machines, seconds)


def _results(tasks: list[Any], seconds: float) -> list[Any]:
    try:
        return ray.get(tasks, timeout=START_SECONDS + 3 * seconds)
    except GetTimeoutError:
        limit = f"{START_SECONDS + 3 * seconds:.0f} seconds"
        raise RunError(
            f"no result within {limit}: other jobs hold a node's CPUs, or its GPUs; see `ray status`"
        ) from None
    except (ConfigError, RunError) as error:  # of a node, with Ray's traceback in its text
        raise getattr(error, "cause", error) from None
