"""Parquet as a source: files whose rows hold the images, and indexes of paths."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vitray import storage
from vitray.data.shards.manifest import MANIFEST, open_dataset
from vitray.errors import ConfigError, nearest


class Part(NamedTuple):
    """One Parquet file with images in its rows."""

    file: str
    image: str
    """Path of the column with the bytes: `image`, or `image.bytes` of the Hugging Face layout."""
    label: str
    labels: list[Any]
    row_groups: tuple[int, ...]
    names: tuple[str, ...]
    """Class names, where the file's metadata says them."""


@contextmanager
def _opened(url: str) -> Iterator[pq.ParquetFile]:
    files, path = storage.filesystem(url)
    try:
        with pq.ParquetFile(path, filesystem=files) as file:
            yield file
    except FileNotFoundError:
        raise ConfigError(f"{url}: no such file") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{url}: cannot be read as Parquet: {' '.join(str(error).split())}") from None


def column(names: Iterable[str], wanted: str | None, usual: Sequence[str], where: str, setting: str) -> str:
    """The column that a setting names, or the first usual one there is."""
    names = list(names)
    found = next((name for name in ([wanted] if wanted else usual) if name in names), None)
    if found is None:
        asked = f"no column {wanted!r}" if wanted else f"no column of images or labels is called {' or '.join(usual)}"
        close = nearest(wanted or setting, names)
        raise ConfigError(f"{where}: {asked}; it has {', '.join(names)}: say {setting}=COLUMN{close}")
    return found


def _image_path(schema: pa.Schema, wanted: str | None, usual: Sequence[str], where: str) -> str:
    name = column(schema.names, wanted, usual, where, "image")
    kind = schema.field(name).type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return f"{name}.bytes"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return name
    raise ConfigError(f"{where}: column {name} is {kind}, wanted binary or struct<bytes, path>")


def holds_images(url: str, wanted: str | None, usual: Sequence[str]) -> bool:
    """Whether the rows hold image bytes, rather than paths."""
    with _opened(url) as file:
        schema = file.schema_arrow
    binary = (pa.types.is_struct, pa.types.is_binary, pa.types.is_large_binary)
    asked = [wanted] if wanted else usual
    return any(field.name in asked and any(is_a(field.type) for is_a in binary) for field in schema)


def read_part(
    url: str, image: str | None, image_names: Sequence[str], label: str | None, label_names: Sequence[str]
) -> Part:
    """What one file of images says without its images being read."""
    with _opened(url) as file:
        schema = file.schema_arrow
        image_path = _image_path(schema, image, image_names, url)
        label = column(schema.names, label, label_names, url, "label")
        labels = file.read(columns=[label]).column(0).to_pylist()
        counts = (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
        groups = tuple(rows for rows in counts if rows)
        return Part(url, image_path, label, labels, groups, _hugging_face_names(schema.metadata or {}, label))


def _hugging_face_names(metadata: Mapping[bytes, bytes], label: str) -> tuple[str, ...]:
    try:
        return tuple(json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"])
    except (KeyError, ValueError, TypeError):
        return ()


def class_names(source: str) -> tuple[str, ...] | None:
    """The class names of a dataset of ours that is sharded again."""
    return open_dataset(source).classes if storage.exists(storage.join(source, MANIFEST)) else None


def read_rows(url: str, image: str | None, usual: Sequence[str], rows: Sequence[int]) -> Iterator[bytes]:
    """The image bytes of some rows in rising order, one row group in memory at a time."""
    with _opened(url) as file:
        path = _image_path(file.schema_arrow, image, usual, url)
        starts = np.cumsum([0, *(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))])
        groups = np.searchsorted(starts, rows, side="right") - 1
        held, contents = -1, pa.chunked_array([], pa.binary())
        for row, group in zip(rows, groups.tolist(), strict=True):
            if group != held:
                held, contents = group, file.read_row_group(group, columns=[path]).column(0)
                if path.endswith(".bytes"):
                    contents = pa.chunked_array([chunk.field("bytes") for chunk in contents.chunks])
            yield contents[row - int(starts[group])].as_py() or b""


def read_text(url: str) -> tuple[list[str], Iterable[dict[str, str]]]:
    """The columns and the rows of an index, each value as text."""
    with _opened(url) as file:
        table = file.read()
    rows = table.to_pylist()
    return table.column_names, ({key: "" if (v := row[key]) is None else str(v) for key in row} for row in rows)
