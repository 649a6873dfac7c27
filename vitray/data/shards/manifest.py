"""dataset.json: the description of a dataset, and the mark of a complete one; and the hold-out split.

Knows neither torch nor ray.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from vitray.cluster import session
from vitray.config.parsing import short
from vitray.config.sections import Section, Size, Text
from vitray.config.validation import explain_error
from vitray.data.shards.tables import check_layout
from vitray.errors import ConfigError, one_line
from vitray.system import storage

IMAGE_FILE = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?|ppm|avif)$", re.IGNORECASE)
MANIFEST = "dataset.json"
FORMAT = 1
# A split's name begins the names of its shards.
SPLIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_Level = Annotated[float, Field(ge=0, le=1)]
Channels = tuple[_Level, _Level, _Level]
Labels = Literal["one", "several"]


class Shard(Section):
    """One Parquet file of a split."""

    name: str
    """Path below the folder of dataset.json; the full address of a file indexed in place."""
    rows: Size
    bytes: Size
    sha256: str
    row_groups: tuple[Size, ...]
    """Rows of each row group, the unit of reading."""

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        if sum(self.row_groups) != self.rows:
            raise ValueError(
                f"{short(self.name)}: rows: got {self.rows}, expected {sum(self.row_groups)}, as its groups"
            )
        return self


class Split(Section):
    """The shards of one split, in order."""

    shards: Annotated[tuple[Shard, ...], Field(min_length=1)]
    class_counts: tuple[Annotated[int, Field(ge=0)], ...]
    """Images per class, in the order of the class names; an image of several classes counts for each."""

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
    unknown: str | None = None
    """Of several labels an image: the classes of which it is not known whether it shows them; None without such."""

    @model_serializer(mode="wrap")
    def _without_absent(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what datasets of one label an image do not have, so that they stay the same."""
        columns = dump(self)
        return columns if self.unknown else {name: value for name, value in columns.items() if name != "unknown"}


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
    labels: Labels = "one"
    """How many an image has."""
    classes: tuple[Text, ...]
    """Name of each label."""
    mean: Channels
    """Of red, green and blue over the decoded train pixels (all splits if there is no train), in 0..1."""
    std: Channels
    source: str
    seed: int
    settings: dict[str, Any]
    """The settings that decided the content."""
    columns: Columns = Columns()
    others: tuple[str, ...] = ()
    """Further columns of the shards, such as one of groups for data.fold."""
    rejects: Rejects
    duplicates: Duplicates
    url: str = Field("", exclude=True)
    """The folder of dataset.json."""

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        for name, split in self.splits.items():
            if not SPLIT_NAME.fullmatch(name):
                raise ValueError(f"splits: got {short(name)}, expected up to 64 of the characters A-Z a-z 0-9 _ . -")
            if len(split.class_counts) != len(self.classes):
                counts = f"got {len(split.class_counts)} numbers, expected {len(self.classes)}, one for each class"
                raise ValueError(f"splits.{name}.class_counts: {counts}")
        return self

    @cached_property
    def identity(self) -> str:
        """A hash of the images, their labels and their order, independent of their address."""
        files = {
            name: [[shard.rows, shard.sha256, shard.row_groups] for shard in split.shards]
            for name, split in self.splits.items()
        }
        content = json.dumps([self.format, files, self.classes, self.columns.model_dump()], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def part_identity(self, split: str, *part: str) -> str:
        """Return a hash of the images of a split, or of a named part of it."""
        return hashlib.sha256(json.dumps([self.identity, split, *part]).encode()).hexdigest()

    def address(self, shard: Shard) -> str:
        """Return the address of a shard."""
        is_in_place = storage.is_remote(shard.name) or shard.name.startswith("/")
        return shard.name if is_in_place else storage.join(self.url, shard.name)


def open_dataset(url: str) -> Dataset:
    """Return the dataset in a folder, local or s3://."""
    manifest = storage.join(url, MANIFEST)
    if not storage.exists(manifest):
        hint = "; this job has only the files that were sent with it" if session.job_dir() else ""
        command = f"vitray shard {shlex.quote(url)} {shlex.quote(url.rstrip('/') + '_shards')}"
        make = f"it holds images: `{command}` makes one" if _holds_images(url) else "create one with `vitray shard`"
        raise ConfigError(f"{url}: not a vitray dataset (no {MANIFEST}); {make}{hint}")
    tree = storage.read_json(manifest)
    if not isinstance(tree, dict) or "format" not in tree:
        raise ConfigError(f"{manifest}: not a dataset.json: expected a JSON object with a format")
    if (version := tree["format"]) != FORMAT:
        raise ConfigError(f"{manifest}: format: got {version!r}, expected {FORMAT}: written by another vitray")
    try:
        return Dataset.model_validate_json(json.dumps(tree)).model_copy(update={"url": url})
    except ValidationError as invalid:
        raise explain_error(invalid, Dataset, {}, manifest) from None


def _holds_images(url: str) -> bool:
    """Whether a local folder, or one of its first folders, holds images."""
    folders = [url] if not storage.is_remote(url) and Path(url).is_dir() else []
    with suppress(OSError):
        for _ in range(20):
            if not folders:
                break
            entries = list(islice(Path(folders.pop(0)).iterdir(), 1000))
            if any(IMAGE_FILE.search(entry.name) for entry in entries):
                return True
            folders += sorted(str(entry) for entry in entries if entry.is_dir())
    return False


def save_dataset(dataset: Dataset) -> None:
    """Write dataset.json, which completes the dataset."""
    text = dataset.model_dump_json(indent=1)
    storage.write_bytes(storage.join(dataset.url, MANIFEST), f"{text}\n".encode())


def row_keys(dataset: Dataset, split: str) -> Iterator[str]:
    """Yield the key of each row of a split, in order."""
    shards = dataset.splits[split].shards
    first = 0
    for index, shard in enumerate(shards):
        if dataset.columns.key is None:  # a file indexed in place: keys are shard and row, as in the stream
            yield from (f"{index}:{row}" for row in range(first, first + shard.rows))
        else:
            keys = read_column(dataset, shard, dataset.columns.key)
            if not all(isinstance(key, str) for key in keys):
                raise ConfigError(
                    f"{dataset.address(shard)}: column {dataset.columns.key}: expected a text in each row"
                )
            yield from keys
        first += shard.rows


def read_column(dataset: Dataset, shard: Shard, name: str) -> list[Any]:
    """Return the values of a column of a shard."""
    url = dataset.address(shard)
    storage.check_plain(url)
    files, path = storage.filesystem(url)
    with shard_errors(url), pq.ParquetFile(path, filesystem=files) as file:
        check_layout(file.metadata, url, files.get_file_info(path).size)
        values = file.read(columns=[name]).flatten().column(name).to_pylist()
        if len(values) != shard.rows:
            raise ConfigError(f"{url}: column {name}: expected a value in each of {shard.rows} rows")
    return values


@contextmanager
def shard_errors(url: str) -> Iterator[None]:
    """Turn the errors of reading a shard that is no Parquet, is damaged or lacks a column into one message.

    An OSError of a remote shard stays one: its store may be away, and a later attempt may succeed.
    """
    try:
        yield
    except ConfigError:
        raise
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        text = f"{url}: not the shard that dataset.json describes, or damaged: {one_line(error)}"
        is_temporary = isinstance(error, OSError) and storage.is_remote(url)
        raise (OSError if is_temporary else ConfigError)(text) from None
