"""vitray sweep RECIPE SPACE [setting=value ...]: many trainings that differ in what the space says, on Ray Tune."""

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import tune_spaces
from pipelines import recipes
from pipelines.__main__ import run_verb
from vitray.config import load_run
from vitray.sweep.space import check_words, extended, read_space, words_apart

EXAMPLES = (
    "examples: vitray sweep demo demo_depth_x_branches data.url=data/demo --name depth; vitray sweep demo demo_lr "
    "--dry-run --json; the same command again goes on with a sweep that was interrupted"
)


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="vitray sweep", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or one that vitray brings")
    parser.add_argument("space", metavar="SPACE", help="a YAML file, or one of tune_spaces/")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="setting=value",
        help="laid over the recipe, for all trials; stage.setting=value for what the space trains before them",
    )
    parser.add_argument("--name", help="of the sweep; one of this name that was interrupted goes on (space and time)")
    parser.add_argument("--out", default="sweeps", help="folder of all sweeps, or s3:// (%(default)s)")
    parser.add_argument("--add", action="append", default=[], metavar="setting=value", help="one more value of a grid")
    parser.add_argument("--dry-run", action="store_true", help="check every trial, say the plan, and stop")
    parser.add_argument("--json", action="store_true", help="the result as JSON on the last line")
    args = parser.parse_intermixed_args(words)
    space = extended(read_space(tune_spaces.path_of(args.space)), args.add)
    words, apart = words_apart(space, args.settings)
    check_words(space, words)
    base = load_run(recipes.path_of(args.recipe), words)
    name = args.name or f"{Path(args.space).stem}-{time.strftime('%Y%m%d-%H%M%S')}"

    from vitray.sweep.driver import Recipe, dry_run, sweep

    before = {stage: Recipe(load_run(recipes.path_of(said[0]), said[1:]), said) for stage, said in apart.items()}
    if args.dry_run:
        return dry_run(base, space, before)
    flags = ["--name", name, "--out", args.out, *(word for value in args.add for word in ("--add", value))]
    command = shlex.join(["vitray", "sweep", args.recipe, args.space, *args.settings, *flags])
    return sweep(Recipe(base, [args.recipe, *words]), space, name, args.out, command, before)._asdict()


if __name__ == "__main__":
    sys.exit(run_verb(main, sys.argv[1:]))
