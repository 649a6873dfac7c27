"""vitray shard SOURCE DEST [--split ...] [setting=value ...]: images as shuffled, checked, counted Parquet shards."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb
from vitray.data.shards import ShardSettings, read_request, write_dataset
from vitray.data.shards.inspection import read_rejects, reject_lines
from vitray.data.shards.sources import REJECTS


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray shard",
        description="Write a dataset: Parquet shards in shuffled order and dataset.json. SOURCE is a folder of class"
        " folders (train/ and val/ may lie above them); a .csv, .tsv or .parquet index of paths and labels; WebDataset"
        " tars; Parquet with the images in it; CIFAR's archives; IDX files (MNIST); or the word demo. Both ends"
        " are paths or s3:// addresses. A job that was killed goes on when it is run again.",
        epilog=f"settings: {', '.join(ShardSettings.model_fields)}. example: vitray shard demo data/demo images=6000",
    )
    parser.add_argument("source", help="a path, an s3:// address, or demo")
    parser.add_argument("dest", help="a new folder, or that of a job to finish")
    parser.add_argument("settings", nargs="*", metavar="setting=value", help="settings, named below")
    split = "write only this split (may be repeated); with a SHARE, draw it from train"
    parser.add_argument("--split", action="append", metavar="NAME[=SHARE]", help=split)
    parser.add_argument("--index-only", action="store_true", help="leave Parquet files in place: only describe them")
    parser.add_argument(
        "--look", action="store_true", help="draw augmented images of the dataset SOURCE to DEST (a PNG)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON: url, identity, splits, ...")
    args = parser.parse_intermixed_args(words)
    if args.look:
        from vitray.data.stream.preview import write_preview

        return write_preview(args.source, args.dest, args.settings)
    dataset = write_dataset(read_request(args.source, args.dest, args.split or (), args.settings, args.index_only))
    print(f"{dataset.url}: {len(dataset.classes)} classes, identity {dataset.identity[:16]}")
    for name, split in dataset.splits.items():
        megabytes = sum(shard.bytes for shard in split.shards) / 1e6
        print(f"  {name:<8} {split.rows:>10,} images {len(split.shards):>6,} shards {megabytes:>12,.1f} MB")
    repeats = dataset.duplicates
    print(f"  mean {dataset.mean}, std {dataset.std}")
    print(f"  rejected images {dataset.rejects.count}; duplicates within a split {sum(repeats.within.values())}, kept")
    print(f"  duplicates between splits {repeats.across}, {repeats.removed} removed from train")
    if rejects := read_rejects(dataset.url):
        print(f"  left out, all in {REJECTS}:")
        print("\n".join(f"  {line}" for line in reject_lines(rejects, 5)))
    return {
        "url": dataset.url,
        "identity": dataset.identity,
        "splits": {name: split.rows for name, split in dataset.splits.items()},
        **dataset.model_dump(include={"mean", "std", "rejects", "duplicates"}),
        "classes": len(dataset.classes),
    }


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
