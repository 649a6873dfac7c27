"""What can be sharded: each kind of source lists its images in a fixed order, and reads a run of them."""

import csv
import hashlib
import io
import json
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any, NamedTuple, assert_never, get_args

from vitray import storage
from vitray.data.shards import arrays, tables
from vitray.data.shards.demo import demo_classes, demo_item
from vitray.data.shards.options import Job, Kind
from vitray.errors import ConfigError, nearest

SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val"}
SPLITS |= {"test": "test", "testing": "test", "t10k": "test"}

PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image_path", "image")
LABEL_COLUMNS = ("label", "labels", "class", "class_name", "target", "category", "fine_label")
IMAGE_COLUMNS = ("image", "img", "jpg", "png")

# What a source is recognised by: the names of its files, below its folder.
SIGNS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("tar", re.compile(r"\.tar$")),
    ("parquet", re.compile(r"\.parquet$")),
    ("cifar", re.compile(r"(^|/)(batches\.)?meta$")),
    ("idx", arrays.IDX_IMAGES),
    ("folder", re.compile(r"/[^/]+\.(jpe?g|png|webp|gif|bmp|tiff?|ppm|avif)$", re.IGNORECASE)),
)
_TAR_IMAGES = {"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif", "img"}

# Larger files are no images, and would be read whole.
LARGEST_FILE = 2**30


class Entry(NamedTuple):
    """One image as its source lists it."""

    split: str | None
    name: str
    """Below the source; messages and keys use it."""
    file: str
    place: int = 0
    """Byte in a tar, row of a table or an array, index of a demo image."""
    size: int = 0
    """Bytes, where they are known before reading."""
    label: Any = None
    reason: str | None = None
    """Why the image is set aside unread."""


class Item(NamedTuple):
    """One image to be inspected."""

    split: str
    name: str
    file: str
    place: int
    size: int
    label: int | None
    """None where only reading tells."""


class Listing(NamedTuple):
    """A source as a list."""

    kind: Kind
    items: list[Item]
    classes: tuple[str, ...]
    rejects: list[tuple[str, str, str]]
    """(split, name, reason) of what was set aside unread."""
    parts: list[tuple[str, tables.Part]]
    """(split, Parquet file), for datasets left in place."""


# Calls a function once per tuple of arguments, results in order: on the cluster or one by one.
Mapped = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]


def list_source(job: Job, kind: Kind, mapped: Mapped) -> Listing:
    """Every image of the source, in an order that depends on the source alone."""
    names: Sequence[str] | None = None
    parts: list[tables.Part] = []
    match kind:
        case "folder":
            entries = _folder(job.source)
        case "index":
            entries = _index(job)
        case "tar":
            files = [job.source] if job.source.endswith(".tar") else _below(job.source, ".tar")
            calls = [(file, _relative(file, job.source), job.settings.label) for file in files]
            entries = [entry for found in mapped(list_tar, calls) for entry in found]
        case "parquet":
            parts = _parts(job, mapped)
            names = tables.class_names(job.source) or next((part.names for part in parts if part.names), None)
            entries = [entry for part in parts for entry in _rows(part, job.source)]
        case "cifar" | "idx":
            blocks, names = arrays.list_arrays(kind, job.source, job.settings.label)
            entries = [
                Entry(split_in(block.name), f"{block.name}/{row:05d}", block.file, row, 0, label)
                for block in blocks
                for row, label in enumerate(block.labels)
            ]
        case "demo":
            names = demo_classes(job.settings.task)
            train = job.settings.images
            total = train + round(train * job.settings.val_share)
            splits = ("train" if index < train else "val" for index in range(total))
            entries = [Entry(split, f"{split}/{index:06d}", "demo", index) for index, split in enumerate(splits)]
        case _:
            assert_never(kind)
    items, classes, rejects = _numbered(list(_of_splits(job, entries)), names, kind)
    if not items:
        raise ConfigError(f"{job.source}: no image to shard, as a {kind} source")
    by_file = {item.file: item.split for item in items}
    return Listing(kind, items, classes, rejects, [(by_file[p.file], p) for p in parts if p.file in by_file])


def read_items(kind: Kind, items: Sequence[Item], job: Job) -> Iterator[tuple[bytes, int | None]]:
    """The encoded bytes and the label of each item."""
    match kind:
        case "folder" | "index" | "tar":
            places = [(item.file, item.place, item.size) for item in items]
            yield from zip(read_ranges(places), (item.label for item in items), strict=True)
        case "parquet":
            for file, run in groupby(items, key=lambda item: item.file):
                rows = list(run)
                contents = tables.read_rows(file, job.settings.image, IMAGE_COLUMNS, [item.place for item in rows])
                yield from zip(contents, (item.label for item in rows), strict=True)
        case "cifar" | "idx":
            for item in items:
                yield arrays.read_png(kind, item.file, item.place), item.label
        case "demo":
            words = job.settings
            for item in items:
                yield demo_item(item.place, words.seed, words.image_size, words.task)
        case _:
            assert_never(kind)


def read_ranges(places: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
    """The bytes at each (file, start, size), in order; many at once where each waits for a network."""
    if not any(storage.is_remote(file) for file, _, _ in places):
        yield from (storage.read_range(*place) for place in places)
        return
    with ThreadPoolExecutor(16) as pool:
        yield from pool.map(lambda place: storage.read_range(*place), places)


def rank(seed: int, purpose: str, name: str) -> bytes:
    """Where an image comes when all are shuffled: a function of these three, whatever the versions of libraries."""
    return hashlib.blake2b(f"{seed}\0{purpose}\0{name}".encode(), digest_size=16).digest()


def split_in(name: str) -> str | None:
    """The split that a file's name says, as in `imagenet-train-000017.tar` or `test/0000.parquet`."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def recognise(job: Job) -> Kind:
    """What kind of source this is: as `kind=` says, else by the names of its files."""
    if job.settings.kind:
        return job.settings.kind
    source = job.source.lower().rstrip("/")
    if source == "demo":
        return "demo"
    if source.endswith((".csv", ".tsv")):
        return "index"
    if source.endswith(".parquet"):
        return "parquet" if tables.holds_images(job.source, job.settings.image, IMAGE_COLUMNS) else "index"
    if source.endswith(".tar"):
        return "tar"
    if source.endswith((".tar.gz", ".tgz")):
        return "cifar"
    names = storage.list_files(job.source)
    if not names:
        raise ConfigError(f"{job.source}: no files here; wanted a folder, .csv, .parquet or .tar, or the word demo")
    fits: list[Kind] = [kind for kind, sign in SIGNS if any(sign.search(name) for name in names)]
    if len(fits) != 1:
        seen = f"could be {' or '.join(fits)}" if fits else f"its {len(names)} files are of no kind known"
        raise ConfigError(f"{job.source}: {seen}: say kind=, one of {', '.join(get_args(Kind))}")
    return fits[0]


def _below(url: str, ending: str) -> list[str]:
    # What an earlier index left beside the data is none of it.
    names = (name for name in storage.list_files(url) if name != "rejects.parquet" and not name.startswith("."))
    return [storage.join(url, name) for name in names if name.endswith(ending)]


def _relative(file: str, source: str) -> str:
    return file.rpartition("/")[2] if file == source else file.removeprefix(source.rstrip("/")).lstrip("/")


def _folder(source: str) -> Iterator[Entry]:
    files = storage.file_sizes(source)
    tops = {name.partition("/")[0] for name in files if "/" in name}
    split_on_top = bool(tops) and tops <= SPLITS.keys()
    for name, size in files.items():
        *folders, _ = name.split("/")
        split = SPLITS[folders.pop(0)] if split_on_top and folders else None
        reason = None if folders else "not in a class folder"
        yield Entry(split, name, storage.join(source, name), 0, size, folders[0] if folders else None, reason)


def _index(job: Job) -> Iterator[Entry]:
    """Paths are below the folder of the index; an absolute one must lie there."""
    root = job.source.rpartition("/")[0] or "."
    header, rows = _index_rows(job.source)
    path_at = tables.column(header, job.settings.image, PATH_COLUMNS, job.source, "image")
    label_at = tables.column(header, job.settings.label, LABEL_COLUMNS, job.source, "label")
    sizes = storage.file_sizes(root)
    for row in rows:
        inside = posixpath.normpath(row[path_at].removeprefix(f"{root.rstrip('/')}/"))
        split = row.get("split") or None
        split = SPLITS.get(split, split) if split else None
        reason = None
        if posixpath.isabs(inside) or inside.split("/")[0] == ".." or "://" in row[path_at].removeprefix(root):
            reason = "the path leaves the folder of the index"
        elif inside not in sizes:
            reason = "no such file"
        yield Entry(split, row[path_at], storage.join(root, inside), 0, sizes.get(inside, 0), row[label_at], reason)


def _index_rows(source: str) -> tuple[list[str], Iterable[dict[str, str]]]:
    if source.lower().endswith(".parquet"):
        return tables.read_text(source)
    try:
        text = storage.read_bytes(source).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: cannot be read as text: {error}") from None
    reader = csv.DictReader(io.StringIO(text), delimiter="\t" if source.lower().endswith(".tsv") else ",", restval="")
    return list(reader.fieldnames or []), reader


def list_tar(url: str, name: str, label: str | None) -> list[Entry]:
    """The samples of a WebDataset tar: members of one stem are an image and its label (.cls or .json)."""
    entries: dict[str, Entry] = {}
    labels: dict[str, Any] = {}
    try:
        with storage.local_copy(url) as path, tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isdir():
                    continue
                folder, base = posixpath.split(member.name)
                stem, _, ending = base.partition(".")
                key, ending = posixpath.join(folder, stem), ending.lower()
                if ending.rpartition(".")[2] in _TAR_IMAGES:
                    reason = None
                    if posixpath.isabs(key) or ".." in key.split("/"):
                        reason = "the member's name leaves the archive"
                    elif not member.isreg() or member.issparse():
                        reason = "the member is no plain file"
                    said = f"{name}/{member.name}"
                    entries[key] = Entry(split_in(name), said, url, member.offset_data, member.size, None, reason)
                elif member.isreg() and ending == (label or "cls") and (file := tar.extractfile(member)):
                    labels[key] = file.read(2**16).decode(errors="replace").strip()
                elif member.isreg() and ending == "json" and (file := tar.extractfile(member)):
                    labels.setdefault(key, _json_label(file.read(2**20), label or "label"))
    except tarfile.TarError as error:
        raise ConfigError(f"{url}: not an uncompressed tar, or a damaged one: {error}") from None
    return [entry._replace(label=labels.get(key)) for key, entry in entries.items()]


def _json_label(text: bytes, field: str) -> Any:
    try:
        tree = json.loads(text)
    except ValueError:
        return None
    return tree.get(field) if isinstance(tree, dict) else None


def _parts(job: Job, mapped: Mapped) -> list[tables.Part]:
    files = [job.source] if job.source.endswith(".parquet") else _below(job.source, ".parquet")
    calls = [(file, job.settings.image, IMAGE_COLUMNS, job.settings.label, LABEL_COLUMNS) for file in files]
    return mapped(tables.read_part, calls)


def _rows(part: tables.Part, source: str) -> Iterator[Entry]:
    name = _relative(part.file, source)
    split = split_in(name)
    for row, label in enumerate(part.labels):
        yield Entry(split, f"{name}:{row}", part.file, row, 0, label)


def _of_splits(job: Job, entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries of the splits that were asked for, each with its split's name, some drawn out of train."""
    listed = list(entries)
    known = dict.fromkeys(entry.split or "train" for entry in listed)
    if not any(entry.split for entry in listed):
        if len(job.keep) > 1:
            raise ConfigError(
                f"--split {' '.join(job.keep)}: {job.source} names no splits: give one name, or NAME=SHARE"
            )
        known = {job.keep[0] if job.keep else "train": None}
        listed = [entry._replace(split=next(iter(known))) for entry in listed]
    for name in job.keep:
        if name not in known:
            raise ConfigError(f"--split {name}: {job.source} has {', '.join(known)}{nearest(name, known)}")
    for name, _ in job.draw:
        if name in known:
            raise ConfigError(f"--split {name}: {job.source} has a split of this name; draw into another")
    kept = [entry for entry in listed if not job.keep or (entry.split or "train") in job.keep]
    train = [at for at, entry in enumerate(kept) if (entry.split or "train") == "train"]
    train.sort(key=lambda at: (rank(job.settings.seed, "draw", kept[at].name), at))
    drawn: dict[int, str] = {}
    for name, share in job.draw:
        start = len(drawn)
        drawn |= dict.fromkeys(train[start : start + round(share * len(train))], name)
    for at, entry in enumerate(kept):
        yield entry._replace(split=drawn.get(at, entry.split or "train"))


def _numbered(
    entries: list[Entry], names: Sequence[str] | None, kind: Kind
) -> tuple[list[Item], tuple[str, ...], list[tuple[str, str, str]]]:
    """The items with their labels as numbers, the class names, and what is set aside."""
    said = {_plain(entry.label) for entry in entries if not entry.reason} - {None}
    # Folders named 1 to 10 are ten classes; a column of numbers up to 10 is somebody's numbering, from 0.
    if said and kind != "folder" and all(re.fullmatch(r"0|[1-9]\d{0,5}", str(label)) for label in said):
        codes = {label: int(str(label)) for label in said}
        classes = tuple(names or map(str, range(max(codes.values()) + 1)))
    else:
        classes = tuple(names or sorted(map(str, said)))
        numbers = {name: number for number, name in enumerate(classes)}
        codes = {label: numbers.get(str(label), len(classes)) for label in said}
    beyond = [label for label in said if codes[label] >= len(classes)]
    if beyond:
        raise ConfigError(f"label {beyond[0]!r}: not among the {len(classes)} class names of the source")
    items, rejects = [], []
    for split, name, file, place, size, label, reason in entries:
        if not reason and size > LARGEST_FILE:
            reason = f"too large: {size} bytes"
        if not reason and _plain(label) is None and kind != "demo":
            reason = "no label"
        if reason:
            rejects.append((split or "train", name, reason))
        else:
            items.append(Item(split or "train", name, file, place, size, codes.get(_plain(label))))
    return items, classes, rejects


def _plain(label: Any) -> int | str | None:
    """A label as a number or a word; None where it is neither, or where -1 or nothing stands for a hidden one."""
    label = int(label) if isinstance(label, float) and label.is_integer() else label
    return label if isinstance(label, int | str) and label not in ("", -1, "-1") else None
