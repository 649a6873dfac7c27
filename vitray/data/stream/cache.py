"""A split decoded once for a whole Ray cluster; its pixels stay in the object store for every epoch, worker and run.

Worth it where training waits for decoding and the pixels fit: they take several times the space of the files.
"""

from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.shards.manifest import Dataset
from vitray.data.stream.decoding import (
    DecodedBlock,
    DecodedRows,
    SplitRows,
    decoded_bytes,
    locate_rows,
    pixels_error,
    read_rows,
)

# Small: a task reads rows of many blocks, and fetches each of them whole on another node.
BLOCK_BYTES = 16 * 2**20
# The largest share of the object store for the pixels of a split; Ray Data's own blocks use the other half.
SHARE_OF_STORE = 0.5
NAMESPACE = "vitray"


class DecodedSplit:
    """An actor that owns the decoded pixels of one split; they live as long as the actor."""

    def __init__(self, rows: SplitRows, per_block: int) -> None:
        self.starts = np.append(np.arange(0, int(rows.starts[-1]), per_block), rows.starts[-1])
        # A task's second value is a number: fetching it waits for the task, or raises its error, without the pixels.
        options: dict[str, Any] = {"num_cpus": 1, "num_returns": 2, "retry_exceptions": [OSError]}
        decode = ray.remote(**options)(_decode_block)
        shared, ends = ray.put(rows), zip(self.starts[:-1], self.starts[1:], strict=True)
        decoded: list[Any] = [decode.remote(shared, int(start), int(end)) for start, end in ends]
        self.blocks, self.ends = map(list, zip(*decoded, strict=True))

    def decoded(self) -> tuple[DecodedRows, list[ray.ObjectRef]]:
        """Return the references of the pixels, and references that are ready or fail as they do."""
        return DecodedRows(self.starts, self.blocks), self.ends


def decoded_split(dataset: Dataset, split: str) -> DecodedRows:
    """Return the decoded pixels of a split; the first caller starts the decoding, and every caller waits for it.

    They stay in the object store until `forget_decoded` or the end of the cluster, so later runs reuse them.
    """
    rows = locate_rows(dataset, split)
    try:
        owner: Any = ray.get_actor(_actor_name(dataset, split), NAMESPACE)
    except ValueError:  # not decoded yet
        size = decoded_bytes(rows)
        store = int(ray.cluster_resources()["object_store_memory"])
        if size > SHARE_OF_STORE * store:
            most, remedy = f"{SHARE_OF_STORE:g} of the cluster's object store", ", or start Ray with more of it"
            raise pixels_error(dataset, split, size, most, store, remedy) from None
        per_block = max(1, BLOCK_BYTES * int(rows.starts[-1]) // size)
        # Another worker may have started the actor meanwhile.
        options: dict[str, Any] = {"name": _actor_name(dataset, split), "namespace": NAMESPACE, "get_if_exists": True}
        # By default it would join the placement group of a sweep's trial, which has no CPU left for decoding.
        actor: Any = ray.remote(num_cpus=0, scheduling_strategy="DEFAULT")(DecodedSplit)
        owner = actor.options(lifetime="detached", **options).remote(rows, per_block)
    decoded, ends = ray.get(owner.decoded.remote())
    try:
        ray.get(ends)
    except RayError:  # the actor would keep the failed block for all later runs
        forget_decoded(dataset, split)
        raise
    return decoded


def forget_decoded(dataset: Dataset, split: str) -> None:
    """Free the memory of a split's pixels; streams that still read them fail."""
    try:
        ray.kill(ray.get_actor(_actor_name(dataset, split), NAMESPACE))
    except ValueError:  # there is no such actor
        return


def _actor_name(dataset: Dataset, split: str) -> str:
    return f"decoded {split} of {dataset.identity}, format 3"  # of DecodedBlock: it outlives a version of vitray


def _decode(content: bytes) -> np.ndarray:
    """Return the pixels of an image, an empty array if it is corrupt."""
    try:
        return decode_image(content)
    except UndecodableImage:
        return np.empty((0, 0, 3), np.uint8)


def _decode_block(rows: SplitRows, start: int, end: int) -> tuple[DecodedBlock, int]:
    """Return some decoded rows and where they end."""
    stored = read_rows(np.arange(start, end), rows)
    contents, labels, keys = zip(*(stored[row] for row in range(start, end)), strict=True)
    images = [_decode(content) for content in contents]
    pixels = np.concatenate([image.reshape(-1) for image in images])
    shapes = np.array([image.shape[:2] for image in images])
    return DecodedBlock(pixels, shapes, np.array(labels), list(keys)), end
