"""Datasets as shards: any source of labelled images written once as Parquet, shuffled, checked and counted.

`write_dataset(read_job(source, dest))` makes one, `open_dataset(url)` opens it. A dataset is its dataset.json, written
last; without one there is no dataset.
"""

from vitray.shards.development import set_aside as set_aside
from vitray.shards.job import Job as Job
from vitray.shards.job import Settings as Settings
from vitray.shards.job import read_job as read_job
from vitray.shards.manifest import Dataset as Dataset
from vitray.shards.manifest import open_dataset as open_dataset
from vitray.shards.writing import write_dataset as write_dataset
