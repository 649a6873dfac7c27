"""vitray predict MODEL... IMAGES OUT: classes, features and embeddings of images as Parquet, each exactly once."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb
from vitray import verbs
from vitray.weights.zoo import check_there


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray predict",
        description="Writes the predictions of networks for each image as Parquet below OUT, a folder or s3://. MODEL"
        " is an address as of `vitray evaluate`. IMAGES is a folder, a quoted glob, a .tar, a .parquet, a dataset of"
        " `vitray shard` or a .csv of addresses, local or s3://. Repeat a command that was killed to continue it.",
        epilog="example: vitray predict runs/first/model photos/ predictions/photos --embedding",
    )
    parser.add_argument("words", nargs="+", metavar="MODEL... IMAGES OUT", help="networks, the images, a new folder")
    parser.add_argument("--top-k", type=int, help="most probable classes; 0 for none (default: 5)")
    parser.add_argument("--logits", action="store_true", help="add the logits of all classes")
    parser.add_argument("--embedding", action="store_true", help="add the pooled vector before the head")
    parser.add_argument("--features", default="", metavar="LEVELS", help="vectors of levels, as in block05,block11")
    parser.add_argument("--split", nargs="+", default=[], help="splits of a dataset of `vitray shard` (default: all)")
    text = "fp32 forbids TF32 in matrix products (default: that of the network's run)"
    parser.add_argument("--precision", choices=["fp32", "bf16"], help=text)
    parser.add_argument("--compile", action="store_true", help="use torch.compile, with padded batches")
    parser.add_argument("--batch", type=int, default=64, help="images of a forward pass (default: %(default)s)")
    parser.add_argument("--part", type=int, default=1024, help="images of a file (default: %(default)s)")
    parser.add_argument(
        "--workers",
        metavar="N | MIN:MAX",
        help="actors on Ray (default: this process, or all that fit on a cluster and where there are several GPUs)",
    )
    parser.add_argument("--follow", choices=["csv", "jsonl"], help="print each row too, as soon as its part is written")
    parser.add_argument("--json", action="store_true", help="print the result as JSON: images, written, skipped, ...")
    options = parser.parse_intermixed_args(args)
    if len(options.words) < 3:
        parser.error("expected at least one MODEL, then IMAGES and OUT")
    least, _, most = (options.workers or "1").rpartition(":")
    if not most.isdecimal() or not (least or "1").isdecimal() or not 1 <= int(least or 1) <= int(most):
        parser.error("expected --workers as in 4 or 2:8")
    if options.batch < 1 or options.part < 1 or (options.top_k or 0) < 0:
        parser.error("expected --batch and --part from 1 on, and --top-k from 0 on")

    *models, images, out = options.words
    check_there(*models)
    report = verbs.predict(
        models,
        images,
        out,
        top_k=options.top_k,
        logits=options.logits,
        embedding=options.embedding,
        features=[name for name in options.features.split(",") if name],
        splits=options.split,
        precision=options.precision,
        compiled=options.compile,
        batch=options.batch,
        part=options.part,
        workers=(int(least or 1), int(most)) if options.workers else None,
        follow=options.follow,
    )
    if not options.follow:
        print(report.text)
    return report.values


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
