"""Datasets as shards: any source of labeled images, written once as Parquet, shuffled, checked and counted.

`write_dataset(read_request(source, dest))` writes a dataset, `open_dataset(url)` opens it. dataset.json is written
last: a folder without it is no dataset.
"""

from vitray.data.shards.held_out import held_out as held_out
from vitray.data.shards.manifest import Dataset as Dataset
from vitray.data.shards.manifest import open_dataset as open_dataset
from vitray.data.shards.options import ShardRequest as ShardRequest
from vitray.data.shards.options import ShardSettings as ShardSettings
from vitray.data.shards.options import read_request as read_request
from vitray.data.shards.writing import write_dataset as write_dataset
