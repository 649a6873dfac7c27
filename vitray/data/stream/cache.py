"""A split decoded once for a whole Ray cluster: its pixels stay in the object store, for every epoch, worker and run.

Worth it where decoding is what training waits for and the pixels fit: they take several times the room of the files.
"""

from typing import Any

import numpy as np
import pyarrow.parquet as pq
import ray

from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.shards.manifest import Dataset
from vitray.data.stream.decoding import Decoded, Rows, open_shard, read_rows, rows_of
from vitray.errors import ConfigError

# Small: a task takes its rows from many blocks, and on another node it fetches each of them whole.
BLOCK_BYTES = 16 * 2**20
# Part of the object store that the pixels of a split may take; Ray Data's own blocks take the other half.
SHARE_OF_STORE = 0.5
# Rows that are decoded for an estimate where the shards do not say how large their images are.
SAMPLE = 64
NAMESPACE = "vitray"


class DecodedSplit:
    """An actor that owns the decoded pixels of one split; they live as long as it does."""

    def __init__(self, rows: Rows, per_block: int) -> None:
        self.starts = np.append(np.arange(0, int(rows.starts[-1]), per_block), rows.starts[-1])
        decode = ray.remote(num_cpus=1)(_decode_block)
        where = ray.put(rows)
        self.blocks = [
            decode.remote(where, int(start), int(end))
            for start, end in zip(self.starts[:-1], self.starts[1:], strict=True)
        ]

    def decoded(self) -> Decoded:
        """Where the pixels are."""
        return Decoded(self.starts, self.blocks)


def decoded_split(dataset: Dataset, split: str) -> Decoded:
    """The decoded pixels of a split, made by whoever asks first while all others wait for the same.

    They stay in the object store until `forget_decoded`, or until the cluster ends: a later run finds them there.
    """
    rows = rows_of(dataset, split)
    try:
        owner: Any = ray.get_actor(_name(dataset, split), NAMESPACE)
    except ValueError:  # there is none yet
        decoded_bytes = _decoded_bytes(rows)
        store = int(ray.cluster_resources()["object_store_memory"])
        if decoded_bytes > SHARE_OF_STORE * store:
            raise ConfigError(
                f"{dataset.url}: cache: decoded: split {split!r} decodes to {_mib(decoded_bytes)}, wanted at most"
                f" {SHARE_OF_STORE:g} of the cluster's object store of {_mib(store)}; say cache: none, or start Ray"
                " with more object store memory"
            ) from None
        per_block = max(1, BLOCK_BYTES * int(rows.starts[-1]) // decoded_bytes)
        # An actor of this name that another worker has started meanwhile is taken instead.
        options: dict[str, Any] = {"name": _name(dataset, split), "namespace": NAMESPACE, "get_if_exists": True}
        # Otherwise what a trial of a sweep starts is placed in the trial's own group, which has no CPU to decode on.
        actor: Any = ray.remote(num_cpus=0, scheduling_strategy="DEFAULT")(DecodedSplit)
        owner = actor.options(lifetime="detached", **options).remote(rows, per_block)
    decoded: Any = ray.get(owner.decoded.remote())
    ray.wait(decoded.blocks, num_returns=len(decoded.blocks), fetch_local=False)
    return decoded


def forget_decoded(dataset: Dataset, split: str) -> None:
    """Give the memory of a split's pixels back; a stream that still reads them fails."""
    try:
        ray.kill(ray.get_actor(_name(dataset, split), NAMESPACE))
    except ValueError:  # nothing to forget
        return


def _name(dataset: Dataset, split: str) -> str:
    return f"decoded {split} of {dataset.identity}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def _decoded_bytes(rows: Rows) -> int:
    """Bytes of a split's pixels: as the shards say, or of a sample where files were left in place and do not say."""
    pixels = [_pixels(open_shard(address)) for address in rows.addresses]
    if None not in pixels:
        return 3 * sum(int(count) for count in pixels if count) or 1
    images = int(rows.starts[-1])
    sample = np.unique(np.linspace(0, images - 1, min(SAMPLE, images)).astype(np.int64))
    sizes = [_decode(content).size for content, _, _ in read_rows(sample, rows).values()]
    return sum(sizes) * images // len(sizes) or 1


def _pixels(shard: pq.ParquetFile) -> int | None:
    names = ["width", "height"]
    if not {*names} <= {*shard.schema_arrow.names}:
        return None
    table = shard.read(columns=names)
    width, height = (table.column(name).to_numpy().astype(np.int64) for name in names)
    return int((width * height).sum())


def _decode(content: bytes) -> np.ndarray:
    """The pixels of an image, none where it is corrupt."""
    try:
        return decode_image(content)
    except UndecodableImage:
        return np.empty((0, 0, 3), np.uint8)


def _decode_block(rows: Rows, start: int, end: int) -> tuple[list[np.ndarray], list[int], list[str]]:
    found = read_rows(np.arange(start, end), rows)
    images, labels, keys = zip(*(found[row] for row in range(start, end)), strict=True)
    return [_decode(content) for content in images], list(labels), list(keys)
