"""Chunks of images on Ray actors; a chunk is retried if its actor dies."""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vitray.cluster import session
from vitray.errors import ConfigError, RunError

# Chunks that an actor has at a time: it reads one while it computes another.
AT_A_TIME = 2
# A chunk is computed again this many times after its actor was lost, as with a node.
RETRIES = 3
Span = tuple[int, int]
"""The first image of a chunk, and the one after its last."""


def actor_session(workers: int | None) -> AbstractContextManager[None]:
    """Connect to Ray for a block if actors compute the outputs; several computations then share one connection."""
    return session.ray_session(cpus=workers) if needs_actors(workers) else nullcontext()


def needs_actors(workers: int | None) -> bool:
    """Whether actors compute: on a cluster, and where there are several GPUs or `workers`."""
    if workers is not None:
        return workers > 1
    if "RAY_ADDRESS" in os.environ or torch.cuda.device_count() > 1:
        return True
    if "ray" not in sys.modules:
        return False
    import ray

    return ray.is_initialized()


def chunks_on_actors(
    kind: type, shared: Sequence[Any], calls: Sequence[tuple[Span, Any]], workers: int | None
) -> Iterator[tuple[Span, Any]]:
    """Yield `kind(*shared).extract(*span, argument)` for each call, in the order in which actors finish them.

    Each actor takes the next chunk when it is free. `kind` also has a method `load()`, which is called first, and its
    constructor takes `decoders`, a number of threads, after `shared`.
    """
    import ray
    from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

    lost = RayActorError, ObjectLostError
    await_gpus(workers)
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    count = min(len(calls), workers or max(1, gpus or int(resources.get("CPU", 1))))
    actor_class: Any = ray.remote(kind)
    actor_class = actor_class.options(
        num_cpus=1,
        num_gpus=1 if gpus else 0,
        max_concurrency=AT_A_TIME,
        max_restarts=0,  # a restarted actor waits without end where others have taken its room
        max_task_retries=0,
        scheduling_strategy="SPREAD",
    )
    references = [ray.put(value) for value in shared]
    decoders = decoders_of(ray.nodes(), count)
    actors = [actor_class.remote(*references, decoders=decoders) for _ in range(count)]
    starting = {actor.load.remote(): actor for actor in actors}
    running: dict[Any, tuple[Any, Span, Any]] = {}
    waiting = list(reversed(calls))
    idle: list[Any] = []  # an actor once for each further chunk that it can take
    losses = Counter[Span]()
    while waiting or running:
        for done in ray.wait([*starting, *running])[0]:
            actor = starting[done] if done in starting else running[done][0]
            try:
                if starting.pop(done, None) is not None:
                    ray.get(done)
                    idle += [actor] * AT_A_TIME
                else:
                    _, span, argument = running.pop(done)
                    try:
                        result = ray.get(done)
                    except lost as error:
                        waiting.append((span, argument))
                        losses[span] += 1
                        if losses[span] > RETRIES:
                            died = f"{losses[span]} actors have died with images {span[0]} to {span[1]}"
                            raise RunError(f"{died}: {_one_line(error)}") from None
                        raise
                    yield span, result
                    idle.append(actor)
            except lost as error:
                idle = [each for each in idle if each is not actor]
                if not (starting or running or idle):
                    raise RunError(f"all {count} actors have died: {_one_line(error)}") from None
            except RayTaskError as error:
                if isinstance(error.cause, ConfigError):
                    raise error.cause from None
                raise
            while idle and waiting:
                actor, (span, argument) = idle.pop(), waiting.pop()
                running[actor.extract.remote(*span, argument)] = actor, span, argument


def decoders_of(nodes: Sequence[Mapping[str, Any]], actors: int) -> int:
    """Return the threads that decode for an actor, its share of the CPUs; `nodes` are those of `ray.nodes`."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    # An actor sees its own GPU alone, and all CPUs of its node.
    shares = [each.get("CPU", 0) // each["GPU"] for each in alive if each.get("GPU", 0) >= 1]
    return max(1, int(min(shares) if shares else sum(each.get("CPU", 0) for each in alive) // actors))


def await_gpus(workers: int | None) -> None:
    """Wait for GPU nodes on an autoscaling cluster; otherwise the head's CPUs would do the work."""
    import ray

    seconds = session.autoscaling_timeout()
    if seconds and session.autoscaling_device() == "gpu" and not ray.cluster_resources().get("GPU"):
        session.wait_for_nodes([{"CPU": 1.0, "GPU": 1.0}] * (workers or 1), seconds)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
