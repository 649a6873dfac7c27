"""The images to predict, without labels: listed once in a fixed order, and read by any process.

A source is a folder, a glob, a tar, a Parquet file of images, a dataset of ours, or a table of addresses; local or s3://.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from typing import Any, NamedTuple

import pyarrow as pa

from vitray.data.shards.checking import check_shard, check_sizes
from vitray.data.shards.manifest import IMAGE_FILE, MANIFEST, open_dataset, row_keys
from vitray.data.shards.options import ShardSettings
from vitray.data.shards.sources import LARGEST_FILE, PATH_COLUMNS, list_tar
from vitray.data.shards.tables import holds_images, image_rows, read_images, read_index
from vitray.errors import ConfigError, nearest
from vitray.inference.images import EncodedImage, undecodable
from vitray.system import storage

ADDRESS_COLUMNS = (*PATH_COLUMNS, "url", "uri", "address")
READS_AT_ONCE = 16
LISTED_AT_ONCE = 2**16
# Images that are decoded before the work begins; if all are broken, and there are no others, it does not begin.
TRIED = 16

SCHEMA = pa.schema(
    {
        "key": pa.string(),
        "file": pa.string(),
        "row": pa.int64(),  # of a Parquet file
        "start": pa.int64(),  # byte in a tar
        "size": pa.int64(),
        "reason": pa.string(),  # why the image is skipped unread
    }
)


class Entry(NamedTuple):
    """One image; its fields are the columns of SCHEMA."""

    key: str
    file: str
    row: int | None = None
    start: int | None = None
    size: int | None = None
    """None for a row of a Parquet file."""
    reason: str | None = None


@dataclass(frozen=True)
class ImageList:
    """The images of a source, each key once; picklable."""

    url: str
    table: pa.Table
    identity: str
    """A hash of the listed images, and of size and time of change of their files."""
    column: str | None = None
    """The column of a dataset's images; None takes the usual names."""
    other_files: tuple[str, ...] = ()
    """Files of the source that are neither images nor hold any."""
    repeated: int = 0
    """Images left out because an earlier one has their key."""
    shards: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """{address: (bytes, sha256)} of a dataset's shards."""

    def __len__(self) -> int:
        return self.table.num_rows

    def read(self, numbers: Sequence[int]) -> list[EncodedImage]:
        """Return some images without labels."""
        entries = [Entry(*row.values()) for row in self.table.take(pa.array(numbers, pa.int64())).to_pylist()]
        contents: list[bytes | str] = []
        for table, group in groupby(entries, key=lambda entry: None if entry.row is None else entry.file):
            members = list(group)
            if table is not None:
                if table in self.shards:
                    check_shard(table, *self.shards[table])
                contents += read_images(table, self.column, [entry.row for entry in members if entry.row is not None])
            elif any(storage.is_remote(entry.file) for entry in members):
                with ThreadPoolExecutor(READS_AT_ONCE) as pool:
                    contents += pool.map(_read_file, members)
            else:
                contents += map(_read_file, members)
        return [EncodedImage(content, -1, entry.key) for entry, content in zip(entries, contents, strict=True)]


def list_images(url: str, splits: Sequence[str] = ()) -> ImageList:
    """Return the images of a source; `splits` are those of a dataset of ours, none for all."""
    address, ending = storage.absolute(url), url.lower().rpartition(".")[2]
    others: list[str] = []
    files: dict[str, Any] = {}
    # On S3 an address with options, as in ?secret_key=..., is refused below.
    is_glob = storage.is_remote(url) and "?" in url and not re.search(r"\?.*[=&]", url)
    if not is_glob and storage.exists(storage.join(address, MANIFEST)):
        return _list_dataset(address, splits)
    if splits:
        raise ConfigError(f"--split {splits[0]}: needs a dataset written by `vitray shard`, and {url} is none")
    if not is_glob and storage.exists(address):
        if ending in ("csv", "tsv") or (ending == "parquet" and not holds_images(address, None)):
            entries: Iterator[Entry] = _list_addresses(address, files)
        else:
            files = {address.rpartition("/")[2]: storage.file_version(address)}
            entries = _list_files(address.rpartition("/")[0], files, others)
    else:
        has_wildcard = re.search(r"[*?[]", url)  # of the user's words: the working folder may have brackets
        folder, files = address, {} if is_glob else storage.list_entries(address)
        if has_wildcard and not files:
            folder, files = _matching(address)
        if not files:
            wanted = "a folder, a glob, .tar, .parquet or .csv, local or s3://"
            raise ConfigError(f"{url}: no files here; expected {wanted}")
        entries = _list_files(folder, files, others)
    table, digest, repeated = _tabulated(entries)
    if not table.num_rows:
        got = f"none of {len(files)} files is an image, such as {others[0]}" if others else "no images in it"
        raise ConfigError(f"{url}: {got}; expected .jpg, .png, .webp, .tar, .parquet, ...")
    digest.update(json.dumps([[name, files[name]] for name in sorted(files.keys() - set(others))]).encode())
    return ImageList(address, table, digest.hexdigest(), None, tuple(others), repeated)


def check_some_decode(images: ImageList) -> None:
    """Refuse a small source of which no image can be decoded, and a source that cannot be read."""
    count, first = min(TRIED, len(images)), ""
    for index in range(count):
        [image] = images.read([index])
        [reason] = undecodable([image])
        if reason is None:
            return
        first = first or f"{image.key}: {reason}"
    if count == len(images):
        raise ConfigError(f"{images.url}: none of {count} images can be decoded: {first}")


def _read_file(entry: Entry) -> bytes | str:
    if entry.reason:
        return entry.reason
    if not storage.is_remote(entry.file) and not os.access(entry.file, os.R_OK):
        return "cannot be read: permission denied"
    assert entry.size is not None, "rows of Parquet files are read elsewhere"
    if entry.size > LARGEST_FILE:
        return f"too large: {entry.size} bytes"
    return storage.read_range(entry.file, entry.start or 0, entry.size)


def _list_dataset(url: str, splits: Sequence[str]) -> ImageList:
    dataset = open_dataset(url)
    for split in splits:
        if split not in dataset.splits:
            known = ", ".join(dataset.splits)
            raise ConfigError(f"--split {split}: {url} has {known}{nearest(split, dataset.splits)}")
    chosen = list(dict.fromkeys(splits)) or list(dataset.splits)
    check_sizes(dataset, chosen)

    def entries() -> Iterator[Entry]:
        for split in chosen:
            keys = row_keys(dataset, split)
            # Keys of files indexed in place are numbers that each split begins anew.
            prefix = "" if dataset.columns.key else f"{split}/"
            for shard in dataset.splits[split].shards:
                for row, key in enumerate(islice(keys, shard.rows)):
                    yield Entry(prefix + key, dataset.address(shard), row)

    table, _, repeated = _tabulated(entries())
    parts = [shard for split in chosen for shard in dataset.splits[split].shards]
    shards = {dataset.address(shard): (shard.bytes, shard.sha256) for shard in parts}
    identity = hashlib.sha256(json.dumps([dataset.identity, chosen]).encode()).hexdigest()
    return ImageList(url, table, identity, dataset.columns.image.partition(".")[0], (), repeated, shards)


def _matching(pattern: str) -> tuple[str, dict[str, Any]]:
    """Return the folder above the first wildcard, and its files that match; `**` matches any number of folders."""
    folder = re.split(r"[*?[]", pattern)[0].rpartition("/")[0]
    if not folder:
        got = "got a wildcard in the first folder, for which all files of this machine would be listed"
        raise ConfigError(f"{pattern}: {got}; expected a folder above it, as in /data/*.jpg")
    wildcards = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.findall(r"\*\*/?|\*|\?|\[[^]]+\]|.", pattern[len(folder) + 1 :])
    expression = "".join(
        wildcards.get(part) or (part.replace("[!", "[^") if len(part) > 1 else re.escape(part)) for part in parts
    )
    try:
        matches = re.compile(expression).fullmatch
    except re.error as error:
        raise ConfigError(f"{pattern}: not a glob: {error}") from None
    return folder, {name: version for name, version in storage.list_entries(folder).items() if matches(name)}


def _list_files(folder: str, files: Mapping[str, Any], others: list[str]) -> Iterator[Entry]:
    """Yield the images in files, by the names of these; others are noted."""
    for name, version in files.items():
        file, ending = storage.join(folder, name), name.lower().rpartition(".")[2]
        hidden = any(part.startswith(".") for part in name.split("/"))
        if hidden:
            others.append(name)
        elif IMAGE_FILE.search(name):
            reason = None if version else "a pipe, device or broken link"
            yield Entry(name, file, size=version.size if version else 0, reason=reason)
        elif version and ending == "tar":
            for item in list_tar(file, name, ShardSettings()):
                yield Entry(item.name, file, start=item.place, size=item.size, reason=item.reason)
        elif version and ending == "parquet" and holds_images(file, None):
            for row in range(image_rows(file, None)):
                yield Entry(f"{name}:{row}", file, row)
        else:
            others.append(name)


def _list_addresses(url: str, files: dict[str, Any]) -> Iterator[Entry]:
    """Yield the images of a table, and note the versions of their files."""
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        for chunk in iter(partial(_take, _read_addresses(url)), []):
            keys, addresses = zip(*chunk, strict=True)
            for key, file, version in zip(keys, addresses, pool.map(storage.file_version, addresses), strict=True):
                files[key] = version
                yield Entry(key, file, size=version.size if version else 0, reason=None if version else "no such file")


def _read_addresses(url: str) -> Iterator[tuple[str, str]]:
    """Yield each address of a table and its absolute form; a relative path starts at the folder of the table."""
    header, rows = read_index(url)
    column = next((name for name in ADDRESS_COLUMNS if name in header), None)
    if column is None:
        wanted = f"one of {', '.join(ADDRESS_COLUMNS)}{nearest(header[0] if header else '', ADDRESS_COLUMNS)}"
        got = f"its first line has {', '.join(header)}"
        raise ConfigError(f"{url}: no column of addresses: {got}; expected {wanted}")
    folder = url.rpartition("/")[0]
    for number, row in enumerate(rows, 1):
        address = row[column]
        if not address:
            raise ConfigError(f"{url}: row {number}: no address in column {column}")
        try:
            storage.split_url(address)
        except ConfigError as error:
            raise ConfigError(f"{url}: row {number}: {error}") from None
        is_whole = storage.is_remote(address) or address.startswith(("/", "~"))
        yield address, storage.absolute(address) if is_whole else storage.join(folder, address)


def _tabulated(entries: Iterator[Entry]) -> tuple[pa.Table, Any, int]:
    """Return the first entry of each key as a table, a hash of them, and the number of the others."""
    seen: set[str] = set()
    repeated, digest, batches = 0, hashlib.sha256(), []

    def unique(entries: Iterable[Entry]) -> Iterator[Entry]:
        nonlocal repeated
        for entry in entries:
            if entry.key in seen:
                repeated += 1
            else:
                seen.add(entry.key)
                yield entry

    for chunk in iter(partial(_take, unique(entries)), []):
        digest.update(json.dumps(chunk).encode())
        columns = [pa.array(column, field.type) for column, field in zip(zip(*chunk, strict=True), SCHEMA, strict=True)]
        batches.append(pa.record_batch(columns, schema=SCHEMA))
    return pa.Table.from_batches(batches, SCHEMA), digest, repeated


def _take(values: Iterator[Any]) -> list[Any]:
    return list(islice(values, LISTED_AT_ONCE))
