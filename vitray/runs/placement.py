"""Placement of a run's workers on the nodes of the cluster."""

import math
import os
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from vitray.cluster import session
from vitray.config import Run
from vitray.data.shares import PAIR, dealt_unit
from vitray.errors import ConfigError
from vitray.training.schedule import check_shares

# Settings of `evaluate` that reserve a CPU, and the command that computes the same after a run without them.
LATER = {
    "probes": "`vitray evaluate RUN --training-probes` scores the checkpoints",
    "figures": "`vitray inspect RUN/model` draws the figures",
}
# Seconds in which a lost node may come back before the run ends.
NODE_RETURN_SECONDS = 1800


class Placement(NamedTuple):
    """Number and resources of the workers."""

    workers: tuple[int, int]
    """Lowest and highest number."""
    use_gpu: bool
    cpus: float
    """CPUs reserved per worker."""
    threads: int
    """Compute threads of a CPU worker."""
    probe_gpus: int = 0
    """GPUs of the process that computes evaluate.probes and evaluate.figures; 0 is a CPU."""
    data_cpus: int | None = None
    """Most CPUs of one execution that decodes images; None is all."""
    is_here: bool = False
    """Whether the workers are this process, or those of torchrun, without Ray."""


def start_attempts() -> int:
    """Return how often a worker group is started before the run gives up on missing nodes."""
    seconds = session.autoscaling_timeout() or NODE_RETURN_SECONDS
    return math.ceil(seconds / float(os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"]))


def await_nodes(run: Run) -> None:
    """Wait on an autoscaling cluster for the nodes of the smallest worker group; elsewhere return at once."""
    seconds, compute = session.autoscaling_timeout(), run.compute
    if seconds is None:
        return
    import ray  # after session.prepare_environment

    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    device = compute.device if compute.device != "auto" else "gpu" if has_gpus else session.autoscaling_device()
    if device is None:
        raise ConfigError(
            "compute.device: got auto on an autoscaling cluster without a GPU now; expected gpu or cpu, or one of them"
            " as VITRAY_GROWS_DEVICE in the environment of the head"
        )
    if compute.worker_range is None:
        raise ConfigError(
            "compute.workers: got auto on an autoscaling cluster; expected a number, as compute.workers=2"
        )
    gpus = {} if device == "cpu" else {"GPU": compute.gpus}
    evaluator = run.evaluate.where if run.data.evaluated else "workers"
    bundles: list[dict[str, float]] = [{"CPU": compute.cpus or 1.0} | gpus] * compute.worker_range[0]
    bundles += [{"CPU": 1.0}]  # image decoding
    if evaluator != "workers":
        bundles += [{"CPU": 1.0} | ({"GPU": run.evaluate.gpus} if evaluator == "gpu" else {})]
    bundles += [{"CPU": 1.0}] if run.evaluate.has_prober else []
    session.wait_for_nodes(bundles, seconds)


def place_workers(run: Run, concurrent_trials: int = 1, has_cpus: bool = True) -> Placement:
    """Return the placement of the workers; refuse one that can never fit.

    Concurrent trials share the CPUs of a node for compute threads, and the CPUs that decode images. Without `has_cpus`,
    compute.cpus is the plan's and not the user's, and does not limit the threads.
    """
    import ray

    resources, compute = ray.cluster_resources(), run.compute
    evaluator = run.evaluate.where if run.data.evaluated else "workers"
    beside = ["evaluations"] if evaluator != "workers" else []
    measured = [name for name in LATER if getattr(run.evaluate, name)]
    beside += [" and ".join(f"evaluate.{name}" for name in measured)] if measured else []
    reserved = 1 + len(beside)  # image decoding
    gpus, cpus = int(resources.get("GPU", 0)) - evaluation_gpus(run), resources.get("CPU", 0.0)
    use_gpu = compute.device == "gpu" or (compute.device == "auto" and resources.get("GPU", 0) > 0)
    lowest, highest = compute.worker_range or ((gpus, gpus) if use_gpu else (1, 1))
    if evaluator == "gpu" and not resources.get("GPU", 0):
        raise ConfigError("evaluate.where: got gpu, the cluster has no GPU; expected workers or cpu")
    if use_gpu and (lowest > gpus or not gpus):
        besides = " besides the one for evaluations" if evaluator == "gpu" else ""
        raise ConfigError(f"compute.workers: got {max(lowest, 1)} GPU workers, the cluster has {gpus} GPUs{besides}")
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"] and "CPU" in node["Resources"]]
    per_node = -(-highest // max(1, len(nodes)))
    smallest = min(nodes, default=0.0)
    fair = 1.0 if use_gpu else min((cpus - reserved) / highest, smallest / per_node)
    each = compute.cpus or (fair if fair < 1 else float(int(fair)))
    if not compute.cpus and each > 0:
        while each > 0.01 and _worker_capacity(nodes, each) < highest:  # no node would have a CPU left for decoding
            each /= 2
    if each <= 0 or lowest * each + reserved > cpus or lowest > _worker_capacity(nodes, each):
        later = f"; without {beside[-1]}, {' and '.join(LATER[name] for name in measured)} later" if measured else ""
        others = "".join(f" and one for {each}" for each in beside)
        share = f" of {each:g} CPUs" if each > 0 else ""
        raise ConfigError(
            f"compute.workers: {lowest} workers{share} with one CPU to decode images{others} do not fit into the"
            f" {cpus:g} CPUs of the cluster{f', {smallest:g} on its smallest node' if len(nodes) > 1 else ''};"
            f" expected fewer workers, a smaller compute.cpus or more CPUs{later}"
        )
    check_batch(run, lowest, highest)
    neighbors = -(-highest * concurrent_trials // max(1, len(nodes)))
    threads = max(1, int((has_cpus and compute.cpus) or smallest // neighbors))
    # The GPUs of a sweep are for its trials.
    spare_gpus = gpus - (highest if use_gpu else 0) if concurrent_trials == 1 else 0
    probe_gpus = int(run.evaluate.has_prober and spare_gpus > 0)
    # Without a limit, the first trial asks Ray Data for all CPUs, and the others get none while it has images to read.
    shared = max(1, int(cpus / concurrent_trials - highest * each - len(beside))) if concurrent_trials > 1 else None
    return Placement((lowest, highest), use_gpu, each, threads, probe_gpus, shared)


def alive_nodes() -> dict[str, dict[str, float]]:
    """Return the resources of each node that is alive."""
    import ray

    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def room_for_workers(run: Run, placement: Placement, nodes: Mapping[str, Mapping[str, float]]) -> int:
    """Return how many workers of a placement fit on nodes, {node: its resources}, with a CPU to decode images."""
    count = _worker_capacity([each.get("CPU", 0.0) for each in nodes.values()], placement.cpus)
    gpus = int(sum(each.get("GPU", 0.0) for each in nodes.values())) - evaluation_gpus(run)
    return min(count, gpus) if placement.use_gpu else count


def check_batch(run: Run, lowest: int, highest: int) -> None:
    """Refuse numbers of workers among which a batch cannot be divided."""
    batch, each = run.optim.batch, 2 if run.data.mix.is_mixing else 1
    if batch < highest * each:
        images = "two images, which mixup and cutmix pair," if run.data.mix.is_mixing else "an image"
        raise ConfigError(
            f"optim.batch: got {batch}, expected at least {images} for each of {highest} workers, or fewer"
            " compute.workers"
        )
    if run.data.evaluated and run.evaluate.where == "workers" and (run.evaluate.batch or batch) < highest:
        raise ConfigError(
            f"evaluate.batch: got {run.evaluate.batch}, expected at least an image for each of {highest} workers"
        )
    odd = [workers for workers in range(lowest, highest + 1) if dealt_unit(batch, workers) < PAIR]
    if run.data.mix.is_mixing and odd:
        raise ConfigError(
            f"optim.batch: got {batch}, which gives each of {odd[0]} workers {batch // odd[0]} images, expected an even"
            " number for each, as mixup and cutmix pair them; or another compute.workers"
        )
    check_shares(run, lowest, highest)


def evaluation_gpus(run: Run) -> int:
    """Return how many whole GPUs separate evaluations take from the workers: none if both fit on one."""
    if run.evaluate.where != "gpu" or not run.data.evaluated:
        return 0
    shares = run.compute.gpus < 1 and _exact(run.compute.gpus) + _exact(run.evaluate.gpus) <= 1
    return 0 if shares else 1


def _exact(number: float) -> Fraction:
    """Return 0.1 as 1/10: as floats, 0.9 and 0.1 may exceed 1."""
    return Fraction(str(number))


def _worker_capacity(nodes: list[float], each: float) -> int:
    """Return how many workers fit on nodes of these CPUs, with one whole CPU of one node kept for decoding."""
    counts = [(int(cpus / each + 1e-9), int(max(cpus - 1, 0) / each + 1e-9)) for cpus in nodes]
    lost = [full - reduced for (full, reduced), cpus in zip(counts, nodes, strict=True) if cpus >= 1]
    return sum(full for full, _ in counts) - min(lost, default=0)
