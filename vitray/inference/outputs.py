"""The outputs of a network for all images of a set: computed in chunks, each kept as one Parquet file.

A chunk's file appears whole, under a name that follows from the network, the images and the chunk. A command that was
killed therefore continues with the chunks that are missing, and equal work is never done twice.
"""

import hashlib
import io
import json
import os
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from tempfile import TemporaryFile, gettempdir
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from vitray import storage
from vitray.cluster import session
from vitray.data.shards.ray_tasks import ProgressLine
from vitray.errors import ConfigError, RunError
from vitray.inference.extractor import Alter, Extractor, Output
from vitray.inference.images import ImageSet
from vitray.inference.models import NetworkSpec
from vitray.models.vit import ViT

FORMAT = 1
CHUNK = 512
# Chunks that an actor has at a time: it reads one while it computes another.
AT_A_TIME = 2
# A chunk is computed again this many times after its actor was lost, as with a node.
RETRIES = 3
# Chunks that are read at a time.
READS_AT_ONCE = 8
# Larger outputs are read into a temporary file.
MOST_IN_MEMORY = 2 * 2**30
Span = tuple[int, int]
Missing = Sequence[tuple[Span, tuple[Output, ...]]]
Computed = Iterator[tuple[Span, dict[str, pa.Table]]]


class Work(NamedTuple):
    """A network over a set of images."""

    network: NetworkSpec
    images: ImageSet
    outputs: tuple[Output, ...]
    folder: str
    """The folder of all outputs, local or s3://; equal work has an equal folder inside it."""
    chunk: int = CHUNK
    max_corrupt: float = 0.01
    """The largest share of images that may be left out."""
    alter: Alter | None = None
    """A picklable change of each image's view."""
    alteration: str = ""
    """The name of that change; different changes have different names."""

    @property
    def place(self) -> str:
        """The folder of the chunks."""
        parts = [FORMAT, self.network.key, self.images.identity, self.alteration]
        return storage.join(self.folder, hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24])

    @property
    def spans(self) -> list[Span]:
        """The first image of each chunk, and the one after its last."""
        return [(at, min(at + self.chunk, self.images.images)) for at in range(0, self.images.images, self.chunk)]

    @property
    def title(self) -> str:
        """The beginning of a line of progress."""
        alteration = f", {self.alteration}" if self.alteration else ""
        return f"{self.network.name}, {self.images.split}{alteration}:"


class Outputs(NamedTuple):
    """The outputs for all images that can be decoded, by ascending number. N images, K classes, D features."""

    rows: np.ndarray
    """The numbers of the images in their set."""
    keys: list[str]
    labels: np.ndarray
    logits: np.ndarray | None
    features: np.ndarray | None
    left_out: tuple[str, ...]
    """The images without outputs, each with the reason."""


def compute_outputs(work: Work, workers: int | None = None, vit: ViT | None = None) -> Outputs:
    """Return the outputs of all images, computing those that are missing.

    Actors compute them on a cluster and where there are several GPUs or `workers`: one for each GPU, or else for each
    CPU, `workers` at most. Otherwise this process does, with the network `vit`.
    """
    missing = _missing(work)
    if missing:
        left = sum(stop - start for (start, stop), _ in missing)
        if left < work.images.images:
            note = f"{work.images.images - left:,} of {work.images.images:,} images are done already"
            print(f"{work.title} {note}", file=sys.stderr)
        progress = ProgressLine(work.title, left)
        corrupt: list[str] = []
        for (start, stop), tables in _computed(work, missing, workers, vit):
            for output, table in tables.items():
                pq.write_table(table, content := io.BytesIO())
                storage.write_bytes(storage.join(work.place, _file_name(output, (start, stop))), content.getvalue())
            corrupt += _corrupt_images(next(iter(tables.values())))
            _check_left_out(work, corrupt)
            progress.add(stop - start)
        progress.end()
    return read_outputs(work)


def read_outputs(work: Work) -> Outputs:
    """Return the outputs of a complete set of chunks; each image is in them exactly once."""
    parts = {output: _read(work, output) for output in work.outputs}
    for table, _ in parts.values():
        rows = table["row"].to_numpy()
        if not np.array_equal(rows, np.arange(work.images.images)):
            raise RuntimeError(f"{work.place}: got {len(rows)} rows, wanted each of {work.images.images} images once")
    first = parts[work.outputs[0]][0]
    corrupt, usable = _corrupt_images(first), _usable(first)
    _check_left_out(work, corrupt)
    arrays = {output: values for output, (_, values) in parts.items()}
    return Outputs(
        rows=np.flatnonzero(usable),
        keys=[key for key, is_usable in zip(first["key"].to_pylist(), usable, strict=True) if is_usable],
        labels=first["label"].to_numpy()[usable],
        logits=arrays.get("logits"),
        features=arrays.get("features"),
        left_out=(*work.images.set_aside, *corrupt),
    )


def _missing(work: Work) -> Missing:
    """Return the chunks without a file of some output, and these outputs."""
    done = storage.file_sizes(work.place).keys()
    missing = []
    for span in work.spans:
        lacking: tuple[Output, ...] = tuple(output for output in work.outputs if _file_name(output, span) not in done)
        if lacking:
            missing.append((span, lacking))
    return missing


def _file_name(output: str, span: Span) -> str:
    return f"{output}-{span[0]:09d}-{span[1]:09d}.parquet"


def _read(work: Work, output: Output) -> tuple[pa.Table, np.ndarray]:
    """Return the other columns of all images, and the outputs of those that can be decoded."""

    def one(span: Span) -> pa.Table:
        return pq.read_table(io.BytesIO(storage.read_bytes(storage.join(work.place, _file_name(output, span)))))

    tables, values_ND, filled = [], np.empty((0, 0), np.float32), 0
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        for at in range(0, len(work.spans), READS_AT_ONCE):
            for table in pool.map(one, work.spans[at : at + READS_AT_ONCE]):
                part_MD = _matrix(table[output])[_usable(table)]
                if not tables:
                    values_ND = _empty(work.images.images, part_MD.shape[1])
                values_ND[filled : filled + len(part_MD)] = part_MD
                filled += len(part_MD)
                tables.append(table.drop_columns([output]))
    return pa.concat_tables(tables), values_ND[:filled]


def _empty(rows: int, width: int) -> np.ndarray:
    """Return uninitialised outputs: in memory, or in an unnamed temporary file where they are large."""
    size = rows * width * 4
    if size <= MOST_IN_MEMORY:
        return np.empty((rows, width), np.float32)
    with TemporaryFile() as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk would kill the process at a later write
        except OSError as error:
            wanted = f"{size / 2**30:.1f} GiB for the outputs of {rows:,} images"
            raise ConfigError(f"TMPDIR: {gettempdir()}: {error.strerror}; wanted {wanted}, or another folder") from None
        return np.memmap(file, np.float32, "r+", shape=(rows, width))


def _usable(table: pa.Table) -> np.ndarray:
    return table["corrupt"].is_null().to_numpy(zero_copy_only=False)


def _matrix(column: pa.ChunkedArray) -> np.ndarray:
    width = column.type.list_size
    return np.concatenate([chunk.flatten().to_numpy().reshape(-1, width) for chunk in column.chunks])


def _corrupt_images(table: pa.Table) -> list[str]:
    pairs = zip(table["key"].to_pylist(), table["corrupt"].to_pylist(), strict=True)
    return [f"{key} ({reason})" for key, reason in pairs if reason is not None]


def _check_left_out(work: Work, corrupt: Sequence[str]) -> None:
    left_out, total = [*work.images.set_aside, *corrupt], work.images.images + len(work.images.set_aside)
    if len(left_out) > work.max_corrupt * total:
        raise ConfigError(
            f"{work.images.url}: {len(left_out)} of {total} images cannot be used, more than max_corrupt"
            f" {work.max_corrupt:g}: {', '.join(left_out[:5])}"
        )


# ---- where the work is done ------------------------------------------------------------------------------------------


def _computed(work: Work, missing: Missing, workers: int | None, vit: ViT | None) -> Computed:
    """Yield each missing chunk, as it is computed."""
    if _needs_actors(workers):
        with actor_session(workers):
            yield from _on_actors(work, missing, workers)
        return
    extractor = Extractor(work.network, work.images, work.alter, vit)
    extractor.load()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        futures = ((span, pool.submit(extractor.extract, *span, outputs)) for span, outputs in missing)
        ahead = deque(islice(futures, AT_A_TIME + 1))
        try:
            while ahead:
                span, future = ahead.popleft()
                yield span, future.result()
                ahead.extend(islice(futures, 1))
        finally:  # after an error, the pool would compute them before it ends
            for _, future in ahead:
                future.cancel()


def actor_session(workers: int | None) -> AbstractContextManager[None]:
    """Connect to Ray for a block if actors compute the outputs; several computations then share one connection."""
    return session.ray_session(cpus=workers) if _needs_actors(workers) else nullcontext()


def _needs_actors(workers: int | None) -> bool:
    if workers is not None:
        return workers > 1
    if "RAY_ADDRESS" in os.environ or torch.cuda.device_count() > 1:
        return True
    if "ray" not in sys.modules:
        return False
    import ray

    return ray.is_initialized()


def _on_actors(work: Work, missing: Missing, workers: int | None) -> Computed:
    """Yield chunks in the order in which actors finish them. Each actor takes the next chunk when it is free."""
    import ray
    from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

    lost = RayActorError, ObjectLostError
    await_gpus(workers)
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    count = min(len(missing), workers or max(1, gpus or int(resources.get("CPU", 1))))
    actor_class: Any = ray.remote(Extractor)
    actor_class = actor_class.options(
        num_cpus=1,
        num_gpus=1 if gpus else 0,
        max_concurrency=AT_A_TIME,
        max_restarts=0,  # a restarted actor waits without end where others have taken its room
        max_task_retries=0,
        scheduling_strategy="SPREAD",
    )
    shared: Any = [ray.put(value) for value in (work.network, work.images, work.alter)]
    actors = [actor_class.remote(*shared) for _ in range(count)]
    starting = {actor.load.remote(): actor for actor in actors}
    running: dict[Any, tuple[Any, Span, tuple[Output, ...]]] = {}
    waiting = list(reversed(missing))
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
                    _, span, outputs = running.pop(done)
                    try:
                        tables = ray.get(done)
                    except lost as error:
                        waiting.append((span, outputs))
                        losses[span] += 1
                        if losses[span] > RETRIES:
                            died = f"{losses[span]} actors have died with images {span[0]} to {span[1]}"
                            raise RunError(f"{died}: {_one_line(error)}") from None
                        raise
                    yield span, tables
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
                actor, (span, outputs) = idle.pop(), waiting.pop()
                running[actor.extract.remote(*span, outputs)] = actor, span, outputs


def await_gpus(workers: int | None) -> None:
    """Wait for GPU nodes on a cluster that adds them: its head's CPUs would do the work instead."""
    import ray

    seconds = session.autoscaling_timeout()
    if seconds and session.autoscaling_device() == "gpu" and not ray.cluster_resources().get("GPU"):
        session.wait_for_nodes([{"CPU": 1.0, "GPU": 1.0}] * (workers or 1), seconds)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
