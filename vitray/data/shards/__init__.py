"""Datasets as shards: any source of labelled images written once as Parquet, shuffled, checked and counted.

`write_dataset(read_job(source, dest))` makes one, `open_dataset(url)` opens it. A dataset is its dataset.json, written
last; without one there is no dataset.
"""

from vitray.data.shards.development import set_aside as set_aside
from vitray.data.shards.manifest import Dataset as Dataset
from vitray.data.shards.manifest import open_dataset as open_dataset
from vitray.data.shards.options import Job as Job
from vitray.data.shards.options import Settings as Settings
from vitray.data.shards.options import read_job as read_job
from vitray.data.shards.writing import write_dataset as write_dataset
