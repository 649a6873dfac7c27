"""Writing a dataset: inspect every image, plan the shards, write them, and say so in dataset.json, last.

Each task leaves a file under DEST/.work named after all that decides its result, so a job that was killed and is run
again goes on where it was; what the source or the settings have changed since is simply named otherwise.
"""

import hashlib
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import PIL
import pyarrow as pa
import pyarrow.parquet as pq

from vitray import storage
from vitray.cluster.storage_check import preflight, readable
from vitray.data.augment.decode import UndecodableImage, shown
from vitray.data.shards.images import jpeg, look, shrunk
from vitray.data.shards.manifest import (
    MANIFEST,
    Columns,
    Dataset,
    Duplicates,
    Rejects,
    Shard,
    Split,
    open_dataset,
    save_dataset,
)
from vitray.data.shards.options import Job
from vitray.data.shards.plan import FOUND, channel_statistics, find_duplicates, plan_shards
from vitray.data.shards.sources import Item, Kind, Listing, list_source, read_items, read_ranges, recognise
from vitray.data.shards.tables import Part
from vitray.data.shards.tasks import Progress, run_tasks, tasks_at_a_time
from vitray.errors import ConfigError

WORK = ".work"
REJECTS = "rejects.parquet"
SHARD_NAME = re.compile(r"[^/]+-\d{5}-of-\d{5}\.parquet|\.writing-[^/]+")
# What decides bytes beside the job: another version may encode or lay out otherwise.
VERSIONS = (1, PIL.__version__, pa.__version__)
# Kinds whose images lie in the source as they will lie in a shard, at a place that can be read alone.
IN_PLACE = {"folder", "index", "tar"}

SCHEMA = pa.schema(
    [
        pa.field("image", pa.binary()),
        pa.field("label", pa.int64()),
        pa.field("key", pa.string()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
    ]
)
REJECTED = pa.schema([pa.field(name, pa.string()) for name in ("split", "file", "reason")])


def write_dataset(job: Job) -> Dataset:
    """The dataset that the job describes, written to its destination, or finished there."""
    readable(job.dest, MANIFEST)
    if there := _already_there(job):
        return there
    kind = recognise(job)
    if job.index_only and kind != "parquet":
        raise ConfigError(f"--index-only: wanted Parquet with images in it; {job.source} is of kind {kind}")
    preflight(job.dest)
    with tasks_at_a_time(job.settings.workers) as at_a_time:
        listing = list_source(job, kind, partial(run_tasks, at_a_time=at_a_time))
        # What marks the folder as ours, before anything else is written there.
        storage.write_bytes(storage.join(job.dest, WORK, "job.json"), json.dumps(job.recorded()).encode())
        found = _inspect(job, listing, at_a_time)
        bad = found["reason"].is_valid()
        reasons = zip(*(found.filter(bad)[name].to_pylist() for name in ("split", "name", "reason")), strict=True)
        rejects = sorted([*listing.rejects, *reasons])
        _refuse_many(job, rejects, found.num_rows + len(listing.rejects))
        found = found.filter(found["reason"].is_null())
        duplicates, in_train = find_duplicates(found, job.settings.dedupe)
        removed: list[tuple[str, str, str]] = []
        if job.index_only:
            duplicates = duplicates.model_copy(update={"removed": 0})
            shards = _shards_in_place(job, listing, at_a_time)
        else:
            names = found["name"]
            removed = [("train", str(names[at]), f"shows the same as {names[other]}") for at, other in in_train.items()]
            found = found.take([row for row in range(found.num_rows) if row not in in_train])
            shards = _write_shards(job, found, at_a_time)
    _write_rejects(job, [*rejects, *removed])
    dataset = _describe(job, listing, found, shards, rejects, duplicates)
    _remove_leftovers(job, {shard.name for split in shards.values() for shard in split})
    save_dataset(dataset)
    storage.remove(storage.join(job.dest, WORK))
    return dataset


def _already_there(job: Job) -> Dataset | None:
    """The finished dataset of the same job, where there is one; a destination that holds anything else is refused."""
    if job.index_only and job.draw:
        raise ConfigError("--index-only leaves files as they are: --split NAME=SHARE cannot draw from them")
    if job.index_only and job.settings.resize:
        raise ConfigError("--index-only leaves files as they are: resize cannot re-encode them")
    source, dest = (storage.filesystem(url)[1] for url in (job.source, job.dest))
    same_store = storage.is_remote(job.source) == storage.is_remote(job.dest)
    if not job.index_only and same_store and f"{dest}/".startswith(f"{source}/"):
        raise ConfigError(f"{job.dest}: lies within the source {job.source}, which would then hold it too")
    if storage.exists(storage.join(job.dest, MANIFEST)):
        there = open_dataset(job.dest)
        if (there.source, there.settings) != (job.source, job.recorded()):
            raise ConfigError(
                f"{job.dest}: holds another dataset, of {there.source}: choose another place, or remove it"
            )
        storage.remove(storage.join(job.dest, WORK))
        print(f"{job.dest}: already complete, nothing done", file=sys.stderr)
        return there
    names = storage.list_files(job.dest)
    if not job.index_only and names and not any(name.startswith(f"{WORK}/") for name in names):
        raise ConfigError(f"{job.dest}: holds other files, such as {names[0]}: wanted a new or empty folder")
    return None


# ---- first pass: every image decoded once ---------------------------------------------------------------------------


def _inspect(job: Job, listing: Listing, at_a_time: int) -> pa.Table:
    """What was found of every item, in the order of the listing."""
    size = job.settings.chunk
    chunks = [listing.items[start : start + size] for start in range(0, len(listing.items), size)]
    calls = [(job, listing.kind, chunk, _named_after(_deciding(job, listing.kind), chunk)) for chunk in chunks]
    done = set(storage.list_files(storage.join(job.dest, WORK)))
    names = [f"found-{call[-1]}.parquet" for call in calls]
    _run(inspect_chunk, [call for call, name in zip(calls, names, strict=True) if name not in done], "inspected",
         [len(chunk) for chunk, name in zip(chunks, names, strict=True) if name not in done], at_a_time)  # fmt: skip
    with ThreadPoolExecutor(8) as pool:  # each read may wait for a network
        contents = pool.map(lambda name: storage.read_bytes(storage.join(job.dest, WORK, name)), names)
        return pa.concat_tables([pq.ParquetFile(io.BytesIO(content)).read() for content in contents])


def _deciding(job: Job, kind: Kind) -> dict[str, Any]:
    """What, beside the items, decides what inspection finds."""
    words = job.settings
    settings = words.model_dump(include={"image", "resize", "quality", "max_pixels"})
    if kind == "demo":
        settings |= words.model_dump(include={"seed", "image_size", "task"})
    return settings | {"kind": kind, "perceptual": words.dedupe == "perceptual", "in_place": job.index_only}


def inspect_chunk(job: Job, kind: Kind, items: Sequence[Item], name: str) -> None:
    """Decode some images; keep what was found in one file, and bytes that lie nowhere else in another."""
    words = job.settings
    kept_file = storage.join(job.dest, WORK, f"bytes-{name}")
    kept = bytearray()
    rows = []
    for item, (content, label) in zip(items, read_items(kind, items, job), strict=True):
        row: dict[str, Any] = {"split": item.split, "name": item.name, "label": label}
        rows.append(row)
        try:
            image = shown(content, words.max_pixels)
        except UndecodableImage as bad:
            row["reason"] = str(bad)
            continue
        place = (item.file, item.place, len(content))
        smaller = shrunk(image, words.resize) if words.resize else None
        if smaller:
            image, content = smaller, jpeg(smaller, words.quality)
        if not job.index_only and (smaller or kind not in IN_PLACE):
            place = (kept_file, len(kept), len(content))
            kept += content
        row |= look(image, words.dedupe == "perceptual")._asdict() | {"sha256": hashlib.sha256(content).hexdigest()}
        row |= dict(zip(("file", "start", "size"), place, strict=True))
    if kept:
        storage.write_bytes(kept_file, bytes(kept))
    pq.write_table(pa.Table.from_pylist(rows, schema=FOUND), table := io.BytesIO())
    storage.write_bytes(storage.join(job.dest, WORK, f"found-{name}.parquet"), table.getvalue())


def _refuse_many(job: Job, rejects: list[tuple[str, str, str]], total: int) -> None:
    allowed = job.settings.max_rejects
    if len(rejects) <= allowed * total and len(rejects) < total:
        return
    _write_rejects(job, rejects)
    lines = [f"  {name}: {reason}" for _, name, reason in rejects[:20]]
    more = [f"  and {len(rejects) - 20} more"] if len(rejects) > 20 else []
    raise ConfigError(
        f"{job.source}: {len(rejects)} of {total} images cannot be used, more than max_rejects={allowed} allows;"
        f" {storage.join(job.dest, REJECTS)} lists them all:\n" + "\n".join(lines + more)
    )


# ---- second pass: the shards ----------------------------------------------------------------------------------------


def _write_shards(job: Job, found: pa.Table, at_a_time: int) -> dict[str, list[Shard]]:
    """The shards of each split, those that an earlier run finished left as they are."""
    planned = plan_shards(found, job.settings)
    marks = [
        storage.join(WORK, f"shard-{_named_after(shard.row_group, shard.name, shard.rows)}.json") for shard in planned
    ]
    sizes = storage.file_sizes(job.dest)
    left = [(shard, mark) for shard, mark in zip(planned, marks, strict=True) if not {shard.name, mark} <= sizes.keys()]
    calls = [(job.dest, *shard, mark) for shard, mark in left]
    _run(write_shard, calls, "written", [shard.rows.num_rows for shard, _ in left], at_a_time)
    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(lambda mark: storage.read_bytes(storage.join(job.dest, mark)), marks))
    shards: dict[str, list[Shard]] = {}
    for shard, text in zip(planned, said, strict=True):
        shards.setdefault(shard.split, []).append(Shard.model_validate_json(text))
    return shards


def write_shard(dest: str, _split: str, name: str, rows: pa.Table, row_group: int, mark: str) -> None:
    """Gather the images of one shard, and write it as one file."""
    groups = []
    with storage.created(storage.join(dest, name)) as path:
        with pq.ParquetWriter(path, SCHEMA, compression="none", use_dictionary=False, write_statistics=False) as writer:
            for start in range(0, rows.num_rows, row_group):
                group = rows.slice(start, row_group)
                writer.write_table(_gather(group), row_group_size=row_group)
                groups.append(group.num_rows)
        shard = _shard_of(name, path, groups)
    storage.write_bytes(storage.join(dest, mark), shard.model_dump_json().encode())


def _gather(rows: pa.Table) -> pa.Table:
    places = list(zip(*(rows[name].to_pylist() for name in ("file", "start", "size")), strict=True))
    hashes, names = rows["sha256"].to_pylist(), rows["name"].to_pylist()
    contents = list(read_ranges(places))
    for content, wanted, (file, _, _) in zip(contents, hashes, places, strict=True):
        if hashlib.sha256(content).hexdigest() != wanted:
            raise ConfigError(f"{file}: changed while it was being sharded")
    keys = [f"{content[:16]}:{name}" for content, name in zip(hashes, names, strict=True)]
    return pa.table([contents, rows["label"], keys, rows["width"], rows["height"]], schema=SCHEMA)


def _shard_of(name: str, path: Any, groups: Iterable[int]) -> Shard:
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        groups = tuple(groups)
        return Shard(name=name, rows=sum(groups), bytes=file.tell(), sha256=sha256, row_groups=groups)


def _shards_in_place(job: Job, listing: Listing, at_a_time: int) -> dict[str, list[Shard]]:
    """The source's own files as shards."""
    described = run_tasks(describe_part, [(part, job.source, job.dest) for _, part in listing.parts], at_a_time)
    shards: dict[str, list[Shard]] = {}
    for (split, _), shard in zip(listing.parts, described, strict=True):
        shards.setdefault(split, []).append(shard)
    return {split: shards[split] for split in sorted(shards)}


def describe_part(part: Part, source: str, dest: str) -> Shard:
    """A file of the source as a shard: named below the destination where it lies there, else by its whole address."""
    address = part.file if storage.is_remote(source) else storage.filesystem(part.file)[1]
    folder = dest if storage.is_remote(dest) else storage.filesystem(dest)[1]
    inside = address.startswith(f"{folder.rstrip('/')}/")
    name = address.removeprefix(f"{folder.rstrip('/')}/") if inside else address
    with storage.local_copy(part.file) as path:
        return _shard_of(name, path, part.row_groups)


# ---- the end --------------------------------------------------------------------------------------------------------


def _describe(
    job: Job,
    listing: Listing,
    found: pa.Table,
    shards: dict[str, list[Shard]],
    rejects: list[tuple[str, str, str]],
    duplicates: Duplicates,
) -> Dataset:
    counts = Counter(zip(found["split"].to_pylist(), found["label"].to_pylist(), strict=True))
    reasons = Counter(reason.partition(":")[0] for _, _, reason in rejects)
    mean, std = channel_statistics(found)
    labels = range(len(listing.classes))
    splits = {
        split: Split(shards=tuple(shards[split]), class_counts=tuple(counts[split, label] for label in labels))
        for split in sorted(shards)
    }
    columns = Columns()
    if job.index_only:
        part = listing.parts[0][1]
        columns = Columns(image=part.image, label=part.label, key=None)
    return Dataset(
        splits=splits,
        classes=listing.classes,
        mean=mean,
        std=std,
        source=job.source,
        seed=job.settings.seed,
        settings=job.recorded(),
        columns=columns,
        rejects=Rejects(count=len(rejects), reasons=dict(sorted(reasons.items()))),
        duplicates=duplicates,
        url=job.dest,
    )


def _write_rejects(job: Job, rejects: list[tuple[str, str, str]]) -> None:
    rows = [dict(zip(REJECTED.names, reject, strict=True)) for reject in rejects]
    pq.write_table(pa.Table.from_pylist(rows, schema=REJECTED), table := io.BytesIO())
    storage.write_bytes(storage.join(job.dest, REJECTS), table.getvalue())


def _remove_leftovers(job: Job, wanted: set[str]) -> None:
    """Shards of an earlier plan that never became a dataset; the folder was empty when the first job came."""
    if not job.index_only:
        for name in storage.list_files(job.dest):
            if SHARD_NAME.fullmatch(name) and name not in wanted:
                storage.remove(storage.join(job.dest, name))


def _run(
    function: Callable[..., None], calls: Sequence[tuple[Any, ...]], done: str, images: Sequence[int], at_a_time: int
) -> None:
    """Run the tasks, saying how many images are done."""
    if calls:
        progress = Progress(done, sum(images))
        run_tasks(function, calls, at_a_time, lambda index: progress.add(images[index]))
        progress.end()


def _named_after(*parts: Any) -> str:
    """A name that differs whenever any of these does."""
    content = hashlib.sha256(json.dumps(VERSIONS).encode())
    for part in parts:
        if isinstance(part, pa.Table):
            with pa.ipc.new_stream(sink := io.BytesIO(), part.schema) as stream:
                stream.write_table(part)
            content.update(sink.getvalue())
        else:
            content.update(json.dumps(part, sort_keys=True).encode())
    return content.hexdigest()[:24]
