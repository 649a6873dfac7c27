"""vitray export MODEL --to TARGET: a network for another runtime or library, with a proof that it computes the same."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb
from vitray import verbs
from vitray.exports.options import graph_targets, listed_targets, targets_with
from vitray.weights.zoo import check_there


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray export",
        description="Writes a new folder: the network, the preparation of its images (preprocessing.json), and"
        " parity.json: the largest difference of a logit and the changed top-1 over images, and the latency before and"
        " after. MODEL is a model folder, a delta, zoo/NAME, models:/name@alias, runs:/<id>/<path>, s3:// or a weights"
        " file.",
        epilog="example: vitray export runs/first/model --to onnx --data data/demo",
    )
    parser.add_argument("model", metavar="MODEL", help="a network with a head")
    parser.add_argument("settings", nargs="*", metavar="setting=value", help="what a weights file lacks: heads=12")
    parser.add_argument("--to", required=True, metavar="TARGET", dest="target", help=listed_targets())
    parser.add_argument("--out", metavar="DIR", help="a new folder or s3:// (default: exports/MODEL-TARGET)")
    parser.add_argument("--data", default="demo", help="images to compare the logits on (default: synthetic ones)")
    parser.add_argument("--split", default="val", help="their split (default: %(default)s)")
    parser.add_argument("--images", type=int, default=1000, help="how many, at most (default: %(default)s)")
    any_help = f"{', '.join(graph_targets())}: images of any multiple of a patch"
    parser.add_argument("--any-size", action="store_true", help=any_help)
    int8_help = f"weights (stored as int8); {', '.join(targets_with('dynamic'))}: or dynamic (computed in int8)"
    parser.add_argument("--int8", metavar="KIND", help=int8_help)
    bound_help = "largest share of images with another top-1 (default: %(default)s)"
    parser.add_argument("--bound", type=float, default=0.001, metavar="SHARE", help=bound_help)
    parser.add_argument("--allow", action="store_true", help="write the export even above the bound")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the latency (default: %(default)s)")
    json_help = "print the result as JSON: path, max_logit_difference, changed_top1, images"
    parser.add_argument("--json", action="store_true", help=json_help)
    options = parser.parse_intermixed_args(args)
    if options.images < 1 or options.rounds < 1 or not 0 <= options.bound <= 1:
        parser.error("expected --images and --rounds from 1 on, and --bound from 0 to 1")

    check_there(options.model)
    values = vars(options)
    values.pop("json")
    report = verbs.export(**values)
    print(report.text)
    return report.values


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
