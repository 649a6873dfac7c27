"""A part of a split set aside to choose settings with, by a hash of each image's key: the same wherever it lies."""

import hashlib

import numpy as np
import pyarrow.parquet as pq

from vitray import storage
from vitray.data.shards.manifest import Dataset


def set_aside(dataset: Dataset, split: str, share: float) -> np.ndarray:
    """For each row of a split, whether it is set aside. A larger share sets aside these images and others."""
    keys = (key for shard in range(len(dataset.splits[split].shards)) for key in _keys(dataset, split, shard))
    most = int(share * 2**64)
    return np.array([int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < most for key in keys])


def _keys(dataset: Dataset, split: str, index: int) -> list[str]:
    shards = dataset.splits[split].shards
    if dataset.columns.key is None:  # left in place: the shard and the row name an image, as in the stream
        first = sum(shard.rows for shard in shards[:index])
        return [f"{index}:{row}" for row in range(first, first + shards[index].rows)]
    files, path = storage.filesystem(dataset.address(shards[index]))
    with files.open_input_file(path) as file:
        return pq.read_table(file, columns=[dataset.columns.key]).flatten().column(0).to_pylist()
