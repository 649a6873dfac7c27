"""Parquet sources: files with images in their rows, and indexes of paths."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vitray.errors import ConfigError, nearest
from vitray.system import storage

Part = TypeVar("Part")

IMAGE_COLUMNS = ("image", "img", "jpg", "png")
# A Parquet file of a kilobyte may hold a billion rows: equal values, and values that repeat an earlier one, take almost
# no bytes. An image takes at least one; the texts of an index and the images of one read may take this many times the
# bytes of their file, and any file may expand to this size.
MOST_EXPANSION, SMALL = 100, 2**28
# Bytes and rows of images that are decoded at once.
BATCH_BYTES, BATCH_ROWS = 2**26, 256
LABEL_COLUMNS = ("label", "labels", "class", "class_name", "target", "category", "fine_label")


class ImageTable(NamedTuple):
    """One Parquet file with images in its rows."""

    file: str
    image: str
    """Path of the column with the bytes: `image`, or `image.bytes` of the Hugging Face layout."""
    label: str
    labels: list[Any]
    row_groups: tuple[int, ...]
    names: tuple[str, ...]
    """Class names of the file's metadata, empty if it has none."""
    others: tuple[list[Any], ...] = ()
    """The values of further columns."""
    unknown: list[Any] | None = None
    """The values of the column of unknown classes; None without one."""
    has_lists: bool = False
    """Whether the labels are lists."""


@contextmanager
def _opened(url: str, texts: Sequence[str] = ()) -> Iterator[pq.ParquetFile]:
    """Yield a Parquet file; equal values of the columns `texts` share memory."""
    files, path = storage.filesystem(url)
    storage.check_plain(url)
    try:
        with pq.ParquetFile(path, filesystem=files, read_dictionary=list(texts)) as file:
            check_layout(file.metadata, url, files.get_file_info(path).size)
            yield file
    except FileNotFoundError:
        raise ConfigError(f"{url}: no such file") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{url}: cannot be read as Parquet: {' '.join(str(error).split())}") from None


def check_layout(layout: pq.FileMetaData, url: str, size: int) -> None:
    """Refuse a Parquet file of a size whose rows, by its footer, would expand out of proportion."""
    if layout.num_rows > max(1, size):
        raise ConfigError(f"{url}: {layout.num_rows:,} rows in {size:,} bytes, expected at most one a byte")
    groups = (layout.row_group(group) for group in range(layout.num_row_groups))
    list(_bounded(groups, lambda group: group.total_byte_size, url, size, "rows"))


def read_table(url: str) -> pa.Table:
    """Return a Parquet file that vitray wrote.

    In this thread: others of Arrow may free the file's bytes a little later, which aborts an interpreter that ends
    (apache/arrow#34314). Buffering ahead would start them, too.
    """
    with pq.ParquetFile(io.BytesIO(storage.read_bytes(url)), pre_buffer=False) as file:
        return file.read(use_threads=False)


def find_column(names: Sequence[str], asked: str | None, usual: Sequence[str], where: str, setting: str) -> str:
    """Return the column that a setting asks for, or the first one with a usual name."""
    for name in [asked] if asked else usual:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: has {names.count(name)} columns {name}; expected one")
        if name in names:
            return name
    problem = f"no column {asked!r}" if asked else f"no column of images or labels is called {' or '.join(usual)}"
    close = nearest(asked or setting, names)
    raise ConfigError(f"{where}: {problem}; it has {', '.join(names)}: set {setting}=COLUMN{close}")


def _image_path(schema: pa.Schema, asked: str | None, where: str) -> str:
    name = find_column(schema.names, asked, IMAGE_COLUMNS, where, "image")
    kind = schema.field(name).type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return f"{name}.bytes"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return name
    raise ConfigError(f"{where}: column {name} is {kind}, expected binary or struct<bytes, path>")


def holds_images(url: str, asked: str | None) -> bool:
    """Whether the rows hold image bytes rather than paths."""
    with _opened(url) as file:
        schema = file.schema_arrow
    binary = (pa.types.is_struct, pa.types.is_binary, pa.types.is_large_binary)
    columns = [asked] if asked else IMAGE_COLUMNS
    return any(field.name in columns and any(is_a(field.type) for is_a in binary) for field in schema)


def read_image_table(
    url: str, image: str | None, label: str | None, columns: Sequence[str] = (), unknown: str | None = None
) -> ImageTable:
    """Return the labels and layout of a file of images, without reading the images."""
    with _opened(url) as file:
        schema = file.schema_arrow
        image_path = _image_path(schema, image, url)
        label = find_column(schema.names, label, LABEL_COLUMNS, url, "label")
        names = _hugging_face_names(schema.metadata or {}, label)
    lists = [label] + ([find_column(schema.names, unknown, (), url, "unknown")] if unknown else [])
    wanted = [*lists, *(find_column(schema.names, name, (), url, "columns") for name in columns)]
    for name in wanted:
        kind = schema.field(name).type
        inner = kind.value_type if name in lists and _is_list(kind) else kind
        if pa.types.is_nested(inner):
            expected = "numbers or text, or a list of them" if name in lists else "numbers or text"
            raise ConfigError(f"{url}: column {name} is {kind}, expected {expected}")
    with _opened(url, [name for name in wanted if not _is_list(schema.field(name).type)]) as file:
        _check_lists(url, file, [name for name in wanted if _is_list(schema.field(name).type)])
        table = file.read(columns=list(dict.fromkeys(wanted)))
        labels, *others = (
            [value for chunk in table.column(name).chunks for value in _values(chunk)] for name in wanted
        )
        undecided = others.pop(0) if unknown else None
        has_lists = _is_list(schema.field(label).type)
        groups = tuple(_group_sizes(file))
        return ImageTable(url, image_path, label, labels, groups, names, tuple(others), undecided, has_lists)


def _check_lists(url: str, file: pq.ParquetFile, names: Sequence[str]) -> None:
    """Refuse lists that together have more values than the file has bytes."""
    layout, size = file.metadata, max(1, _size(url))
    for group in map(layout.row_group, range(layout.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.path_in_schema.partition(".")[0] in names and chunk.num_values > max(size, 10**6):
                raise ConfigError(
                    f"{url}: column {chunk.path_in_schema}: {chunk.num_values:,} values in {size:,} bytes, expected at"
                    " most one a byte"
                )


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _values(column: pa.Array) -> list[Any]:
    """Return the values of a column; equal texts are one object."""
    if not isinstance(column, pa.DictionaryArray):
        return column.to_pylist()
    values = column.dictionary.to_pylist()
    return [None if place is None else values[place] for place in column.indices.to_pylist()]


def image_rows(url: str, image: str | None) -> int:
    """Return the number of rows of a file of images."""
    with _opened(url) as file:
        _image_path(file.schema_arrow, image, url)
        return file.metadata.num_rows


def _group_sizes(file: pq.ParquetFile) -> list[int]:
    return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


def _hugging_face_names(metadata: Mapping[bytes, bytes], label: str) -> tuple[str, ...]:
    try:
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][label]
        feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)  # what a list holds
        names = feature["names"]
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def read_images(url: str, image: str | None, rows: Sequence[int]) -> Iterator[bytes]:
    """Yield the image bytes of some rows in ascending order; keeps few of them in memory."""
    with _opened(url) as file:
        path = _image_path(file.schema_arrow, image, url)
        starts = np.cumsum([0, *_group_sizes(file)])
        groups = (np.searchsorted(starts, rows, side="right") - 1).tolist()
        contents = (
            content
            for group, members in groupby(zip(rows, groups, strict=True), key=itemgetter(1))
            for content in _read_group(file, group, path, [row - int(starts[group]) for row, _ in members])
        )
        yield from _bounded(contents, len, url, _size(url), "images")


def _read_group(file: pq.ParquetFile, group: int, path: str, rows: Sequence[int]) -> Iterator[bytes]:
    """Yield the bytes of some rows of a row group, in ascending order; keeps a batch of rows in memory."""
    layout = file.metadata.row_group(group)
    chunks = [layout.column(index) for index in range(layout.num_columns)]
    # No row is larger than all different values of its column.
    largest = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == path)
    batches = file.iter_batches(max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, largest))), [group], [path])
    start, contents = 0, pa.array([], pa.binary())
    for row in rows:
        while row >= start + len(contents):
            start += len(contents)
            contents = next(batches).column(0)
            if pa.types.is_struct(contents.type):
                contents = contents.field("bytes")
        yield contents[row - start].as_py() or b""


def _size(url: str) -> int:
    version = storage.file_version(url)
    return version.size if version else 0


def _bounded(
    parts: Iterable[Part], bytes_of: Callable[[Part], int], url: str, size: int, content: str
) -> Iterator[Part]:
    """Yield the parts of a file's content; refuse a file of this size that expands out of proportion."""
    left = most = max(SMALL, MOST_EXPANSION * size)
    for part in parts:
        left -= bytes_of(part)
        if left < 0:
            raise ConfigError(
                f"{url}: {size:,} bytes, but its {content} take more than {most:,}; expected at most"
                f" {MOST_EXPANSION} times its own"
            )
        yield part


def read_index(url: str) -> tuple[list[str], Iterable[dict[str, str]]]:
    """Return the columns and the rows of an index, with all values as text."""
    if url.lower().endswith(".parquet"):
        with _opened(url) as file:
            schema = file.schema_arrow
        names = [field.name for field in schema if not pa.types.is_nested(field.type)]
        return names, _index_rows(url, names)
    try:
        text = storage.read_bytes(url).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{url}: cannot be read as text: {error}") from None
    lines = io.StringIO(text, newline="")
    reader = csv.DictReader(lines, delimiter="\t" if url.lower().endswith(".tsv") else ",", restval="")
    try:
        return list(reader.fieldnames or []), list(reader)
    except csv.Error as error:
        raise ConfigError(f"{url}:{reader.line_num}: cannot be read as a table: {error}") from None


def _index_rows(url: str, names: Sequence[str]) -> Iterator[dict[str, str]]:
    with _opened(url, names) as file:
        rows = (
            row
            for batch in file.iter_batches(columns=list(names))
            for row in zip(*(map(_text, _values(column)) for column in batch.columns), strict=True)
        )
        for row in _bounded(rows, lambda row: sum(map(len, row)), url, _size(url), "texts"):
            yield dict(zip(names, row, strict=True))


def _text(value: Any) -> str:
    return "" if value is None else str(value)
