"""From the table of inspected images to the content of each shard: duplicates, shuffle, shards and row groups."""

import math
from collections import defaultdict
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from vitray.data.shards.manifest import Channels, Duplicates
from vitray.data.shards.options import ShardSettings
from vitray.data.shards.sources import shuffle_key

# Two images are near duplicates within this many of the 128 bits of the fingerprint, and this many gray levels.
NEAR_BITS = 3
NEAR_LEVELS = 8
GROUP_BYTES = 6 * 10**6


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


def channel_statistics(images: pa.Table) -> tuple[Channels, Channels]:
    """Return mean and standard deviation of each channel over the train pixels (all if there is no train), in 0..1."""
    train = images.filter(pc.field("split") == "train")
    table = train if train.num_rows else images
    area = sum(_areas(table))
    moments = [sum(column) for column in zip(*table["moments"].to_pylist(), strict=True)]
    means = [total / area for total in moments[:3]]
    spreads = [math.sqrt(max(0.0, square / area - mean**2)) for square, mean in zip(moments[3:], means, strict=True)]
    red, green, blue, *stds = (round(value / 255, 6) for value in (*means, *spreads))
    return (red, green, blue), (stds[0], stds[1], stds[2])
