"""vitray bench WHAT ...: speed against a named alternative, interleaved in one run, with spread and circumstances."""

import argparse
import sys
from pathlib import Path
from typing import Any

from pipelines.__main__ import run_verb
from vitray.config import load_run

EXAMPLES = (
    "examples: vitray bench branches --models vit_u18x2_8 --image-size 32 --batches 1,8; vitray bench ingest data/demo"
)


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="vitray bench", description=__doc__, epilog=EXAMPLES)
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    branches = what.add_parser("branches", help="seed 000's Table 4: parallel branches sequential, looped, fused, auto")
    branches.add_argument("--models", default="vit_s18x2_16", help="names, separated by commas (%(default)s)")
    branches.add_argument("--batches", default="1,2,4,8,16,32,64", help="images in a batch (%(default)s)")
    branches.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16 is autocast (%(default)s)")
    branches.add_argument("--compile", action="store_true", help="through torch.compile")
    branches.add_argument("--train", action="store_true", help="forward and backward instead of inference")
    branches.add_argument("--seconds", type=float, default=0.5, help="length of one variant's turn (%(default)s)")
    ingest = what.add_parser("ingest", help="the stream against a plain loop and torch's DataLoader, per image")
    ingest.add_argument("dataset", help="a folder written by vitray shard")
    ingest.add_argument("--images", type=int, help="images an epoch (all)")
    ingest.add_argument("--batch", type=int, default=64, help="images in a batch (%(default)s)")
    ingest.add_argument("--workers", type=int, default=2, help="processes that decode (%(default)s)")
    for each in (branches, ingest):
        each.add_argument("--image-size", type=int, default=224, help="pixels a side (%(default)s)")
        each.add_argument("--rounds", type=int, default=7, help="turns each variant gets (%(default)s)")
        each.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the CSV and PNG (%(default)s)")
    for each in (parser, branches, ingest):
        each.add_argument("--json", action="store_true", help="the result as JSON on the last line")
    args = parser.parse_args(words)
    if args.rounds < 1 or args.image_size < 1:
        parser.error(f"--rounds {args.rounds}, --image-size {args.image_size}: wanted whole numbers from 1 on")
    if args.what == "ingest":
        from vitray.bench import ingest as measuring  # torch and Ray take seconds to load

        more = {"images": args.images, "rounds": args.rounds, "out": args.out}
        shape = {"image_size": args.image_size, "batch": args.batch, "workers": args.workers}
        return measuring.measure_ingest(measuring.Settings(args.dataset, **shape, **more))
    models = [load_run(None, [f"model.name={name}"]).model.name for name in args.models.split(",")]
    for name in models:
        load_run(None, [f"model.name={name}", f"model.image_size={args.image_size}"])
    if not all(batch.isdecimal() and int(batch) for batch in args.batches.split(",")):
        parser.error(f"--batches {args.batches}: wanted whole numbers from 1 on")

    from vitray.bench.branches import Settings, measure_branches

    batches = [int(batch) for batch in args.batches.split(",")]
    shape = (models, batches, args.image_size, args.dtype, args.compile, args.train)
    return measure_branches(Settings(*shape, args.rounds, args.seconds, args.out))


if __name__ == "__main__":
    sys.exit(run_verb(main, sys.argv[1:]))
