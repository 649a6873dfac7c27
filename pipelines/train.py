"""vitray train RECIPE [setting=value ...]: train on the cluster at RAY_ADDRESS, or on this machine."""

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from pipelines import recipes
from pipelines.__main__ import run_verb
from vitray.config import load_run, split_words
from vitray.errors import ConfigError
from vitray.system import storage
from vitray.system.mlflow_client import tracking_uri

EXAMPLES = (
    "examples: vitray train demo data.url=data/demo; vitray train finetune --data photos/ task.weights=base.pth; "
    "vitray train my.yaml optim.lr=3e-4 --name low --out s3://b/runs; vitray train --resume low compute.workers=4; "
    "vitray train demo data.url=data/demo --dry-run --json"
)


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="vitray train", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("words", nargs="*", metavar="RECIPE setting=value", help="a YAML file or a built-in recipe")
    naming = parser.add_mutually_exclusive_group()
    naming.add_argument("--name", help="of the run; resumes an interrupted run of this name (default: recipe and time)")
    parser.add_argument("--out", default="runs", help="folder of all runs, or s3:// (default: %(default)s)")
    text = "images, as of `vitray shard`; unless they are a dataset, they become one as data/NAME beside --out"
    parser.add_argument("--data", metavar="SOURCE", help=text)
    naming.add_argument("--resume", metavar="NAME", help="resume the run of this name, without a recipe")
    parser.add_argument("--fork", metavar="NAME", help="start from the last weights of that run")
    parser.add_argument(
        "--here", action="store_true", help="train in this process, or in those of torchrun, without Ray"
    )
    parser.add_argument(
        "--show", action="store_true", help="print all settings as YAML, those of an extended recipe too"
    )
    parser.add_argument("--dry-run", action="store_true", help="check settings, data and storage, and print the plan")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    options = parser.parse_intermixed_args(args)
    names, overrides = split_words(options.words)
    if len(names) == 2 and not options.resume and Path(names[1]).is_dir():
        raise ConfigError(f"{names[1]}: the data of a run are a setting, data.url={names[1]}")
    if len(names) != (0 if options.resume else 1):
        recipe = f"one recipe: a file, or one of {', '.join(recipes.names())}"
        wanted = "no recipe: the run has its own" if options.resume else recipe
        raise ConfigError(f"got {' and '.join(names) or 'no recipe'}, expected {wanted}")

    if options.data and (options.resume or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        raise ConfigError("--data: expected a new run in one process; other processes take a dataset as data.url=...")

    from vitray.runs.images import with_images
    from vitray.runs.resolve import check_storage, plan_of, plan_text, resolve
    from vitray.runs.run_dir import stored_run
    from vitray.runs.train import train

    for option in ("name", "resume", "fork"):
        storage.check_name(getattr(options, option), f"--{option}")
    tracking_uri()  # a job without MLflow ends here, before it loads anything
    if options.resume:
        name, run = options.resume, stored_run(storage.join(options.out, options.resume), overrides)
    else:
        run = load_run(names[0], overrides)
        name = options.name or f"{Path(names[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if options.data:
        run = with_images(run, options.data, options.out, writes=not options.dry_run and not options.show)
    if options.show:
        print(run.to_yaml(), end="")
        return run.dotted()
    if options.dry_run:
        if options.here:
            from vitray.runs.local_start import Place
            from vitray.runs.train_here import check_settings

            check_settings(run, Place.told())
        resolved = resolve(run)
        check_storage(options.out)
        print(plan_text(resolved), file=sys.stderr)
        return plan_of(resolved)
    leads = not options.here or os.environ.get("RANK", "0") == "0"
    if leads:
        print(f"vitray: {name}: checking data, weights and storage", file=sys.stderr, flush=True)
    outcome = train(run, name, options.out, fork=options.fork, here=options.here)
    if options.data and outcome.model:
        print(next_block(outcome.model, run.data.url, options.data), file=sys.stderr)
    if not leads:
        raise SystemExit(0)  # one process prints the result
    return outcome._asdict()


def next_block(model: str, dataset: str | None, source: str) -> str:
    """Return what to do with a network of one's own images."""
    commands = [
        ["vitray", "evaluate", model, str(dataset)],
        ["vitray", "inspect", model, str(dataset)],
        ["vitray", "predict", model, source, f"predictions/{Path(source).stem}"],
    ]
    about = ("scores, calibration and mistakes", "what it looks at", "the class of each image, as Parquet")
    return "\n".join(f"  {shlex.join(words)}   # {text}" for words, text in zip(commands, about, strict=True)) + "\n"


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
