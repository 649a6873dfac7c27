"""The outputs of a network for all images of a set: computed in chunks, each kept as one Parquet file.

A chunk's file appears whole, under a name that follows from the network, the images and the chunk. A command that was
killed therefore continues with the chunks that are missing, and equal work is never done twice.
"""

import hashlib
import io
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryFile, gettempdir
from typing import IO, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vitray.data.augment.views import usable
from vitray.data.shards.tables import read_table
from vitray.data.shards.tasks import ProgressLine
from vitray.errors import ConfigError
from vitray.inference.engine import Alter, Chunk, Job, Span, run_job
from vitray.inference.images import ImageSet
from vitray.inference.network_spec import NetworkSpec, Numerics, Wanted
from vitray.inference.networks import Networks
from vitray.models.network import AnyNetwork
from vitray.system import storage

FORMAT = 1
# Images of a forward pass, and of a file.
BATCH, CHUNK = 64, 512
# Chunks that are read at a time.
READS_AT_ONCE = 8
# Larger outputs are read into a temporary file.
MOST_IN_MEMORY = 2 * 2**30
Output = Literal["logits", "features"]


class Work(NamedTuple):
    """A network over a set of images."""

    network: NetworkSpec
    images: ImageSet
    outputs: tuple[Output, ...]
    folder: str
    """The folder of all outputs, local or s3://; equal work has an equal folder inside it."""
    numerics: Numerics
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
        parts = [FORMAT, self.network.key, self.images.identity, self.alteration, self.numerics]
        return storage.join(self.folder, hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24])

    @property
    def spans(self) -> list[Span]:
        """The first image of each chunk, and the one after its last."""
        return [(at, min(at + self.chunk, len(self.images))) for at in range(0, len(self.images), self.chunk)]

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
    """N; of several labels an image, the states of all classes, NxK."""
    logits: np.ndarray | None
    features: np.ndarray | None
    left_out: tuple[str, ...]
    """The images without outputs, each with the reason."""


def compute_outputs(work: Work, workers: int | None = None, vit: AnyNetwork | None = None) -> Outputs:
    """Return the outputs of all images, computing those that are missing.

    Where, `run_job` says; `vit` is the network if this process has it.
    """
    done = storage.file_sizes(work.place).keys()
    lacking: dict[Span, list[Output]] = {
        span: [output for output in work.outputs if _file_name(output, span) not in done] for span in work.spans
    }
    missing = [span for span, outputs in lacking.items() if outputs]
    if missing:
        left = sum(stop - start for start, stop in missing)
        if left < len(work.images):
            note = f"{len(work.images) - left:,} of {len(work.images):,} images are done already"
            print(f"{work.title} {note}", file=sys.stderr)
        progress = ProgressLine(work.title, left)
        corrupt: list[str] = []
        wanted = Wanted(logits="logits" in work.outputs, features="features" in work.outputs)
        job = Job(work.images, [work.network], _outputs_of_batch, work.numerics, wanted, work.alter)
        for chunk in run_job(job, missing, workers, None if vit is None else {work.network.name: vit}):
            work.images.check_labels(chunk.keys, chunk.labels)
            for output in lacking[chunk.span]:
                pq.write_table(_table(chunk, output), content := io.BytesIO())
                storage.write_bytes(storage.join(work.place, _file_name(output, chunk.span)), content.getvalue())
            corrupt += _corrupt_images(chunk.keys, chunk.reasons)
            _check_left_out(work, corrupt)
            progress.add(len(chunk.keys))
        progress.end()
    return _read_outputs(work)


def _outputs_of_batch(networks: Networks, views: Sequence[np.ndarray], _: np.ndarray) -> dict[str, np.ndarray]:
    [values] = networks.outputs(views).values()
    return {output: value.float().cpu().numpy() for output, value in values.items()}


def _table(chunk: Chunk, output: Output) -> pa.Table:
    values_ND = np.concatenate([values[output] for values in chunk.values])
    columns = {
        "row": pa.array(range(*chunk.span), pa.int64()),
        "key": pa.array(chunk.keys, pa.string()),
        "label": _labels_column(chunk.labels),
        "corrupt": pa.array(chunk.reasons, pa.string()),
        output: pa.FixedSizeListArray.from_arrays(pa.array(values_ND.ravel()), values_ND.shape[1]),
    }
    return pa.table(columns)


def _labels_column(labels: Sequence[int | np.ndarray]) -> pa.Array:
    if labels and np.ndim(labels[0]):
        states_NK = np.stack([np.asarray(each, np.int8) for each in labels])
        return pa.FixedSizeListArray.from_arrays(pa.array(states_NK.ravel()), states_NK.shape[1])
    return pa.array(labels, pa.int64())


def _read_outputs(work: Work) -> Outputs:
    """Return the outputs of a complete set of chunks; each image is in them exactly once."""
    parts = {output: _read(work, output) for output in work.outputs}
    for table, _ in parts.values():
        rows = table["row"].to_numpy()
        if not np.array_equal(rows, np.arange(len(work.images))):
            raise RuntimeError(f"{work.place}: got {len(rows)} rows, expected each of {len(work.images)} images once")
    first = parts[work.outputs[0]][0]
    reasons = first["corrupt"].to_pylist()
    corrupt, has_pixels = _corrupt_images(first["key"].to_pylist(), reasons), usable(reasons)
    _check_left_out(work, corrupt)
    arrays = {output: values for output, (_, values) in parts.items()}
    has_lists = pa.types.is_fixed_size_list(first["label"].type)
    return Outputs(
        rows=np.flatnonzero(has_pixels),
        keys=first["key"].filter(pa.array(has_pixels)).to_pylist(),
        labels=(_matrix(first["label"]) if has_lists else first["label"].to_numpy())[has_pixels],
        logits=arrays.get("logits"),
        features=arrays.get("features"),
        left_out=(*work.images.set_aside, *corrupt),
    )


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
                part_MD = _matrix(table[output])[table["corrupt"].is_null().to_numpy()]
                if not tables:
                    values_ND = _empty(len(work.images), part_MD.shape[1])
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
            _allocate(file, size)  # a full disk would kill the process at a later write
        except OSError as error:
            wanted = f"{size / 2**30:.1f} GiB for the outputs of {rows:,} images"
            raise ConfigError(
                f"TMPDIR: {gettempdir()}: {error.strerror}; expected {wanted}, or another folder"
            ) from None
        return np.memmap(file, np.float32, "r+", shape=(rows, width))


def _allocate(file: IO[bytes], size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for at in range(0, size, 2**24):  # macOS
        file.write(bytes(min(2**24, size - at)))
    file.flush()


def _matrix(column: pa.ChunkedArray) -> np.ndarray:
    width = column.type.list_size
    return np.concatenate([chunk.flatten().to_numpy().reshape(-1, width) for chunk in column.chunks])


def _corrupt_images(keys: Sequence[str], reasons: Sequence[str | None]) -> list[str]:
    return [f"{key} ({reason})" for key, reason in zip(keys, reasons, strict=True) if reason is not None]


def _check_left_out(work: Work, corrupt: Sequence[str]) -> None:
    left_out, total = [*work.images.set_aside, *corrupt], len(work.images) + len(work.images.set_aside)
    if len(left_out) > work.max_corrupt * total:
        raise ConfigError(
            f"{work.images.url}: {len(left_out)} of {total} images cannot be used, more than max_corrupt"
            f" {work.max_corrupt:g}: {', '.join(left_out[:5])}"
        )
