"""vitray sweep RECIPE SPACE [setting=value ...]: train every point of a search space, on Ray Tune."""

import argparse
import shlex
import time
from pathlib import Path
from typing import Any

import tune_spaces
from pipelines.__main__ import run_verb
from vitray.config import load_run
from vitray.sweeps.space import check_overrides, extend_space, read_space, split_overrides
from vitray.system import storage
from vitray.system.mlflow_client import tracking_uri

EXAMPLES = (
    "The same command with the same --name resumes an interrupted sweep. examples: vitray sweep demo "
    "demo_depth_x_branches data.url=data/demo --name depth; vitray sweep demo demo_lr --name rates --dry-run --json"
)


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="vitray sweep", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file or a built-in recipe")
    parser.add_argument("space", metavar="SPACE", help="a YAML file, or one of tune_spaces/")
    parser.add_argument("settings", nargs="*", metavar="setting=value", help="override; stage.setting=value of a stage")
    parser.add_argument("--name", help="of the sweep; the same name resumes one (default: space and time)")
    parser.add_argument("--retry-failed", action="store_true", help="start the failed trials of sweep NAME again")
    parser.add_argument("--out", default="sweeps", help="folder of all sweeps, or s3:// (default: %(default)s)")
    parser.add_argument("--add", action="append", default=[], metavar="setting=value", help="one more value of a grid")
    parser.add_argument("--dry-run", action="store_true", help="check every trial, and print the plan")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    options = parser.parse_intermixed_args(args)
    tracking_uri()  # a job without MLflow ends here, before it loads anything
    space = extend_space(read_space(tune_spaces.path_of(options.space)), options.add)
    overrides, stages = split_overrides(space, options.settings)
    check_overrides(space, overrides)
    base = load_run(options.recipe, overrides)
    default = f"{Path(options.space).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    storage.check_name(name := default if options.name is None else options.name, "--name")

    from vitray.sweeps.plan import Recipe, dry_run
    from vitray.sweeps.sweep import retry_failed, sweep

    stage_recipes = {stage: Recipe(load_run(recipe, own), [recipe, *own]) for stage, (recipe, *own) in stages.items()}
    if options.dry_run:
        return dry_run(base, space, stage_recipes)
    if options.retry_failed:
        retry_failed(space, name, options.out)
    flags = ["--name", name, "--out", options.out, *(part for value in options.add for part in ("--add", value))]
    command = shlex.join(["vitray", "sweep", options.recipe, options.space, *options.settings, *flags])
    return sweep(Recipe(base, [options.recipe, *overrides]), space, name, options.out, command, stage_recipes)._asdict()


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
