"""Sources of images: each kind lists its images in a fixed order, and reads some of them."""

import hashlib
import json
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any, NamedTuple, assert_never, get_args

from vitray.config.parsing import short
from vitray.data.shards.arrays import IDX_IMAGES, check_tar_end, list_cifar, list_idx, read_png
from vitray.data.shards.demo import CLASSES, demo_item
from vitray.data.shards.label_lists import LabelList
from vitray.data.shards.manifest import IMAGE_FILE, MANIFEST, SPLIT_NAME, Labels, open_dataset
from vitray.data.shards.options import Kind, ShardRequest, ShardSettings
from vitray.data.shards.tables import (
    LABEL_COLUMNS,
    ImageTable,
    find_column,
    holds_images,
    read_image_table,
    read_images,
    read_index,
)
from vitray.errors import ConfigError, nearest, odd_character, printable
from vitray.system import storage

REJECTS = "rejects.parquet"

SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val"}
SPLITS |= {"test": "test", "testing": "test", "t10k": "test"}

PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image_path", "image")

# The file names, below the folder of a source, that identify its kind.
SIGNS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("tar", re.compile(r"\.tar$")),
    ("parquet", re.compile(r"\.parquet$")),
    ("cifar", re.compile(r"(^|/)((batches\.)?meta|batches\.meta\.txt|fine_label_names\.txt)$")),
    ("idx", IDX_IMAGES),
    ("folder", re.compile(rf"/[^/]+{IMAGE_FILE.pattern}", re.IGNORECASE)),
)
_TAR_IMAGES = {"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif", "img"}

# Larger files are not images, and would be read whole.
LARGEST_FILE = 2**30
LONGEST_NAME = 200
NUMBER = "(0|[1-9][0-9]*)"
# Images times categories of a file of COCO's layout.
MOST_STATES = 2 * 10**9
# Numbers without images are classes too: this many classes are allowed, or this many for each with images.
SOME_CLASSES, MOST_CLASSES = 1000, 10


class SourceEntry(NamedTuple):
    """One image as its source lists it."""

    split: str
    """Empty where the source names no split."""
    name: str
    """Path below the source, for messages and keys."""
    file: str
    place: int = 0
    """Byte in a tar, row of a table or an array, index of a demo image."""
    size: int = 0
    """Bytes, if known before reading."""
    label: Any = None
    """As the source has it, a LabelList where an image has several; in a listing the class number, or a LabelList of
    numbers, None if only reading yields it."""
    reason: str | None = None
    """Why the image is rejected unread."""
    changed: int = 0
    """Time of change of a file with one image, as in its version."""
    others: tuple[str | None, ...] = ()
    """The values of the settings' further columns."""


class Reject(NamedTuple):
    """One rejected image."""

    split: str
    file: str
    reason: str


class Listing(NamedTuple):
    """The images of a source."""

    kind: Kind
    items: list[SourceEntry]
    classes: tuple[str, ...]
    rejects: list[Reject]
    """Images rejected unread."""
    tables: list[tuple[str, ImageTable]]
    """(split, Parquet file), for datasets indexed in place."""
    labels: Labels = "one"
    """How many an image has."""


class DetectedSource(NamedTuple):
    """The kind of a source, and its files, which are listed once."""

    kind: Kind
    folder: str
    files: dict[str, storage.FileVersion | None]
    """Below the folder: that of the source, or of an index or an IDX file; empty if the source is another single file.
    None stands for a pipe, device or broken link."""


# Calls a function once per tuple of arguments and returns the results in order.
Mapped = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]


def list_source(request: ShardRequest, detected: DetectedSource, mapped: Mapped) -> Listing:
    """Return every image of the source, in an order that depends on the source alone."""
    source, settings, kind = request.source, request.settings, detected.kind
    for setting, value in (
        ("columns", ", ".join(settings.columns)),
        ("separator", settings.separator),
        ("unknown", settings.unknown),
    ):
        if value and kind not in ("index", "tar", "parquet"):
            raise ConfigError(
                f"{setting}: got {value}, and it does not apply to a source of kind {kind}; expected an index of paths,"
                " Parquet or a tar"
            )
    names: Sequence[str] | None = None
    tables: list[ImageTable] = []
    match kind:
        case "folder":
            entries = _list_folder(detected)
        case "index":
            entries = _list_index(request, detected)
        case "tar":
            files = _files(source, detected, ".tar")
            calls = [(file, _relative(file, source), settings) for file in files]
            entries = [entry for listed in mapped(list_tar, calls) for entry in listed]
        case "parquet":
            files = _files(source, detected, ".parquet")
            calls = [(file, settings.image, settings.label, settings.columns, settings.unknown) for file in files]
            tables = mapped(read_image_table, calls)
            names = next((table.names for table in tables if table.names), None)
            if storage.exists(storage.join(source, MANIFEST)):  # a dataset of ours that is sharded again
                names = open_dataset(source).classes
            entries = [entry for table in tables for entry in _list_rows(table, source, settings.separator)]
        case "coco":
            names, entries = list_coco(source, detected)
        case "cifar" | "idx":
            if kind == "cifar":
                arrays, names = list_cifar(source, settings.label)
            else:
                arrays = list_idx(detected.folder, [name for name, version in detected.files.items() if version])
            entries = [
                SourceEntry(split_in(each.name), f"{each.name}/{row:05d}", each.file, row, 0, label)
                for each in arrays
                for row, label in enumerate(each.labels)
            ]
        case "demo":
            names = CLASSES[settings.task]
            train = settings.images
            splits = ["train"] * train + ["val"] * round(train * settings.val_share)
            entries = [SourceEntry(split, f"{split}/{index:06d}", "demo", index) for index, split in enumerate(splits)]
        case _:
            assert_never(kind)
    selected = _select_splits(request, list(entries))
    selected, labels = _of_one_kind(selected)
    if kind == "demo" and settings.task == "scene":
        labels = "several"
    items, classes, rejects = _number_labels(selected, names, kind)
    if not items:
        first = f": {rejects[0].file}: {rejects[0].reason}" if rejects else ""
        raise ConfigError(f"{source}: none of {len(rejects)} images can be used, as a {kind} source{first}")
    if labels == "several" and kind != "demo" and not any(item.label.present for item in items):
        raise ConfigError(f"{source}: no image has a label; expected at least one label in all")
    splits_by_file = {item.file: item.split for item in items}
    in_use = [(splits_by_file[table.file], table) for table in tables if table.file in splits_by_file]
    return Listing(kind, items, classes, rejects, in_use, labels)


def _of_one_kind(entries: list[SourceEntry]) -> tuple[list[SourceEntry], Labels]:
    """Return the entries, and whether most labels are lists; those of the other kind have a reason to be rejected."""
    lists = [isinstance(entry.label, LabelList) for entry in entries]
    plain = sum(entry.label is not None for entry in entries) - sum(lists)
    if sum(lists) > plain:
        # Where nothing is said of an image, nothing is known.
        unknown, odd = LabelList((), None), "the label is no list, as those of most images are"
        reasons = [entry.reason or (None if entry.label is None else odd) for entry in entries]
        return [
            entry if is_list else entry._replace(label=unknown, reason=reason)
            for entry, is_list, reason in zip(entries, lists, reasons, strict=True)
        ], "several"
    odd = "no label: got a list, and those of most images are none"
    return [
        entry._replace(label=None, reason=entry.reason or odd) if is_list else entry
        for entry, is_list in zip(entries, lists, strict=True)
    ], "one"


def read_items(
    kind: Kind, items: Sequence[SourceEntry], request: ShardRequest
) -> Iterator[tuple[bytes, int | LabelList | None]]:
    """Yield the encoded bytes and the label, or the labels, of each image."""
    settings = request.settings
    match kind:
        case "folder" | "index" | "coco" | "tar":
            places = [(item.file, item.place, item.size) for item in items]
            yield from zip(read_ranges(places), (item.label for item in items), strict=True)
        case "parquet":
            for file, run in groupby(items, key=lambda item: item.file):
                rows = list(run)
                contents = read_images(file, settings.image, [item.place for item in rows])
                yield from zip(contents, (item.label for item in rows), strict=True)
        case "cifar" | "idx":
            for item in items:
                yield read_png(kind, item.file, item.place), item.label
        case "demo":
            for item in items:
                yield demo_item(item.place, settings.seed, settings.image_size, settings.task, settings.rarity)
        case _:
            assert_never(kind)


def read_ranges(places: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
    """Yield the bytes at each (file, start, size), in order; remote reads are concurrent."""
    if not any(storage.is_remote(file) for file, _, _ in places):
        yield from (storage.read_range(*place) for place in places)
        return
    with ThreadPoolExecutor(16) as pool:
        yield from pool.map(lambda place: storage.read_range(*place), places)


def shuffle_key(seed: int, purpose: str, name: str) -> bytes:
    """Return the sort key of an image for a shuffle; it is the same in every version of every library."""
    return hashlib.blake2b(f"{seed}\0{purpose}\0{name}".encode(), digest_size=16).digest()


def split_in(name: str) -> str:
    """Return the split in a file's name, if any, such as `imagenet-train-000017.tar` or `test/0000.parquet`."""
    parts = re.split(r"[^a-z0-9]+", name.lower())
    return next((SPLITS[part] for part in parts if part in SPLITS), "")


def detect_source(request: ShardRequest) -> DetectedSource:
    """Return the kind of the source, as `kind` sets it or as its file names show it, and its files."""
    source, kind = request.source, request.settings.kind or _kind_of_address(request)
    match kind:
        case "demo":
            return DetectedSource(kind, "", {})
        case "index" | "coco" | "idx" if kind != "idx" or IDX_IMAGES.search(source):
            folder = source.rpartition("/")[0] or "."
            return DetectedSource(kind, folder, storage.list_entries(folder))
        case "tar" | "parquet" | "cifar" if storage.exists(source) or not request.settings.kind:
            return DetectedSource(kind, source, {})
    files = storage.list_entries(source)
    names = [name for name, version in files.items() if version]
    if not names:
        raise ConfigError(f"{source}: no files here; expected a folder, .csv, .parquet or .tar, or `demo`")
    kinds: list[Kind] = [kind] if kind else [each for each, sign in SIGNS if any(map(sign.search, names))]
    if not kinds and any(map(IMAGE_FILE.search, names)):
        example = next(name for name in names if IMAGE_FILE.search(name))
        raise ConfigError(
            f"{source}: its images lie in no class folders: got {example}, expected a folder for each class, as in"
            f" cat/{example.rpartition('/')[2]}, or a .csv with columns path and label"
        )
    if len(kinds) != 1:
        problem = f"could be {' or '.join(kinds)}" if kinds else f"its {len(names)} files are of no known kind"
        raise ConfigError(f"{source}: {problem}: set kind=, one of {', '.join(get_args(Kind))}")
    return DetectedSource(kinds[0], source, files)


def _kind_of_address(request: ShardRequest) -> Kind | None:
    """Return the kind that the address of a source shows; None if it may be a folder."""
    source = request.source.lower().rstrip("/")
    if source == "demo":
        return "demo"
    if source.endswith((".csv", ".tsv")):
        return "index"
    if source.endswith(".json"):
        return "coco"
    if source.endswith(".parquet"):
        return "parquet" if holds_images(request.source, request.settings.image) else "index"
    if source.endswith(".tar"):
        return "tar"
    return "cifar" if source.endswith((".tar.gz", ".tgz")) else None


def _files(source: str, detected: DetectedSource, ending: str) -> list[str]:
    """Return the files of a source with this ending, or the source itself, if it is a file."""
    if not detected.files:
        return [source]
    # An earlier index may have left its files beside the data.
    names = (name for name, version in detected.files.items() if version and name != REJECTS and name[0] != ".")
    return [storage.join(source, name) for name in names if name.endswith(ending)]


def _relative(file: str, source: str) -> str:
    return file.rpartition("/")[2] if file == source else file.removeprefix(source.rstrip("/")).lstrip("/")


def _list_folder(detected: DetectedSource) -> Iterator[SourceEntry]:
    tops = {name.partition("/")[0] for name, version in detected.files.items() if version and "/" in name}
    is_split_on_top = bool(tops) and tops <= SPLITS.keys()
    for name, version in detected.files.items():
        file = storage.join(detected.folder, name)
        if version is None:
            yield SourceEntry("", name, file, reason="a pipe, device or broken link")
            continue
        *folders, _ = name.split("/")
        split = SPLITS[folders.pop(0)] if is_split_on_top and folders else ""
        reason = None if folders else "not in a class folder"
        yield SourceEntry(split, name, file, 0, version.size, folders[0] if folders else None, reason, version.changed)


def _list_index(request: ShardRequest, detected: DetectedSource) -> Iterator[SourceEntry]:
    """Paths are relative to the folder of the index; an absolute path must lie there."""
    source, settings, root = request.source, request.settings, detected.folder
    header, rows = read_index(source)
    path_column = find_column(header, settings.image, PATH_COLUMNS, source, "image")
    label_column = find_column(header, settings.label, LABEL_COLUMNS, source, "label")
    for setting, names in (("columns", settings.columns), ("unknown", [settings.unknown] if settings.unknown else [])):
        for name in names:
            find_column(header, name, (), source, setting)
    for row in rows:
        path, label = row[path_column], row[label_column]
        undecided = row[settings.unknown] if settings.unknown else None
        others = tuple(_as_text(row[name], path) for name in settings.columns)
        entry = SourceEntry(row.get("split") or "", path, "", 0, 0, _listed(label, undecided, settings.separator))
        yield _located(entry._replace(others=others), path, detected, root)


def _located(entry: SourceEntry, path: str, detected: DetectedSource, root: str) -> SourceEntry:
    """Return an entry with the file at a path of an index, or with the reason why there is none."""
    inside = posixpath.normpath(path.removeprefix(f"{root.rstrip('/')}/"))
    reason, version = None, detected.files.get(inside)
    if posixpath.isabs(inside) or inside.split("/")[0] == ".." or "://" in path.removeprefix(root):
        reason = "the path leaves the folder of the index"
    elif version is None:
        reason = "no such file"
    size, changed = (version.size, version.changed) if version else (0, 0)
    split = SPLITS.get(entry.split, entry.split)
    return entry._replace(split=split, file=storage.join(root, inside), size=size, reason=reason, changed=changed)


def _listed(label: Any, undecided: Any, separator: str | None) -> Any:
    """Return the labels of an image, and those that are unknown, as a LabelList; a single label stays as it is."""

    def parts(value: Any) -> list[Any]:
        if isinstance(value, str):
            return [part for each in value.split(separator) if (part := each.strip())] if separator else [value]
        return list(value) if isinstance(value, list | tuple) else [value]

    if separator is None and not isinstance(label, list) and undecided is None:
        return label
    unknown = parts(undecided) if undecided not in (None, "") else []
    if label is None:
        return LabelList((), None)
    return LabelList(tuple(parts(label)), None if unknown == ["*"] else tuple(unknown))


def list_coco(url: str, detected: DetectedSource) -> tuple[list[str], list[SourceEntry]]:
    """Return the class names and the images of a JSON file of COCO's layout; an image's labels are the categories of
    its annotations, numbered by ascending id.

    Where an image names the categories that it lacks (LVIS: neg_category_ids), the rest is unknown.
    """
    try:
        tree = json.loads(storage.read_bytes(url))
        categories = {int(each["id"]): str(each["name"]) for each in tree["categories"]}
        images = {each["id"]: each for each in tree["images"]}
        found: dict[Any, list[int]] = {number: [] for number in images}
        order = {number: place for place, number in enumerate(sorted(categories))}
        for at, each in enumerate(tree["annotations"]):
            for name, known in (("image_id", images), ("category_id", order)):
                if each[name] not in known:
                    raise ConfigError(f"{url}: annotation {at}: no {name.partition('_')[0]} has id {short(each[name])}")
            found[each["image_id"]].append(order[each["category_id"]])
        entries = []
        if len(images) * len(categories) > MOST_STATES:
            raise ConfigError(f"{url}: {len(images):,} images of {len(categories):,} categories, expected fewer")
        for number, image in images.items():
            present, absent = found[number], image.get("neg_category_ids")
            # LVIS names the folder of COCO and the file at the end of an address.
            path = str(image["file_name"] if "file_name" in image else "/".join(image["coco_url"].split("/")[-2:]))
            labels = LabelList(tuple(present))
            if absent is not None:  # all others are unknown
                known = {*present, *(order[each] for each in absent)}
                labels = LabelList(tuple(present), None if known == {*present} else tuple({*order.values()} - known))
            entry = SourceEntry(str(image.get("split") or ""), path, "", label=labels)
            entries.append(_located(entry, path, detected, detected.folder))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        problem = f"no {error.args[0]}" if isinstance(error, KeyError) else short(str(error))
        raise ConfigError(
            f"{url}: not a file of COCO's layout: {problem}; expected images (id, file_name), annotations (image_id,"
            " category_id) and categories (id, name)"
        ) from None
    return [categories[number] for number in sorted(categories)], entries


def list_tar(url: str, name: str, settings: ShardSettings) -> list[SourceEntry]:
    """Return the samples of a WebDataset tar: members of one stem are an image and its label (.cls or .json)."""
    label, columns = settings.label, settings.columns
    others: dict[str, tuple[str | None, ...]] = {}
    undecided: dict[str, Any] = {}
    entries: dict[str, SourceEntry] = {}
    labels: dict[str, Any] = {}
    replaced: list[SourceEntry] = []
    try:
        with storage.local_copy(url) as path, tarfile.open(path, "r:", errors="backslashreplace") as tar:
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
                    place = (url, member.offset_data, member.size)
                    if key in entries:
                        again = "a later member is the image of the same sample"
                        replaced.append(entries[key]._replace(reason=again, others=(None,) * len(columns)))
                    entries[key] = SourceEntry(split_in(name), f"{name}/{member.name}", *place, None, reason)
                elif member.isreg() and ending == (label or "cls") and (file := tar.extractfile(member)):
                    labels[key] = file.read(2**16).decode(errors="surrogateescape").strip()
                elif member.isreg() and ending == "json" and (file := tar.extractfile(member)):
                    fields = _json_fields(file.read(2**20))
                    labels.setdefault(key, fields.get(label or "label"))
                    undecided[key] = fields.get(settings.unknown) if settings.unknown else None
                    others[key] = tuple(_as_text(fields.get(column), member.name) for column in columns)
            check_tar_end(tar)
    except ConfigError:
        raise
    except (tarfile.TarError, ValueError, OverflowError, OSError) as error:  # a forged header may raise all of these
        raise ConfigError(f"{url}: not an uncompressed tar, or a damaged one: {error}") from None
    none = (None,) * len(columns)
    listed = {key: _listed(labels.get(key), undecided.get(key), settings.separator) for key in entries}
    found = [entry._replace(label=listed[key], others=others.get(key, none)) for key, entry in entries.items()]
    return found + replaced


def _json_fields(text: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _as_text(value: Any, name: str) -> str | None:
    """A value of a further column as text; None for none, and for what is no text or number."""
    if not isinstance(value, str | int | float) or value == "":
        return None
    _check_line("value", text := str(value), name)
    return text


def _check_line(what: str, text: str, name: str) -> None:
    """Refuse a text of an image that is no short line."""
    if odd := odd_character(text):
        raise ConfigError(f"{what} {text[:80]!r} of {name}: expected one line of text, got {odd}")
    if len(text) > LONGEST_NAME:
        raise ConfigError(
            f"{what} {text[:40]!r}... of {name}: got {len(text):,} characters, expected at most {LONGEST_NAME}"
        )


def _list_rows(table: ImageTable, source: str, separator: str | None) -> Iterator[SourceEntry]:
    name = _relative(table.file, source)
    split = split_in(name)
    for row, label in enumerate(table.labels):
        others = tuple(_as_text(column[row], f"{name}:{row}") for column in table.others)
        undecided = table.unknown[row] if table.unknown else None
        labels = LabelList((), None) if table.has_lists and label is None else _listed(label, undecided, separator)
        yield SourceEntry(split, f"{name}:{row}", table.file, row, 0, labels, others=others)


def _select_splits(request: ShardRequest, entries: list[SourceEntry]) -> list[SourceEntry]:
    """Return the entries of the requested splits, some of them drawn out of train."""
    source, keep = request.source, request.keep
    has_splits = any(entry.split for entry in entries)
    if len(keep) > 1 and not has_splits:
        raise ConfigError(f"--split {' '.join(keep)}: {source} names no splits: give one name, or NAME=SHARE")
    default = keep[0] if keep and not has_splits else "train"
    entries = [entry._replace(split=entry.split or default) for entry in entries]
    known = dict.fromkeys([entry.split for entry in entries] or [default])
    if wrong := next((name for name in known if not SPLIT_NAME.fullmatch(name)), None):
        raise ConfigError(f"{source}: split {wrong[:80]!r}: expected up to 64 of the characters A-Z a-z 0-9 _ . -")
    for name in keep:
        if name not in known:
            raise ConfigError(f"--split {name}: {source} has {', '.join(known)}{nearest(name, known)}")
    for name, _ in request.draw:
        if name in known:
            raise ConfigError(f"--split {name}: {source} has a split of this name; draw into another")
    selected = [entry for entry in entries if not keep or entry.split in keep]
    groups = _groups_of(request, selected)
    members: dict[str, list[int]] = {}
    for at, entry in enumerate(selected):
        if entry.split == "train":
            members.setdefault(groups[at], []).append(at)
    order = sorted(members, key=lambda group: (shuffle_key(request.settings.seed, "draw", group), members[group]))
    total, drawn = sum(map(len, members.values())), dict[int, str]()
    for name, share in request.draw:
        end, left = len(drawn) + round(share * total), list[str]()
        for group in order:
            # A group that would exceed the share is left to a later split, or to train.
            if len(drawn) + len(members[group]) <= end:
                drawn |= dict.fromkeys(members[group], name)
            else:
                left.append(group)
        order = left
    return [entry._replace(split=drawn.get(at, entry.split)) for at, entry in enumerate(selected)]


def _groups_of(request: ShardRequest, entries: list[SourceEntry]) -> list[str]:
    """Return the group of each image, which is the image itself without one; refuse a group that is in two splits."""
    group = request.settings.group
    if group is None:
        return [entry.name for entry in entries]
    place, first = request.settings.columns.index(group), dict[str, SourceEntry]()
    for entry in entries:
        if (value := entry.others[place]) is None:
            continue
        other = first.setdefault(value, entry)
        if other.split != entry.split:
            raise ConfigError(
                f"{request.source}: {group} {value} is in {other.split} ({other.name}) and in {entry.split}"
                f" ({entry.name}); expected each {group} in one split"
            )
    return [f"{group} {value}" if (value := entry.others[place]) is not None else entry.name for entry in entries]


def _number_labels(
    entries: list[SourceEntry], names: Sequence[str] | None, kind: Kind
) -> tuple[list[SourceEntry], tuple[str, ...], list[Reject]]:
    """Return the images with numbers as labels, the class names, and the rejects.

    Numbers stay the labels that they are: a label that would change them is refused.
    """
    first: dict[int | str, str] = {}  # {label: the first image that has it}
    for entry in entries:
        if not entry.reason:
            for plain in _plain_labels(entry, kind):
                first.setdefault(plain, entry.name)
    # Folders named 1 to 10 are ten classes; a column of numbers up to 10 counts classes from 0.
    if first and kind != "folder" and all(re.fullmatch(rf"{NUMBER}(\.0)?", str(label)) for label in first):
        codes = {label: int(str(label).removesuffix(".0")) for label in first}
        largest = max(first, key=lambda label: codes[label])
        if not names and codes[largest] >= max(SOME_CLASSES, MOST_CLASSES * len(first)):
            raise ConfigError(
                f"label {largest} of {first[largest]}: as the number of a class it would make {codes[largest] + 1:,}"
                f" classes, and the labels are {len(first):,} different numbers; correct that label, or number the"
                " classes from 0"
            )
        classes = tuple(names or map(str, range(codes[largest] + 1)))
    else:
        classes = tuple(names or sorted({*map(str, first)}))
        numbers = {name: number for number, name in enumerate(classes)}
        codes = {label: numbers.get(str(label), len(classes)) for label in first}
        counted = [label for label in first if kind != "folder" and re.fullmatch(NUMBER, str(label))]
        moved = [label for label in counted if codes[label] != int(label)]
        if moved and not names:
            other = next(label for label in first if label not in counted)
            raise ConfigError(
                f"label {other!r} of {first[other]}: expected a number, as the label {moved[0]} of"
                f" {first[moved[0]]}; labels are numbers from 0, or names that are not numbers"
            )
    if wrong := next((name for name in classes if not name.strip() or odd_character(name)), None):
        odd = f", got {character}" if (character := odd_character(wrong)) else ""
        raise ConfigError(f"class name {short(wrong)}: expected one line of text{odd}")
    if wrong := next((name for name in classes if len(name) > LONGEST_NAME), None):
        raise ConfigError(f"class name {short(wrong)}: {len(wrong):,} characters, expected at most {LONGEST_NAME}")
    for label, code in codes.items():
        if code >= len(classes):
            raise ConfigError(
                f"label {label!r} of {first[label]}: not among the {len(classes)} class names of the source"
            )
    items, rejects = [], []
    for entry in entries:
        reason = entry.reason
        if not reason and entry.size > LARGEST_FILE:
            reason = f"too large: {entry.size} bytes"
        label = None
        if not reason and isinstance(entry.label, LabelList):
            present, unknown = entry.label
            plain = tuple(_plain_in(present, entry.name, kind))
            others = None if unknown is None else tuple(_plain_in(unknown, entry.name, kind))
            label = LabelList(plain, others).numbered(codes)
        elif not reason:
            plain = _plain_label(entry.label, entry.name, kind)
            label = None if plain is None else codes[plain]
            if plain is None and kind != "demo":
                reason = "no label"
                if entry.label not in (None, "", -1, "-1"):
                    beginning = entry.label[:40] if isinstance(entry.label, str) else entry.label
                    reason = f"no label: got {printable(repr(beginning)[:40])}"
        if reason:
            rejects.append(Reject(entry.split, entry.name, reason))
        else:
            items.append(entry._replace(label=label))
    return items, classes, rejects


def _plain_labels(entry: SourceEntry, kind: Kind) -> Iterator[int | str]:
    """Yield the labels of an image as numbers from 0 or lines of text."""
    if isinstance(entry.label, LabelList):
        yield from _plain_in([*entry.label.present, *(entry.label.unknown or ())], entry.name, kind)
    elif (plain := _plain_label(entry.label, entry.name, kind)) is not None:
        yield plain


def _plain_in(labels: Sequence[Any], name: str, kind: Kind) -> Iterator[int | str]:
    """Yield the labels of a list as numbers from 0 or lines of text; refuse one that is neither."""
    for label in labels:
        if (plain := _plain_label(label, name, kind)) is None:
            raise ConfigError(f"label {short(label)} of {name}: expected a class, as a number from 0 or a name")
        yield plain


def _plain_label(label: Any, name: str, kind: Kind) -> int | str | None:
    """Return the label of an image as a number from 0 or a line of text; None for none, such as -1, a hidden label.

    Text that cannot name a class is refused: without its images a class would be missing.
    """
    if isinstance(label, str):
        _check_line("label", label, name)
        is_class = kind == "folder" or (label.strip() and not re.fullmatch(r"-\d+", label))
        return label if is_class else None
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    return label if isinstance(label, int) and label >= 0 else None
