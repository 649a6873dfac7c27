"""vitray bench WHAT ...: speed against a named alternative, interleaved in one run, with spread and circumstances."""

import argparse
import sys
from pathlib import Path
from typing import Any

from pipelines.__main__ import run_verb
from vitray.config import load_run


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray bench",
        description=__doc__,
        epilog="example: vitray bench branches --models vit_u18x2_8 --image-size 32 --batches 1,8,64",
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    branches = what.add_parser("branches", help="seed 000's Table 4: parallel branches sequential, looped, fused, auto")
    branches.add_argument("--models", default="vit_s18x2_16", help="names, separated by commas (%(default)s)")
    branches.add_argument("--batches", default="1,2,4,8,16,32,64", help="images in a batch (%(default)s)")
    branches.add_argument("--image-size", type=int, default=224, help="pixels a side (%(default)s)")
    branches.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16 is autocast (%(default)s)")
    branches.add_argument("--compile", action="store_true", help="through torch.compile")
    branches.add_argument("--train", action="store_true", help="forward and backward instead of inference")
    branches.add_argument("--rounds", type=int, default=7, help="turns each variant gets (%(default)s)")
    branches.add_argument("--seconds", type=float, default=0.5, help="length of one variant's turn (%(default)s)")
    branches.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the CSV and PNG (%(default)s)")
    for each in (parser, branches):
        each.add_argument("--json", action="store_true", help="the result as JSON on the last line")
    args = parser.parse_args(words)
    models = [load_run(None, [f"model.name={name}"]).model.name for name in args.models.split(",")]
    for name in models:
        load_run(None, [f"model.name={name}", f"model.image_size={args.image_size}"])
    if not all(batch.isdecimal() and int(batch) for batch in args.batches.split(",")) or args.rounds < 1:
        parser.error(f"--batches {args.batches}, --rounds {args.rounds}: wanted whole numbers from 1 on")

    from vitray.bench.branches import Settings, measure_branches  # torch takes a second to load

    batches = [int(batch) for batch in args.batches.split(",")]
    shape = (models, batches, args.image_size, args.dtype, args.compile, args.train)
    return measure_branches(Settings(*shape, args.rounds, args.seconds, args.out))


if __name__ == "__main__":
    sys.exit(run_verb(main, sys.argv[1:]))
