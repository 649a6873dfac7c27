"""What the command line may say to `vitray bench`; light, so that a wrong word is refused at once."""

import argparse
from pathlib import Path

EXAMPLES = (
    "examples: vitray bench branches --models vit_s18x2_16 --batches 1,8; vitray bench ingest data/demo; "
    "vitray bench train --models vit_s12x1_16 --batch 64 --dtype bf16 --compile; "
    "vitray bench finetune --model vit_b12x1_16 --image-size 384"
)


def build_parser(description: str) -> argparse.ArgumentParser:
    """The parser of all benchmarks."""
    parser = argparse.ArgumentParser(prog="vitray bench", description=description, epilog=EXAMPLES)
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    branches = what.add_parser("branches", help="seed 000's Table 4: parallel branches sequential, looped, fused, auto")
    branches.add_argument("--batches", default="1,2,4,8,16,32,64", help="images in a batch (%(default)s)")
    branches.add_argument("--train", action="store_true", help="forward and backward instead of inference")
    ingest = what.add_parser("ingest", help="the stream against a plain loop and other loaders, per image")
    ingest.add_argument("dataset", help="a folder written by vitray shard")
    ingest.add_argument("--images", type=int, help="images an epoch (all)")
    ingest.add_argument("--workers", type=int, default=2, help="processes that decode (%(default)s)")
    ingest.add_argument("--object-store", type=int, metavar="MB", help="of the Ray that is started here (Ray's choice)")
    train = what.add_parser("train", help="a training step against a bare loop")
    finetune = what.add_parser("finetune", help="steps that train all, attn, ffn or head: time and memory")
    finetune.add_argument("--model", default="vit_ti12x1_16", help="a name (%(default)s)")
    finetune.add_argument(
        "--modes",
        default="full,attn,ffn,head,attn+feedforward",
        help="task.mode, or task.mode+compute.recompute, separated by commas; the first is compared with (%(default)s)",
    )
    finetune.add_argument("--batch", type=int, help="images in a batch (8 on a GPU, 1 on a CPU)")
    for each in (branches, train):
        each.add_argument("--models", default="vit_s18x2_16", help="names, separated by commas (%(default)s)")
        each.add_argument("--compile", action="store_true", help="through torch.compile")
    for each in (branches, train, finetune):
        each.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16 is autocast (%(default)s)")
    for each in (branches, train, finetune):
        each.add_argument("--seconds", type=float, default=0.5, help="length of one variant's turn (%(default)s)")
    for each in (ingest, train):
        each.add_argument("--batch", type=int, default=64, help="images in a batch (%(default)s)")
    for each in (branches, ingest, train, finetune):
        each.add_argument("--image-size", type=int, default=224, help="pixels a side (%(default)s)")
        each.add_argument("--rounds", type=int, default=7, help="turns each variant gets (%(default)s)")
        each.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the CSV and PNG (%(default)s)")
    for each in (parser, branches, ingest, train, finetune):
        each.add_argument("--json", action="store_true", help="the result as JSON on the last line")
    return parser
