"""The outputs of a network for all images of a set: computed in chunks, each kept as one Parquet file.

A chunk's file appears whole, under a name that follows from the network, the images and the chunk. A command that was
killed therefore continues with the chunks that are missing, and equal work is never done twice.
"""

import hashlib
import io
import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from tempfile import TemporaryFile, gettempdir
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vitray.data.shards.ray_tasks import ProgressLine
from vitray.data.shards.tables import read_table
from vitray.errors import ConfigError
from vitray.inference.actors import AT_A_TIME, Span, actor_session, chunks_on_actors, needs_actors
from vitray.inference.extractor import Alter, Extractor, Output
from vitray.inference.images import ImageSet
from vitray.inference.network_spec import NetworkSpec
from vitray.models.network import AnyNetwork
from vitray.system import storage

FORMAT = 1
CHUNK = 512
# Chunks that are read at a time.
READS_AT_ONCE = 8
# Larger outputs are read into a temporary file.
MOST_IN_MEMORY = 2 * 2**30
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


def compute_outputs(work: Work, workers: int | None = None, vit: AnyNetwork | None = None) -> Outputs:
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
            raise RuntimeError(f"{work.place}: got {len(rows)} rows, expected each of {work.images.images} images once")
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
        return read_table(storage.join(work.place, _file_name(output, span)))

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
    """Return uninitialized outputs: in memory, or in an unnamed temporary file where they are large."""
    size = rows * width * 4
    if size <= MOST_IN_MEMORY:
        return np.empty((rows, width), np.float32)
    with TemporaryFile() as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk would kill the process at a later write
        except OSError as error:
            wanted = f"{size / 2**30:.1f} GiB for the outputs of {rows:,} images"
            raise ConfigError(
                f"TMPDIR: {gettempdir()}: {error.strerror}; expected {wanted}, or another folder"
            ) from None
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


def _computed(work: Work, missing: Missing, workers: int | None, vit: AnyNetwork | None) -> Computed:
    """Yield each missing chunk, as it is computed."""
    if needs_actors(workers):
        with actor_session(workers):
            yield from chunks_on_actors(Extractor, (work.network, work.images, work.alter), missing, workers)
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
