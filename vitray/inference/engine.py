"""Images through networks, each image exactly once: in chunks, in this process or on the actors of a cluster.

A job names images and networks, and a function of each batch. A chunk's values do not depend on where it is computed
beyond what `Numerics` says.
"""

import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from vitray.cluster import session
from vitray.data.augment.views import decode_views, usable
from vitray.errors import ConfigError, RunError, one_line
from vitray.inference.images import Images
from vitray.inference.network_spec import NetworkSpec, Numerics, Wanted
from vitray.inference.networks import Networks, views_of
from vitray.models.network import AnyNetwork
from vitray.models.own_networks import is_of_this_process, require_declared

# Chunks in work at a time, in this process or on an actor: one is read and decoded while another is computed.
AT_A_TIME = 2
# A chunk is computed again this many times after its actor was lost, as with a node.
RETRIES = 3

Span = tuple[int, int]
"""The first image of a chunk, and the one after its last."""
Alter = Callable[[np.ndarray, str], np.ndarray]
"""Changes the view of an image, after the crop; the second argument is the image's key."""
Compute = Callable[[Networks, Sequence[np.ndarray], np.ndarray], Any]
"""The values of a batch: the networks, the batch of each view (BHWC, uint8), and which of its images have pixels.

Compiled networks get views of `Numerics.batch` images, of which the last ones may be padding."""


class Job(NamedTuple):
    """Networks over images; picklable."""

    images: Images
    networks: Sequence[NetworkSpec]
    """Each under a name of its own."""
    compute: Compute
    numerics: Numerics
    wanted: Wanted = Wanted()
    alter: Alter | None = None


class Chunk(NamedTuple):
    """What a job gives for some images."""

    span: Span
    keys: list[str]
    labels: list[int | np.ndarray]
    reasons: list[str | None]
    """Why an image has no pixels, or None."""
    values: list[Any]
    """Of each batch, as `compute` returned it."""


class Worker:
    """A job in one process, or on an actor; two chunks at a time keep its device and its decoders busy."""

    def __init__(self, job: Job, loaded: Mapping[str, AnyNetwork] | None = None, decoders: int | None = None) -> None:
        """`loaded` are networks that this process has already; `decoders` is the number of threads that decode."""
        self._job, self._loaded = job, loaded
        self._views = views_of(job.networks)
        share = session.usable_cpus() // max(1, torch.cuda.device_count())
        self._decoders = ThreadPoolExecutor(decoders or max(1, share))
        self._lock = threading.Lock()

    def load(self) -> None:
        """Load the networks, before the first chunk: an actor's constructor would hide the error."""
        numerics = self._job.numerics
        if numerics.device == "cpu":
            torch.set_num_threads(numerics.threads)
        self._networks = Networks(self._job.networks, self._job.wanted, numerics, self._loaded)

    def chunk(self, start: int, stop: int) -> Chunk:
        """Return the values of some images."""
        job = self._job
        images = job.images.read(range(start, stop))
        reasons: list[str | None] = []
        values = []
        for first in range(0, len(images), job.numerics.batch):
            batch = images[first : first + job.numerics.batch]
            rows = job.numerics.batch if job.numerics.compile else None  # one shape
            views, why = decode_views([each.content for each in batch], self._views, rows=rows, run=self._decoders.map)
            has_pixels = usable(why)
            if job.alter is not None:
                places = np.flatnonzero(has_pixels).tolist()
                for view_BHWC in views:
                    altered = self._decoders.map(job.alter, view_BHWC[places], [batch[place].key for place in places])
                    for place, view_HWC in zip(places, altered, strict=True):
                        view_BHWC[place] = view_HWC
            reasons += why
            with self._lock:
                values.append(job.compute(self._networks, views, has_pixels))
        return Chunk((start, stop), [image.key for image in images], [image.label for image in images], reasons, values)


def run_job(
    job: Job, spans: Sequence[Span], workers: int | None = None, loaded: Mapping[str, AnyNetwork] | None = None
) -> Iterator[Chunk]:
    """Yield each chunk, as it is computed.

    Actors compute on a cluster and where there are several GPUs or `workers`: one for each GPU, or else for each CPU,
    `workers` at most. Otherwise this process does, in the order of the images.
    """
    if needs_actors(workers):
        with actor_session(workers):
            yield from _on_actors(job, spans, workers)
    else:
        yield from _here(job, spans, loaded)


def workers_for(networks: Sequence[NetworkSpec], workers: int | None) -> int | None:
    """Return the wanted number of workers: this process where it alone knows one of the networks.

    Actors that are asked for are then refused.
    """
    own = [network.network for network in networks if is_of_this_process(network.network)]
    if own and workers not in (None, 1):
        require_declared(own[0])
    return 1 if own else workers


def actor_session(workers: int | None) -> AbstractContextManager[None]:
    """Connect to Ray for a block if actors compute; several jobs then share one connection."""
    return session.ray_session(cpus=workers) if needs_actors(workers) else nullcontext()


def needs_actors(workers: int | None) -> bool:
    """Whether actors compute: on a cluster, and where there are several GPUs or `workers`."""
    if workers is not None:
        return workers > 1
    if "RAY_ADDRESS" in os.environ or torch.cuda.device_count() > 1:
        return True
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized())


def numerics_of(workers: int | None, batch: int) -> Numerics:
    """Return how this process computes, or the actors of the connected cluster."""
    if needs_actors(workers):
        import ray

        has_gpu, threads = bool(ray.cluster_resources().get("GPU")), 1  # an actor has one CPU
    else:
        has_gpu, threads = torch.cuda.is_available(), torch.get_num_threads()
    return Numerics("cuda", 1, batch) if has_gpu else Numerics("cpu", threads, batch)


def _here(job: Job, spans: Sequence[Span], loaded: Mapping[str, AnyNetwork] | None) -> Iterator[Chunk]:
    worker = Worker(job, loaded)
    worker.load()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        futures = (pool.submit(worker.chunk, *span) for span in spans)
        ahead = deque(islice(futures, AT_A_TIME + 1))
        try:
            while ahead:
                yield ahead.popleft().result()
                ahead.extend(islice(futures, 1))
        finally:  # after an error, the pool would compute them before it ends
            for future in ahead:
                future.cancel()


def _on_actors(job: Job, spans: Sequence[Span], workers: int | None) -> Iterator[Chunk]:
    """Yield the chunks in the order in which actors finish them; each actor takes the next one when it is free."""
    import ray
    from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

    lost = RayActorError, ObjectLostError
    _await_gpus(workers)
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    count = min(len(spans), workers or max(1, gpus or int(resources.get("CPU", 1))))
    actor_class: Any = ray.remote(Worker)
    actor_class = actor_class.options(
        num_cpus=1,
        num_gpus=1 if gpus else 0,
        max_concurrency=AT_A_TIME,
        max_restarts=0,  # a restarted actor waits without end where others have taken its room
        max_task_retries=0,
        scheduling_strategy="SPREAD",
    )
    shared = ray.put(job)
    decoders = decoders_of(ray.nodes(), count)
    actors = [actor_class.remote(shared, decoders=decoders) for _ in range(count)]
    starting = {actor.load.remote(): actor for actor in actors}
    running: dict[Any, tuple[Any, Span]] = {}
    waiting = list(reversed(spans))
    idle: list[Any] = []  # an actor once for each further chunk that it can take
    losses = Counter[Span]()
    try:
        while waiting or running:
            for done in ray.wait([*starting, *running])[0]:
                actor = starting[done] if done in starting else running[done][0]
                try:
                    if starting.pop(done, None) is not None:
                        ray.get(done)
                        idle += [actor] * AT_A_TIME
                    else:
                        _, span = running.pop(done)
                        try:
                            chunk = ray.get(done)
                        except lost as error:
                            waiting.append(span)
                            losses[span] += 1
                            if losses[span] > RETRIES:
                                died = f"{losses[span]} actors have died with images {span[0]} to {span[1]}"
                                raise RunError(f"{died}: {one_line(error)[:500]}") from None
                            raise
                        yield chunk
                        idle.append(actor)
                except lost as error:
                    idle = [each for each in idle if each is not actor]
                    if not (starting or running or idle):
                        raise RunError(f"all {count} actors have died: {one_line(error)[:500]}") from None
                except RayTaskError as error:
                    if isinstance(error.cause, ConfigError):
                        raise error.cause from None
                    raise
                while idle and waiting:
                    actor, span = idle.pop(), waiting.pop()
                    running[actor.chunk.remote(*span)] = actor, span
    finally:
        # Otherwise they keep their CPUs after the loss of one until Python's next garbage collection: Ray's error holds
        # its own traceback, and so this frame and its references.
        for actor in actors:
            ray.kill(actor)


def decoders_of(nodes: Sequence[Mapping[str, Any]], actors: int) -> int:
    """Return the threads that decode for an actor, its share of the CPUs; `nodes` are those of `ray.nodes`."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    # An actor sees its own GPU alone, and all CPUs of its node.
    shares = [each.get("CPU", 0) // each["GPU"] for each in alive if each.get("GPU", 0) >= 1]
    return max(1, int(min(shares) if shares else sum(each.get("CPU", 0) for each in alive) // actors))


def _await_gpus(workers: int | None) -> None:
    """Wait for GPU nodes on an autoscaling cluster; otherwise the head's CPUs would do the work."""
    import ray

    seconds = session.autoscaling_timeout()
    if seconds and session.autoscaling_device() == "gpu" and not ray.cluster_resources().get("GPU"):
        session.wait_for_nodes([{"CPU": 1.0, "GPU": 1.0}] * (workers or 1), seconds)
