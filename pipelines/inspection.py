"""vitray inspect MODEL [DATA | IMAGES...]: figures of the inside of a network, as a page, PNG, SVG and CSV."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb
from vitray import verbs
from vitray.config.evaluation import NEEDS
from vitray.weights.zoo import check_there


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray inspect",
        description="Shows the inside of a network: attention over images with the predicted classes, attention"
        " distance and entropy by head and level, parallel branches, filters, positions, similarity of levels, token"
        " lengths, weights, and the changes from MODEL to another network. MODEL is a model folder, a"
        " delta, zoo/NAME, models:/name@alias, runs:/<id>/<path>, s3:// or a weights file of another library. DATA is a"
        " dataset or source of `vitray evaluate`.",
        epilog="examples: vitray inspect runs/first/model data/demo; vitray inspect deit_b.pth cat.jpg dog.png"
        " --figures rollout",
    )
    parser.add_argument("model", metavar="MODEL", help="the network")
    parser.add_argument("words", nargs="*", metavar="DATA | IMAGES", help="a dataset, or image files")
    text = f"some of {', '.join(NEEDS)}, as in rollout,distance (default: all)"
    parser.add_argument("--figures", default="", metavar="NAMES", help=text)
    parser.add_argument("--compare", metavar="MODEL", help="another network, shown beside the first")
    parser.add_argument("--split", default="val", help="the images of DATA (default: %(default)s)")
    text = "images of DATA, evenly spaced (default: %(default)s)"
    parser.add_argument("--images", type=int, default=64, metavar="N", help=text)
    parser.add_argument("--workers", type=int, help="actors for over 64 images (default: all of a cluster, else none)")
    parser.add_argument("--levels", metavar="NUMBERS", help="levels of figure distance, as in 0,5,11 (default: all)")
    parser.add_argument("--out", metavar="DIR", help="folder or s3:// (default: inspect/MODEL-DATA)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON: page, figures, files, images")
    options = parser.parse_intermixed_args(args)
    levels = None if options.levels is None else options.levels.split(",")
    if levels is not None and not all(level.isdecimal() for level in levels):
        parser.error(f"expected --levels as in 0,5,11, got {options.levels}")
    if options.images < 1 or not (options.workers is None or options.workers > 0):
        parser.error("expected --images and --workers from 1 on")

    check_there(options.model, *([options.compare] if options.compare else []))
    report = verbs.inspect(
        options.model,
        options.words,
        figures=[name for name in options.figures.split(",") if name],
        compare=options.compare,
        split=options.split,
        most=options.images,
        levels=levels and [int(level) for level in levels],
        workers=options.workers,
        out=options.out,
    )
    print(report.text)
    return report.values


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
