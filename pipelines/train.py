"""vitray train RECIPE [setting=value ...]: train on the cluster at RAY_ADDRESS, or on this machine."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from pipelines import recipes
from pipelines.__main__ import run_verb
from vitray import storage
from vitray.config import load_run
from vitray.errors import ConfigError

EXAMPLES = (
    "examples: vitray train demo data.url=data/demo; vitray train my.yaml optim.lr=3e-4 --name low --out s3://b/runs; "
    "vitray train --resume low compute.workers=4; vitray train demo data.url=data/demo --dry-run --json"
)


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="vitray train", description=__doc__, epilog=EXAMPLES)
    parser.add_argument(
        "words", nargs="*", metavar="RECIPE setting=value", help="a YAML file, or one that vitray brings"
    )
    parser.add_argument("--name", help="of the run; a run of this name that was interrupted goes on (recipe and time)")
    parser.add_argument("--out", default="runs", help="folder of all runs, or s3:// (%(default)s)")
    parser.add_argument("--resume", metavar="NAME", help="go on with the run of this name; no recipe is needed")
    parser.add_argument("--fork", metavar="NAME", help="start from the last weights of that run")
    parser.add_argument(
        "--dry-run", action="store_true", help="check all that can be checked, print the plan, and stop"
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON on the last line")
    args = parser.parse_intermixed_args(words)
    given, settings = ([word for word in args.words if ("=" in word) == is_setting] for is_setting in (False, True))
    if len(given) != (0 if args.resume else 1):
        wanted = (
            "no recipe: it is the run's own"
            if args.resume
            else f"one recipe: a file, or one of {', '.join(recipes.names())}"
        )
        raise ConfigError(f"got {' and '.join(given) or 'no recipe'}, wanted {wanted}")

    from vitray.runs.driver import stored_run, train
    from vitray.runs.plan import check_storage, make_plan, plan_text

    if args.resume:
        name, run = args.resume, stored_run(storage.join(args.out, args.resume), settings)
    else:
        run = load_run(recipes.path_of(given[0]), settings)
        name = args.name or f"{Path(given[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if args.dry_run:
        planned = make_plan(run)
        check_storage(args.out)
        print(plan_text(planned), file=sys.stderr)
        return planned.plan._asdict()
    return train(run, name, args.out, fork=args.fork)._asdict()


if __name__ == "__main__":
    sys.exit(run_verb(main, sys.argv[1:]))
