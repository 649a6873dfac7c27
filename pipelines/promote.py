"""vitray promote MODEL [DATA]: give a registered version an alias if it is better than the alias's version."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray promote",
        description="Scores a registered version and the version that has the alias on the same images, and moves the"
        " alias if the first is better; says why otherwise. MODEL is name@alias or name/3 in MLflow's registry, or the"
        " folder of a run. DATA is a dataset or other images, as for `vitray evaluate`; without it, that of the run.",
        epilog="example: vitray promote vit@challenger data/demo --alias champion --when significantly_better",
    )
    parser.add_argument("model", metavar="MODEL", help="the version that may get the alias")
    parser.add_argument("data", nargs="?", metavar="DATA", help="the images (default: those of the version's run)")
    parser.add_argument("--split", help="the images to score (default: data.val of the run, or val)")
    parser.add_argument("--alias", help="the alias to move (default: tracking.promote.alias of the run, or champion)")
    rules = ["better", "significantly_better"]
    rule_help = "a higher top-1, or a significantly higher one (default: that of the run, or significantly_better)"
    parser.add_argument("--when", choices=rules, help=rule_help)
    parser.add_argument("--out", metavar="DIR", help="folder of the page, or s3:// (default: below evaluations)")
    parser.add_argument("--workers", type=int, help="actors at a time (default: all GPUs or CPUs of a cluster, else 1)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON: promoted, reason, comparison")
    options = parser.parse_args(args)
    if options.workers is not None and options.workers < 1:
        parser.error("expected --workers from 1 on")

    # Imported late, because MLflow takes seconds.
    from vitray.runs.promotion import PromotionRequest, promote

    values = vars(options)
    values.pop("json")
    promotion = promote(PromotionRequest(**values))
    print(promotion.sentence() + (f"\n\n{promotion.page}" if promotion.page else ""))
    return promotion.flat()


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
