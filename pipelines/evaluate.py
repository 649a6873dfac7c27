"""vitray evaluate MODEL... DATA: scores with intervals, calibration and comparisons, as a page, JSON and CSV."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray evaluate",
        description="Scores networks on each image of a split exactly once, and compares several in pairs. MODEL is a"
        " model folder, a delta, models:/name@alias, runs:/<id>/<path>, s3:// or a weights file of another library."
        " DATA is a dataset, or a folder, tar, Parquet file or index that `vitray shard` reads. A command that was"
        " killed continues when it is repeated.",
        epilog="example: vitray evaluate runs/first/model runs/second/model data/demo --json",
    )
    parser.add_argument("words", nargs="+", metavar="MODEL... DATA", help="one or more networks, then the images")
    parser.add_argument("--split", default="val", help="the images to score (default: %(default)s)")
    parser.add_argument("--probes", nargs="+", default=[], help="of features: some of knn few_shot linear rank")
    parser.add_argument("--train-split", default="train", help="the images that probes learn from (default: train)")
    parser.add_argument("--corrupt", action="store_true", help="score corrupted copies too: 5 kinds, 5 severities")
    parser.add_argument("--imagenet-c", metavar="DIR", help="score a folder corruption/severity/class/image too")
    parser.add_argument("--baseline", metavar="FILE", help="errors of a network, {corruption: share}, for the mCE")
    parser.add_argument("--labels", metavar="KIND=PATH", help="published labels, as in real=real.json (docs: kinds)")
    parser.add_argument("--out", metavar="DIR", help="folder or s3:// (default: evaluations/MODEL-DATA)")
    parser.add_argument("--workers", type=int, help="actors at a time (default: all GPUs or CPUs of a cluster, else 1)")
    parser.add_argument("--max-corrupt", type=float, default=0.01, metavar="SHARE", help="of unusable images, at most")
    parser.add_argument("--json", action="store_true", help="print the result as JSON: images, top1, top1_low, ...")
    options = parser.parse_intermixed_args(args)
    if len(options.words) < 2:
        parser.error("wanted at least one MODEL, and DATA")
    if (options.workers is not None and options.workers < 1) or not 0 <= options.max_corrupt < 1:
        parser.error("wanted --workers from 1 on, and --max-corrupt from 0 to below 1")
    *models, data = options.words

    # Imported late, because torch takes a second.
    from vitray.evaluation.report.driver import Request, evaluate
    from vitray.evaluation.report.texts import scores_text

    probes = [name for part in options.probes for name in part.split(",")]
    request = Request(models, data, options.split, probes, options.train_split, options.out)
    request = request._replace(workers=options.workers, max_corrupt=options.max_corrupt, corrupt=options.corrupt)
    request = request._replace(labels=options.labels, imagenet_c=options.imagenet_c, baseline=options.baseline)
    evaluation, page = evaluate(request)
    print(f"{scores_text(evaluation)}\n\n{page}")
    return evaluation.flat() | {"page": page}


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
