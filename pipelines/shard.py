"""vitray shard SOURCE DEST [--split ...] [setting=value ...]: images as shuffled, checked, counted Parquet shards."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb
from vitray import verbs
from vitray.data.shards import ShardSettings


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray shard",
        description="Write a dataset: Parquet shards in shuffled order and dataset.json. SOURCE is a folder of class"
        " folders (train/ and val/ may lie above them); a .csv, .tsv or .parquet index of paths and labels; WebDataset"
        " tars; Parquet with the images in it; CIFAR's archives; IDX files (MNIST); a .json of COCO; or the word demo."
        " Both ends are paths or s3:// addresses. A job that was killed goes on when it is run again.",
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
    report = verbs.shard(args.source, args.dest, args.settings, splits=args.split or (), index_only=args.index_only)
    print(report.text)
    return report.values


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
