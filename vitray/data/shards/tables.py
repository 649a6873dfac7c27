"""Parquet sources: files with images in their rows, and indexes of paths."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vitray import storage
from vitray.errors import ConfigError, nearest

IMAGE_COLUMNS = ("image", "img", "jpg", "png")
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


@contextmanager
def _opened(url: str) -> Iterator[pq.ParquetFile]:
    files, path = storage.filesystem(url)
    storage.check_plain(url)
    try:
        with pq.ParquetFile(path, filesystem=files) as file:
            yield file
    except FileNotFoundError:
        raise ConfigError(f"{url}: no such file") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{url}: cannot be read as Parquet: {' '.join(str(error).split())}") from None


def find_column(names: Sequence[str], asked: str | None, usual: Sequence[str], where: str, setting: str) -> str:
    """Return the column that a setting asks for, or the first one with a usual name."""
    for name in [asked] if asked else usual:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: has {names.count(name)} columns {name}; wanted one")
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
    raise ConfigError(f"{where}: column {name} is {kind}, wanted binary or struct<bytes, path>")


def holds_images(url: str, asked: str | None) -> bool:
    """Whether the rows hold image bytes rather than paths."""
    with _opened(url) as file:
        schema = file.schema_arrow
    binary = (pa.types.is_struct, pa.types.is_binary, pa.types.is_large_binary)
    columns = [asked] if asked else IMAGE_COLUMNS
    return any(field.name in columns and any(is_a(field.type) for is_a in binary) for field in schema)


def read_image_table(url: str, image: str | None, label: str | None) -> ImageTable:
    """Return the labels and layout of a file of images, without reading the images."""
    with _opened(url) as file:
        schema = file.schema_arrow
        image_path = _image_path(schema, image, url)
        label = find_column(schema.names, label, LABEL_COLUMNS, url, "label")
        labels = file.read(columns=[label]).column(0).to_pylist()
        groups = tuple(_group_sizes(file))
        return ImageTable(url, image_path, label, labels, groups, _hugging_face_names(schema.metadata or {}, label))


def image_rows(url: str, image: str | None) -> int:
    """Return the number of rows of a file of images."""
    with _opened(url) as file:
        _image_path(file.schema_arrow, image, url)
        return file.metadata.num_rows


def _group_sizes(file: pq.ParquetFile) -> list[int]:
    return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


def _hugging_face_names(metadata: Mapping[bytes, bytes], label: str) -> tuple[str, ...]:
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def read_images(url: str, image: str | None, rows: Sequence[int]) -> Iterator[bytes]:
    """Yield the image bytes of some rows in ascending order; keeps one row group in memory."""
    with _opened(url) as file:
        path = _image_path(file.schema_arrow, image, url)
        starts = np.cumsum([0, *_group_sizes(file)])
        groups = np.searchsorted(starts, rows, side="right") - 1
        current, contents = -1, pa.chunked_array([], pa.binary())
        for row, group in zip(rows, groups.tolist(), strict=True):
            if group != current:
                current, contents = group, file.read_row_group(group, columns=[path]).column(0)
                if pa.types.is_struct(contents.type):
                    contents = pa.chunked_array([chunk.field("bytes") for chunk in contents.chunks])
            yield contents[row - int(starts[group])].as_py() or b""


def read_index(url: str) -> tuple[list[str], Iterable[dict[str, str]]]:
    """Return the columns and the rows of an index, with all values as text."""
    if url.lower().endswith(".parquet"):
        with _opened(url) as file:
            table = file.read()
        rows = table.to_pylist()
        return table.column_names, ({key: "" if (v := row[key]) is None else str(v) for key in row} for row in rows)
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
