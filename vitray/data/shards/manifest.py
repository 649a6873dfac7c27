"""dataset.json: what a dataset is, and the only sign that one is complete. Knows neither torch nor ray."""

import hashlib
import json
from functools import cached_property
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError

from vitray import storage
from vitray.cluster import session
from vitray.config.sections import Section, Size
from vitray.config.validation import refusal
from vitray.errors import ConfigError

MANIFEST = "dataset.json"
Format = Literal[1]
Channels = tuple[float, float, float]


class Shard(Section):
    """One Parquet file of a split."""

    name: str
    """Below the folder of dataset.json; the whole address where the file was left in place."""
    rows: Size
    bytes: Size
    sha256: str
    row_groups: tuple[Size, ...]
    """Rows of each row group, the unit in which a stream reads."""


class Split(Section):
    """The shards of one split, in order."""

    shards: tuple[Shard, ...]
    class_counts: tuple[int, ...]
    """Images of each class, in the order of the class names."""

    @property
    def rows(self) -> int:
        """Images in the split."""
        return sum(shard.rows for shard in self.shards)


class Columns(Section):
    """Where a row keeps what; a path with a dot leads into a struct."""

    image: str = "image"
    label: str = "label"
    key: str | None = "key"
    """None where the file was left in place: (shard, row) names the image."""


class Duplicates(Section):
    """Images that show the same as another one, as the `dedupe` setting counts them."""

    within: dict[str, int]
    """{split: images that repeat an earlier one of the split}; these stay."""
    across: int
    """Images of train, or of a later split, that another split has too."""
    removed: int
    """How many of `across` were taken out of train."""


class Rejects(Section):
    """Images set aside, each named with its reason in rejects.parquet."""

    count: int
    reasons: dict[str, int]


class Dataset(Section):
    """Everything that dataset.json says, and where it lies."""

    format: Format = get_args(Format)[0]
    splits: dict[str, Split]
    classes: tuple[str, ...]
    """Name of each label."""
    mean: Channels
    """Of the red, green and blue of the train pixels as shown (of all splits without a train split), in 0..1."""
    std: Channels
    source: str
    seed: int
    settings: dict[str, Any]
    """The words that decided the content."""
    columns: Columns = Columns()
    rejects: Rejects
    duplicates: Duplicates
    url: str = Field("", exclude=True)
    """The folder that holds dataset.json."""

    @cached_property
    def identity(self) -> str:
        """A hash of the images, their labels and their order, wherever they lie."""
        files = {
            name: [[shard.rows, shard.sha256, shard.row_groups] for shard in split.shards]
            for name, split in self.splits.items()
        }
        content = json.dumps([self.format, files, self.classes, self.columns.model_dump()], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def address(self, shard: Shard) -> str:
        """Where a shard lies."""
        in_place = storage.is_remote(shard.name) or shard.name.startswith("/")
        return shard.name if in_place else storage.join(self.url, shard.name)


def open_dataset(url: str) -> Dataset:
    """The dataset in a folder, local or s3://; without its dataset.json there is none."""
    where = storage.join(url, MANIFEST)
    if not storage.exists(where):
        sent = "; this job has only the files that were sent with it" if session.job_folder() else ""
        raise ConfigError(f"{url}: no dataset here: no {MANIFEST}, which `vitray shard` writes last{sent}")
    text = storage.read_bytes(where)
    try:
        tree = json.loads(text)
        version = tree["format"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{where}: not a dataset.json: wanted a JSON object with a format") from None
    if version not in get_args(Format):
        raise ConfigError(f"{where}: format: got {version!r}, wanted {get_args(Format)[0]}: written by another vitray")
    try:
        return Dataset.model_validate_json(text).model_copy(update={"url": url})
    except ValidationError as invalid:
        raise refusal(invalid, Dataset, {}, where) from None


def save_dataset(dataset: Dataset) -> None:
    """Write dataset.json: from here on the dataset exists."""
    text = dataset.model_dump_json(indent=1)
    storage.write_bytes(storage.join(dataset.url, MANIFEST), f"{text}\n".encode())
