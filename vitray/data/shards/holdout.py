"""The hold-out split: a part of train to choose settings on, selected by a hash of each image's key."""

import hashlib

import numpy as np
import pyarrow.parquet as pq

from vitray import storage
from vitray.data.shards.manifest import Dataset


def holdout_mask(dataset: Dataset, split: str, share: float) -> np.ndarray:
    """Return True for each row of a split that is held out; a larger share includes the images of a smaller one."""
    keys = (key for shard in range(len(dataset.splits[split].shards)) for key in _keys(dataset, split, shard))
    limit = int(share * 2**64)
    return np.array([int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < limit for key in keys])


def _keys(dataset: Dataset, split: str, index: int) -> list[str]:
    shards = dataset.splits[split].shards
    if dataset.columns.key is None:  # a file indexed in place: keys are shard and row, as in the stream
        first = sum(shard.rows for shard in shards[:index])
        return [f"{index}:{row}" for row in range(first, first + shards[index].rows)]
    files, path = storage.filesystem(dataset.address(shards[index]))
    with files.open_input_file(path) as file:
        return pq.read_table(file, columns=[dataset.columns.key]).flatten().column(0).to_pylist()
