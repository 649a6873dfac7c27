"""vitray evaluate MODEL... DATA: scores with intervals, calibration and comparisons, as a page, JSON and CSV."""

import argparse
from collections.abc import Sequence
from typing import Any

from pipelines import recipes
from pipelines.__main__ import run_verb
from vitray import verbs
from vitray.config.evaluation import feature_probes
from vitray.weights.zoo import check_there


def main(args: list[str]) -> dict[str, Any]:
    options = read_options(args)
    if options.training_probes:  # imported late, as all below, because torch takes a second
        from vitray.runs.model_output import probe_checkpoints

        return {"checkpoints": probe_checkpoints(options.words, options.probes)}
    models = [word for word in options.words if "=" not in word] if options.vtab else options.words[:-1]
    check_there(*models)
    if options.vtab:
        from vitray.evaluation.vtab.evaluate import VtabRequest, evaluate_vtab
        from vitray.evaluation.vtab.page import vtab_text

        vtab = VtabRequest(
            options.words,
            options.vtab,
            recipes.path_of("finetune_sgd_imagenet"),
            split=options.split,
            train_split=options.train_split,
            out=options.out,
            seeds=options.seeds,
            workers=options.workers,
            max_corrupt=options.max_corrupt,
        )
        scores, page = evaluate_vtab(vtab)
        print(f"{vtab_text(scores)}\n\n{page}")
        return scores.flat() | {"page": page}
    *models, data = options.words
    report = verbs.evaluate(
        models,
        data,
        split=options.split,
        probes=options.probes,
        train_split=options.train_split,
        train_shares=options.train_shares,
        corrupt=options.corrupt,
        imagenet_c=options.imagenet_c,
        baseline=options.baseline,
        labels=options.labels,
        out_of_fold=options.out_of_fold,
        out=options.out,
        workers=options.workers,
        max_corrupt=options.max_corrupt,
    )
    print(report.text)
    return report.values


def read_options(args: Sequence[str]) -> argparse.Namespace:
    """Return the options by name; refuse those that do not go together."""
    parser = argparse.ArgumentParser(
        prog="vitray evaluate",
        description="Scores networks on each image of a split exactly once, and compares several in pairs. MODEL is a"
        " model folder, a delta, zoo/NAME, models:/name@alias, runs:/<id>/<path>, s3:// or a weights file of another"
        " library. DATA is a dataset, or a folder, tar, Parquet file or index that `vitray shard` reads. A command that"
        " was killed continues when it is repeated. An example: vitray evaluate runs/a/model runs/b/model data/demo",
    )
    parser.add_argument("words", nargs="+", metavar="MODEL... DATA", help="one or more networks, then the images")
    parser.add_argument(
        "--vtab", nargs="+", metavar="GROUP=DATA", help="VTAB-1k in place of DATA (see docs/evaluation.md)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="final fine-tunings of --vtab (default: %(default)s)")
    parser.add_argument("--split", default="val", help="the images to score (default: %(default)s)")
    parser.add_argument("--probes", nargs="+", default=[], help=f"feature probes: {', '.join(feature_probes())}")
    parser.add_argument(
        "--training-probes",
        action="store_true",
        help="compute evaluate.probes for folders of runs or checkpoints, given in place of MODEL... DATA",
    )
    parser.add_argument("--train-split", default="train", help="the images that probes learn from (default: train)")
    shares = "also fit probe linear on these shares of the training images, such as 0.05 0.1 0.5"
    parser.add_argument("--train-shares", nargs="+", type=float, default=[], metavar="SHARE", help=shares)
    parser.add_argument("--corrupt", action="store_true", help="score corrupted copies too: 5 kinds, 5 severities")
    parser.add_argument("--imagenet-c", metavar="DIR", help="score a folder corruption/severity/class/image too")
    parser.add_argument("--baseline", metavar="FILE", help="JSON {corruption: error} of a reference network, for mCE")
    kinds = "real, imagenet-v2, imagenet-a, imagenet-r, imagenet-sketch or objectnet"
    parser.add_argument("--labels", metavar="KIND=PATH", help=f"published labels, as in real=real.json; KIND: {kinds}")
    parser.add_argument(
        "--out-of-fold",
        action="store_true",
        help="score the networks of all folds of --split train as one, each image by the one that did not learn it",
    )
    parser.add_argument("--out", metavar="DIR", help="folder or s3:// (default: evaluations/MODEL-DATA)")
    parser.add_argument("--workers", type=int, help="actors at a time (default: all GPUs or CPUs of a cluster, else 1)")
    limit = "share of unusable images above which the command fails (default: %(default)s)"
    parser.add_argument("--max-corrupt", type=float, default=0.01, metavar="SHARE", help=limit)
    parser.add_argument("--json", action="store_true", help="print the result as JSON: images, top1, top1_low, ...")
    options = parser.parse_intermixed_args(args)
    if len(options.words) < 2 and not (options.vtab or options.training_probes):
        parser.error("expected at least one MODEL, and DATA")
    if not (options.workers is None or options.workers > 0) or options.seeds < 1 or not 0 <= options.max_corrupt < 1:
        parser.error("expected --workers and --seeds from 1 on, and --max-corrupt from 0 to below 1")
    other_scores = options.corrupt or options.imagenet_c or options.baseline or options.labels
    if options.training_probes and (other_scores or options.vtab):
        parser.error("expected --training-probes without --vtab, --corrupt, --imagenet-c, --baseline and --labels")
    if options.vtab and (options.probes or other_scores):
        parser.error("expected --vtab without --probes, --corrupt, --imagenet-c, --baseline and --labels")
    options.probes = [name for part in options.probes for name in part.split(",")]
    if options.train_shares and not (
        "linear" in options.probes and all(0 < share < 1 for share in options.train_shares)
    ):
        parser.error("expected --train-shares between 0 and 1, and --probes linear")
    return options


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
