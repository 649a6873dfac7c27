"""What the command line may say to `vitray bench`; light, so that a wrong word is refused at once."""

import argparse
from pathlib import Path

EXAMPLES = (
    "examples: vitray bench branches --models vit_s18x2_16 --batches 1,8; vitray bench ingest data/demo; "
    "vitray bench train --models vit_s12x1_16 --batch 64 --dtype bf16 --compile; "
    "vitray bench train --dataset data/demo --models vit_u6x2_8_hmlp_bn --image-size 64 --batch 32; "
    "vitray bench finetune --model vit_b12x1_16 --image-size 384; "
    "vitray bench sweep data/demo --trials 4"
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
    ingest.add_argument(
        "--simulate-object-store-latency",
        type=float,
        metavar="MS",
        help="the stream from an S3 server without and with",
    )
    ingest.add_argument("--slow-consumer", type=float, metavar="S", help="a pause a batch: memory instead of speed")
    ingest.add_argument("--object-store", type=int, metavar="MB", help="of the Ray that is started here (Ray's choice)")
    train = what.add_parser("train", help="a training step against a bare loop, or a whole run against a DataLoader")
    train.add_argument("--dataset", help="measure whole runs on this dataset, of the first model, instead of the step")
    train.add_argument("--seconds", type=float, help="length of one variant's turn (0.5; 10 of a whole run)")
    finetune = what.add_parser("finetune", help="steps that train all, attn, ffn or head: time and memory")
    finetune.add_argument("--model", default="vit_ti12x1_16", help="a name (%(default)s)")
    finetune.add_argument(
        "--modes",
        default="full,attn,ffn,head,attn+feedforward",
        help="task.mode, or task.mode+compute.recompute, separated by commas; the first is compared with (%(default)s)",
    )
    finetune.add_argument("--batch", type=int, help="images in a batch (8 on a GPU, 1 on a CPU)")
    sweep = what.add_parser("sweep", help="runs as trials of one sweep, against as many vitray train: CPU and overhead")
    sweep.add_argument("dataset", help="a folder written by vitray shard, with a split val")
    sweep.add_argument("--model", default="vit_u3x1_8", help="a name (%(default)s)")
    sweep.add_argument("--trials", type=int, default=3, help="runs of a sweep (%(default)s)")
    sweep.add_argument("--steps", type=int, default=60, help="of a run (%(default)s)")
    sweep.add_argument("--cache", choices=["none", "decoded"], default="none", help="data.cache (%(default)s)")
    for each in (branches, train):
        each.add_argument("--models", default="vit_s18x2_16", help="names, separated by commas (%(default)s)")
        each.add_argument("--compile", action="store_true", help="through torch.compile")
    for each in (branches, train, finetune):
        each.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16 is autocast (%(default)s)")
    for each in (branches, finetune):
        each.add_argument("--seconds", type=float, default=0.5, help="length of one variant's turn (%(default)s)")
    for each in (ingest, train, sweep):
        each.add_argument("--batch", type=int, default=64, help="images in a batch (%(default)s)")
    for each in (branches, ingest, train, finetune, sweep):
        each.add_argument("--image-size", type=int, default=224, help="pixels a side (%(default)s)")
        each.add_argument("--rounds", type=int, default=7, help="turns each variant gets (%(default)s)")
        each.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the CSV and PNG (%(default)s)")
    for each in (parser, branches, ingest, train, finetune, sweep):
        each.add_argument("--json", action="store_true", help="the result as JSON on the last line")
    sweep.set_defaults(batch=32, image_size=32, rounds=3)  # a turn of it takes minutes
    return parser
