"""From what inspection found to what each shard holds: duplicates, the shuffle, the cut into shards and row groups."""

import math
from collections import defaultdict
from typing import Literal, NamedTuple

import pyarrow as pa

from vitray.data.shards.manifest import Channels, Duplicates
from vitray.data.shards.options import Settings
from vitray.data.shards.sources import rank

# One row per image that could be shown; (file, start, size) is where its bytes are now.
FOUND = pa.schema(
    [
        pa.field("split", pa.string()),
        pa.field("name", pa.string()),
        pa.field("label", pa.int64()),
        pa.field("sha256", pa.string()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("file", pa.string()),
        pa.field("start", pa.int64()),
        pa.field("size", pa.int64()),
        pa.field("moments", pa.list_(pa.int64())),
        pa.field("fingerprint", pa.binary()),
        pa.field("reason", pa.string()),
    ]
)

# Two images are one to the eye within this many of the 128 bits of the fingerprint, and this many grey levels.
NEAR_BITS = 3
NEAR_LEVELS = 8
GROUP_BYTES = 6 * 10**6


class Planned(NamedTuple):
    """One shard to write."""

    split: str
    name: str
    rows: pa.Table
    row_group: int


def find_duplicates(found: pa.Table, how: Literal["exact", "perceptual", "off"]) -> tuple[Duplicates, dict[int, int]]:
    """The counts, and {row of train: row of another split that shows the same}."""
    originals = {"exact": _equal, "perceptual": _near, "off": lambda table: list(range(table.num_rows))}[how](found)
    splits = found["split"].to_pylist()
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
            first = next(row for row in rows if splits[row] != "train")
            shared = [row for row in rows if splits[row] == "train"]
            in_train |= dict.fromkeys(shared, first)
            across += len(shared) or len(set(members)) - 1
    return Duplicates(within=within, across=across, removed=len(in_train)), in_train


def _equal(found: pa.Table) -> list[int]:
    first: dict[str, int] = {}
    return [first.setdefault(content, row) for row, content in enumerate(found["sha256"].to_pylist())]


def _near(found: pa.Table) -> list[int]:
    """For each row the first row near it, itself where there is none before."""
    pixels = [w * h for w, h in zip(found["width"].to_pylist(), found["height"].to_pylist(), strict=True)]
    greys = [sum(sums[:3]) / 3 / area for sums, area in zip(found["moments"].to_pylist(), pixels, strict=True)]
    prints = [int.from_bytes(bits) for bits in found["fingerprint"].to_pylist()]
    # Of 4 bands of 32 bits, 3 differing bits leave one untouched: who is near shares a band.
    buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
    originals = []
    for row, (bits, grey) in enumerate(zip(prints, greys, strict=True)):
        bands = [(band, bits >> 32 * band & 0xFFFFFFFF) for band in range(NEAR_BITS + 1)]
        near = (
            other
            for band in bands
            for other in buckets[band]
            if (prints[other] ^ bits).bit_count() <= NEAR_BITS and abs(greys[other] - grey) <= NEAR_LEVELS
        )
        original = min(near, default=row)
        if original == row:
            for band in bands:
                buckets[band].append(row)
        originals.append(original)
    return originals


def plan_shards(found: pa.Table, settings: Settings) -> list[Planned]:
    """Every kept image in one place: shuffled within its split, cut into shards of about equal numbers of rows."""
    splits, names = found["split"].to_pylist(), found["name"].to_pylist()
    planned = []
    for split in sorted(set(splits)):
        rows = [row for row, other in enumerate(splits) if other == split]
        shuffled = sorted((rank(settings.seed, "shuffle", names[row]), row) for row in rows)
        table = found.take([row for _, row in shuffled]).combine_chunks()
        total = sum(table["size"].to_pylist())
        count = min(len(rows), math.ceil(total / settings.shard_bytes))
        group = settings.row_group or max(16, min(128, GROUP_BYTES * len(rows) // total))
        for index in range(count):
            start, stop = len(rows) * index // count, len(rows) * (index + 1) // count
            name = f"{split}-{index:05d}-of-{count:05d}.parquet"
            planned.append(Planned(split, name, table.slice(start, stop - start), group))
    return planned


def channel_statistics(found: pa.Table) -> tuple[Channels, Channels]:
    """Mean and standard deviation of each channel over the train pixels (all, without a train split), in 0..1."""
    splits = found["split"].to_pylist()
    counted = [row for row, split in enumerate(splits) if split == "train"] or list(range(len(splits)))
    table = found.take(counted)
    area = sum(w * h for w, h in zip(table["width"].to_pylist(), table["height"].to_pylist(), strict=True))
    moments = [sum(column) for column in zip(*table["moments"].to_pylist(), strict=True)]
    means = [total / area for total in moments[:3]]
    spreads = [math.sqrt(max(0.0, square / area - mean**2)) for square, mean in zip(moments[3:], means, strict=True)]
    red, green, blue = (round(mean / 255, 6) for mean in means)
    return (red, green, blue), (round(spreads[0] / 255, 6), round(spreads[1] / 255, 6), round(spreads[2] / 255, 6))
