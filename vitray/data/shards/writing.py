"""Writing a dataset: inspect every image, find duplicates, plan and write the shards, and write dataset.json last.

As in the inspection, work files under DEST/.work are named after their inputs: a restarted command reuses them.
"""

import hashlib
import json
import math
import posixpath
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from vitray.cluster.storage_check import check_readable, check_writable
from vitray.data.shards.checking import check_dataset, mark_checked
from vitray.data.shards.inspection import WORK, content_name, inspect_source, write_rejects
from vitray.data.shards.label_lists import LabelList
from vitray.data.shards.manifest import (
    MANIFEST,
    Channels,
    Columns,
    Dataset,
    Duplicates,
    Rejects,
    Shard,
    Split,
    open_dataset,
    save_dataset,
)
from vitray.data.shards.options import OWN_COLUMNS, UNKNOWN_COLUMN, ShardRequest, ShardSettings
from vitray.data.shards.sources import (
    DetectedSource,
    Listing,
    Reject,
    detect_source,
    list_source,
    read_ranges,
    shuffle_key,
)
from vitray.data.shards.tables import ImageTable
from vitray.data.shards.tasks import Tasks, open_tasks, run_with_progress
from vitray.errors import ConfigError, nearest
from vitray.system import storage
from vitray.system.lease import FOLDER, check_owner, own_folder

# Two images are near duplicates within this many of the 128 bits of the fingerprint, and this many gray levels.
NEAR_BITS = 3
NEAR_LEVELS = 8
GROUP_BYTES = 6 * 10**6
# Class names that a message lists.
MOST_NAMED = 20
SHARD_NAME = re.compile(r"[^/]+-\d{5}-of-\d{5}\.parquet")

# Of OWN_COLUMNS; further columns follow, as text.
TYPES = (pa.binary(), pa.int64(), pa.string(), pa.int32(), pa.int32())
CLASS_LIST = pa.list_(pa.int64())

# (split, shard) in the order of each split
Shards = list[tuple[str, Shard]]


def write_dataset(request: ShardRequest) -> Dataset:
    """Write the requested dataset, or finish it, and return it."""
    check_readable(request.dest, MANIFEST)
    if finished := _finished_dataset(request):
        return finished
    detected = detect_source(request)
    if request.index_only and detected.kind != "parquet":
        raise ConfigError(
            f"--index-only: expected Parquet with images in it; {request.source} is of kind {detected.kind}"
        )
    check_writable(request.dest)
    with own_folder(request.dest, "shard", other="folder") as ownership:
        # Another process may have finished it meanwhile.
        return _finished_dataset(request) or _write_owned(request, detected, ownership.id)


def _write_owned(request: ShardRequest, detected: DetectedSource, owner: str) -> Dataset:
    """Write the dataset into a folder that this process owns."""
    with open_tasks(request.settings.workers) as tasks:
        listing = list_source(request, detected, tasks.run)
        listing = select_classes(listing, request.settings.classes)
        if request.index_only:
            _check_indexable(listing)
        # The first file in the folder: it marks the folder as ours.
        storage.write_bytes(storage.join(request.dest, WORK, "job.json"), json.dumps(request.recorded()).encode())
        images, rejects = inspect_source(request, listing, tasks)
        duplicates, in_train = find_duplicates(images, request.settings.dedupe)
        removed: list[Reject] = []
        if request.index_only:
            duplicates = duplicates.model_copy(update={"removed": 0})
            calls = [(table, request.source, request.dest) for _, table in listing.tables]
            indexed = tasks.run(index_shard, calls)
            shards = [(split, shard) for (split, _), shard in zip(listing.tables, indexed, strict=True)]
        else:
            names = images["name"].to_pylist()
            for row, other in in_train.items():
                removed.append(Reject("train", names[row], f"shows the same as {names[other]}"))
            images = images.take([row for row in range(images.num_rows) if row not in in_train])
            shards = _write_shards(request, images, tasks, owner)
    check_owner(request.dest, owner)
    write_rejects(request, [*rejects, *removed])
    dataset = _describe(request, listing, images, shards, rejects, duplicates)
    _remove_leftovers(request, {shard.name for _, shard in shards})
    save_dataset(dataset)
    storage.remove(storage.join(request.dest, WORK))
    return dataset


def _finished_dataset(request: ShardRequest) -> Dataset | None:
    """Return the dataset of an equal request, if it exists; reject a destination that holds anything else."""
    if request.index_only and request.draw:
        raise ConfigError("--index-only leaves files as they are: --split NAME=SHARE cannot draw from them")
    if request.index_only and request.settings.classes:
        raise ConfigError("--index-only leaves files as they are: classes cannot select from them")
    if request.index_only and request.settings.resize:
        raise ConfigError("--index-only leaves files as they are: resize cannot re-encode them")
    source, dest = (posixpath.normpath(storage.filesystem(url)[1]) for url in (request.source, request.dest))
    is_same_store = storage.is_remote(request.source) == storage.is_remote(request.dest)
    if not request.index_only and is_same_store and f"{dest}/".startswith(f"{source}/"):
        raise ConfigError(f"{request.dest}: lies within the source {request.source}: choose a folder outside it")
    if storage.exists(storage.join(request.dest, MANIFEST)):
        existing = open_dataset(request.dest)
        if (existing.source, existing.settings) != (request.source, request.recorded()):
            raise ConfigError(
                f"{request.dest}: holds another dataset, of {existing.source}: choose another folder, or remove it"
            )
        check_dataset(existing)
        storage.remove(storage.join(request.dest, WORK))
        print(f"{request.dest}: already complete, nothing done", file=sys.stderr)
        return existing
    # A command that was killed at its start leaves only its claim and what it was writing.
    names = storage.list_files(request.dest)
    others = [name for name in names if not name.startswith((f"{FOLDER}/", storage.UNFINISHED))]
    if not request.index_only and others and not any(name.startswith(f"{WORK}/") for name in others):
        raise ConfigError(f"{request.dest}: holds other files, such as {others[0]}: expected a new or empty folder")
    return None


def select_classes(listing: Listing, names: Sequence[str] | None) -> Listing:
    """Return the images of the named classes, numbered in the order of the names."""
    if names is None:
        return listing
    for name in names:
        if name not in listing.classes:
            known = ", ".join(listing.classes[:MOST_NAMED])
            raise ConfigError(f"classes: got {name}, expected some of {known}{nearest(name, listing.classes)}")
        if names.count(name) > 1 or listing.classes.count(name) > 1:
            raise ConfigError(f"classes: got {name} more than once, expected names of one class each")
    if listing.kind == "demo":  # drawing an image yields its label
        raise ConfigError("classes: expected a source that lists its labels; the demo does not")
    numbers = {listing.classes.index(name): number for number, name in enumerate(names)}
    if listing.labels == "several":

        def chosen(label: LabelList) -> LabelList:
            present, unknown = (None if part is None else tuple({*part} & numbers.keys()) for part in label)
            return LabelList(present or (), unknown).numbered(numbers)

        items = [item._replace(label=chosen(item.label)) for item in listing.items]
        items = [item for item in items if item.label.present]
    else:
        items = [item._replace(label=numbers[item.label]) for item in listing.items if item.label in numbers]
    if not items:
        raise ConfigError(f"classes: no image of {', '.join(names)}; expected classes that have images")
    return listing._replace(items=items, classes=tuple(names))


# ---- from the table of inspected images to the content of each shard -------------------------------------------------


class ShardPlan(NamedTuple):
    """One shard to write."""

    split: str
    name: str
    rows: pa.Table
    row_group: int


def find_duplicates(images: pa.Table, how: Literal["exact", "perceptual", "off"]) -> tuple[Duplicates, dict[int, int]]:
    """Return the counts, and {row of train: row of another split with the same image}."""
    match how:
        case "exact":
            first: dict[str, int] = {}
            originals = [first.setdefault(content, row) for row, content in enumerate(images["sha256"].to_pylist())]
        case "perceptual":
            originals = _near_originals(images)
        case "off":
            originals = list(range(images.num_rows))
    splits = images["split"].to_pylist()
    groups: dict[int, list[int]] = defaultdict(list)
    for row, original in enumerate(originals):
        groups[original].append(row)
    within: dict[str, int] = dict.fromkeys(dict.fromkeys(splits), 0)
    across, in_train = 0, {}
    for rows in groups.values():
        members = [splits[row] for row in rows]
        for split in set(members):
            within[split] += members.count(split) - 1
        if len(set(members)) > 1:
            elsewhere = next(row for row in rows if splits[row] != "train")
            shared = [row for row in rows if splits[row] == "train"]
            in_train |= dict.fromkeys(shared, elsewhere)
            across += len(shared) or len(set(members)) - 1
    return Duplicates(within=within, across=across, removed=len(in_train)), in_train


def _near_originals(images: pa.Table) -> list[int]:
    """Return, for each row, the first row near it, which may be itself."""
    grays = [sum(sums[:3]) / 3 / area for sums, area in zip(images["moments"].to_pylist(), _areas(images), strict=True)]
    prints = [int.from_bytes(bits) for bits in images["fingerprint"].to_pylist()]
    # 3 different bits leave one of 4 bands of 32 bits unchanged: near duplicates share a band.
    buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
    originals = []
    for row, (bits, gray) in enumerate(zip(prints, grays, strict=True)):
        bands = [(band, bits >> 32 * band & 0xFFFFFFFF) for band in range(NEAR_BITS + 1)]
        near = (
            other
            for band in bands
            for other in buckets[band]
            if (prints[other] ^ bits).bit_count() <= NEAR_BITS and abs(grays[other] - gray) <= NEAR_LEVELS
        )
        original = min(near, default=row)
        if original == row:
            for band in bands:
                buckets[band].append(row)
        originals.append(original)
    return originals


def _areas(images: pa.Table) -> list[int]:
    return [w * h for w, h in zip(images["width"].to_pylist(), images["height"].to_pylist(), strict=True)]


def plan_shards(images: pa.Table, settings: ShardSettings) -> list[ShardPlan]:
    """Return the shards of each split: its images shuffled and cut into nearly equal numbers of rows."""
    splits, names = images["split"].to_pylist(), images["name"].to_pylist()
    plans = []
    for split in sorted(set(splits)):
        rows = [row for row, other in enumerate(splits) if other == split]
        shuffled = sorted((shuffle_key(settings.seed, "shuffle", names[row]), row) for row in rows)
        table = images.take([row for _, row in shuffled]).combine_chunks()
        total = sum(table["size"].to_pylist())
        count = min(len(rows), math.ceil(total / settings.shard_bytes))
        group = settings.row_group or max(16, min(128, GROUP_BYTES * len(rows) // total))
        for index in range(count):
            start, stop = len(rows) * index // count, len(rows) * (index + 1) // count
            name = f"{split}-{index:05d}-of-{count:05d}.parquet"
            plans.append(ShardPlan(split, name, table.slice(start, stop - start), group))
    return plans


# ---- second pass: the shards -----------------------------------------------------------------------------------------


def _write_shards(request: ShardRequest, images: pa.Table, tasks: Tasks, owner: str) -> Shards:
    """Write the shards of each split; shards of an interrupted command remain as they are."""
    plans = plan_shards(images, request.settings)
    columns = request.settings.columns
    marks = [
        storage.join(WORK, f"{plan.name}-{content_name(plan.row_group, plan.name, columns, plan.rows)}.json")
        for plan in plans
    ]
    names = set(storage.list_files(request.dest))
    left = [(plan, mark) for plan, mark in zip(plans, marks, strict=True) if not {plan.name, mark} <= names]
    # A command with other settings may have written shards of the same names: their marks end before their files do.
    rewritten = {plan.name for plan, _ in left}
    for name in names:
        if name.startswith(f"{WORK}/") and name[len(WORK) + 1 :].rpartition("-")[0] in rewritten:
            storage.remove(storage.join(request.dest, name))
    calls = [(request.dest, plan.name, plan.rows, plan.row_group, mark, owner, columns) for plan, mark in left]
    run_with_progress(tasks, write_shard, calls, [plan.rows.num_rows for plan, _ in left], "written")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda mark: storage.read_bytes(storage.join(request.dest, mark)), marks))
    return [(plan.split, Shard.model_validate_json(text)) for plan, text in zip(plans, texts, strict=True)]


def write_shard(
    dest: str, name: str, rows: pa.Table, row_group: int, mark: str, owner: str, columns: Sequence[str] = ()
) -> None:
    """Write one shard, then its description to the work file `mark`."""
    check_owner(dest, owner)
    own = dict(zip(OWN_COLUMNS, TYPES, strict=True))
    if _has_lists(rows):
        own |= {"label": CLASS_LIST, UNKNOWN_COLUMN: CLASS_LIST}
    groups, schema = [], pa.schema([*own.items(), *((each, pa.string()) for each in columns)])
    with storage.atomic_write(storage.join(dest, name)) as path:
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False, write_statistics=False) as writer:
            for start in range(0, rows.num_rows, row_group):
                group = rows.slice(start, row_group)
                writer.write_table(_gather(group, schema), row_group_size=row_group)
                groups.append(group.num_rows)
        shard = _describe_shard(name, path, tuple(groups))
    mark_checked(storage.join(dest, name), shard.sha256)
    storage.write_bytes(storage.join(dest, mark), shard.model_dump_json().encode())


def _gather(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows of a shard with the bytes of their images."""
    places = list(zip(*(rows[name].to_pylist() for name in ("file", "start", "size")), strict=True))
    hashes, names = rows["sha256"].to_pylist(), rows["name"].to_pylist()
    contents = list(read_ranges(places))
    for content, expected, (file, _, _) in zip(contents, hashes, places, strict=True):
        if hashlib.sha256(content).hexdigest() != expected:
            raise ConfigError(f"{file}: changed while it was being sharded")
    keys = [f"{content[:16]}:{name}" for content, name in zip(hashes, names, strict=True)]
    others = zip(*rows["others"].to_pylist(), strict=True)
    labels = [rows["labels"], rows["unknown"]] if _has_lists(rows) else [rows["label"]]
    own = [contents, labels[0], keys, rows["width"], rows["height"], *labels[1:]]
    return pa.table([*own, *map(list, others)], schema=schema)


def _has_lists(rows: pa.Table) -> bool:
    """Whether images have several labels."""
    return rows["labels"].null_count == 0


def _describe_shard(name: str, path: Any, groups: tuple[int, ...]) -> Shard:
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Shard(name=name, rows=sum(groups), bytes=file.tell(), sha256=sha256, row_groups=groups)


def _check_indexable(listing: Listing) -> None:
    """Refuse files whose rows a run could not read.

    Their labels are no class numbers, some have other columns, or a row group is empty.
    """
    first = listing.tables[0][1]
    for _, table in listing.tables:
        if (table.image, table.label) != (first.image, first.label):
            raise ConfigError(
                f"--index-only: {table.file} has the columns {table.image} and {table.label}, and {first.file} has"
                f" {first.image} and {first.label}; expected the same columns in all files"
            )
        if 0 in table.row_groups and table.labels:
            raise ConfigError(
                f"--index-only: {table.file}: row group {table.row_groups.index(0)} is empty; expected files without"
                " such groups, or `vitray shard` without --index-only"
            )
        labels = table.labels
        if table.has_lists:
            lists = [*labels, *(table.unknown or ())]
            labels = [each for row in lists for each in ([None] if row is None else row)]
        wrong = [label for label in labels if type(label) is not int or not 0 <= label < len(listing.classes)]
        if wrong:
            raise ConfigError(
                f"--index-only: {table.file}: {len(wrong)} labels such as {str(wrong[0])[:40]!r}; files that stay as"
                f" they are need labels from 0 to {len(listing.classes) - 1}"
            )


def index_shard(table: ImageTable, source: str, dest: str) -> Shard:
    """Return a file of the source as a shard; its name is the path below the destination, or the full address."""
    address = table.file if storage.is_remote(source) else storage.filesystem(table.file)[1]
    folder = dest if storage.is_remote(dest) else storage.filesystem(dest)[1]
    with storage.local_copy(table.file) as path:
        return _describe_shard(
            address.removeprefix(f"{folder.rstrip('/')}/"), path, table.row_groups if table.labels else ()
        )


# ---- the end ---------------------------------------------------------------------------------------------------------


def _describe(
    request: ShardRequest, listing: Listing, images: pa.Table, shards: Shards, rejects: list[Reject], copies: Duplicates
) -> Dataset:
    if listing.labels == "several":
        lists = zip(images["split"].to_pylist(), images["labels"].to_pylist(), strict=True)
        counts = Counter((split, label) for split, labels in lists for label in labels)
    else:
        counts = Counter(zip(images["split"].to_pylist(), images["label"].to_pylist(), strict=True))
    reasons = Counter(reject.reason.partition(":")[0] for reject in rejects)
    mean, std = channel_statistics(images)
    splits = {
        split: Split(
            shards=tuple(shard for other, shard in shards if other == split),
            class_counts=tuple(counts[split, label] for label in range(len(listing.classes))),
        )
        for split in sorted({split for split, _ in shards})
    }
    columns = Columns(unknown=UNKNOWN_COLUMN if listing.labels == "several" else None)
    if request.index_only:
        table = listing.tables[0][1]
        columns = Columns(image=table.image, label=table.label, key=None, unknown=request.settings.unknown)
    return Dataset(
        splits=splits,
        labels=listing.labels,
        classes=listing.classes,
        mean=mean,
        std=std,
        source=request.source,
        seed=request.settings.seed,
        settings=request.recorded(),
        columns=columns,
        others=request.settings.columns,
        rejects=Rejects(count=len(rejects), reasons=dict(sorted(reasons.items()))),
        duplicates=copies,
        url=request.dest,
    )


def channel_statistics(images: pa.Table) -> tuple[Channels, Channels]:
    """Return mean and standard deviation of each channel over the train pixels (all if there is no train), in 0..1."""
    # An expression in place of the mask would start threads of Arrow, as `read_table` does not.
    train = images.filter(pa.array([split == "train" for split in images["split"].to_pylist()]))
    table = train if train.num_rows else images
    area = sum(_areas(table))
    moments = [sum(column) for column in zip(*table["moments"].to_pylist(), strict=True)]
    means = [total / area for total in moments[:3]]
    spreads = [math.sqrt(max(0.0, square / area - mean**2)) for square, mean in zip(moments[3:], means, strict=True)]
    red, green, blue, *stds = (round(value / 255, 6) for value in (*means, *spreads))
    return (red, green, blue), (stds[0], stds[1], stds[2])


def _remove_leftovers(request: ShardRequest, names: set[str]) -> None:
    """Remove shards of interrupted commands whose plan differed, and unfinished files."""
    storage.remove_unfinished(request.dest)
    if not request.index_only:
        for name in storage.list_files(request.dest):
            if SHARD_NAME.fullmatch(name) and name not in names:
                storage.remove(storage.join(request.dest, name))
