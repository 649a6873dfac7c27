"""dataset.json: the description of a dataset, and the mark of a complete one; and the hold-out split.

Knows neither torch nor ray.
"""

import hashlib
import json
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
from pydantic import Field, ValidationError

from vitray import storage
from vitray.cluster import session
from vitray.config.sections import Section, Size
from vitray.config.validation import explain_error
from vitray.errors import ConfigError

MANIFEST = "dataset.json"
FORMAT = 1
Channels = tuple[float, float, float]


class Shard(Section):
    """One Parquet file of a split."""

    name: str
    """Path below the folder of dataset.json; the full address of a file indexed in place."""
    rows: Size
    bytes: Size
    sha256: str
    row_groups: tuple[Size, ...]
    """Rows of each row group, the unit of reading."""


class Split(Section):
    """The shards of one split, in order."""

    shards: tuple[Shard, ...]
    class_counts: tuple[int, ...]
    """Images per class, in the order of the class names."""

    @property
    def rows(self) -> int:
        """Images in the split."""
        return sum(shard.rows for shard in self.shards)


class Columns(Section):
    """The column names of the shards; a dot leads into a struct."""

    image: str = "image"
    label: str = "label"
    key: str | None = "key"
    """None for files indexed in place, where (shard, row) is the key."""


class Duplicates(Section):
    """Counts of duplicate images, as the `dedupe` setting defines them."""

    within: dict[str, int]
    """{split: images that repeat an earlier one of the split}; they remain in the dataset."""
    across: int
    """Images of train, or of a later split, that another split contains too."""
    removed: int
    """Images of `across` that were removed from train."""


class Rejects(Section):
    """Rejected images; rejects.parquet lists each with its reason."""

    count: int
    reasons: dict[str, int]


class Dataset(Section):
    """The content of dataset.json, with its address."""

    format: Literal[1] = FORMAT
    splits: dict[str, Split]
    classes: tuple[str, ...]
    """Name of each label."""
    mean: Channels
    """Of red, green and blue over the decoded train pixels (all splits if there is no train), in 0..1."""
    std: Channels
    source: str
    seed: int
    settings: dict[str, Any]
    """The settings that decided the content."""
    columns: Columns = Columns()
    rejects: Rejects
    duplicates: Duplicates
    url: str = Field("", exclude=True)
    """The folder of dataset.json."""

    @cached_property
    def identity(self) -> str:
        """A hash of the images, their labels and their order, independent of their address."""
        files = {
            name: [[shard.rows, shard.sha256, shard.row_groups] for shard in split.shards]
            for name, split in self.splits.items()
        }
        content = json.dumps([self.format, files, self.classes, self.columns.model_dump()], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def address(self, shard: Shard) -> str:
        """Return the address of a shard."""
        is_in_place = storage.is_remote(shard.name) or shard.name.startswith("/")
        return shard.name if is_in_place else storage.join(self.url, shard.name)


def open_dataset(url: str) -> Dataset:
    """Return the dataset in a folder, local or s3://."""
    manifest = storage.join(url, MANIFEST)
    if not storage.exists(manifest):
        hint = "; this job has only the files that were sent with it" if session.job_dir() else ""
        raise ConfigError(f"{url}: no dataset here: no {MANIFEST}, which `vitray shard` writes last{hint}")
    text = storage.read_bytes(manifest)
    try:
        tree = json.loads(text)
        version = tree["format"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{manifest}: not a dataset.json: wanted a JSON object with a format") from None
    if version != FORMAT:
        raise ConfigError(f"{manifest}: format: got {version!r}, wanted {FORMAT}: written by another vitray")
    try:
        return Dataset.model_validate_json(text).model_copy(update={"url": url})
    except ValidationError as invalid:
        raise explain_error(invalid, Dataset, {}, manifest) from None


def save_dataset(dataset: Dataset) -> None:
    """Write dataset.json, which completes the dataset."""
    text = dataset.model_dump_json(indent=1)
    storage.write_bytes(storage.join(dataset.url, MANIFEST), f"{text}\n".encode())


def holdout_mask(dataset: Dataset, split: str, share: float) -> np.ndarray:
    """Return True for each row of a split that is held out; a larger share includes the images of a smaller one.

    A hash of an image's key decides.
    """
    keys = (key for index in range(len(dataset.splits[split].shards)) for key in _keys(dataset, split, index))
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
