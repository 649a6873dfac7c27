"""vitray sweep RECIPE SPACE [setting=value ...]: train every point of a search space, on Ray Tune or without Ray."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb
from vitray import verbs
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
    text = "train the trials in this process, without Ray; several such commands of one --name share them"
    parser.add_argument("--here", action="store_true", help=text)
    parser.add_argument("--dry-run", action="store_true", help="check every trial, and print the plan")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    options = parser.parse_intermixed_args(args)
    tracking_uri()  # a job without MLflow ends here, before it loads anything
    inputs = verbs.read_sweep(options.recipe, options.space, options.settings, options.add)
    name = verbs.sweep_name(options.space, options.name)

    from vitray.sweeps.plan import dry_run
    from vitray.sweeps.sweep import retry_failed, sweep

    if options.dry_run:
        if options.here:
            from vitray.sweeps.sweep_here import check_here  # it loads torch

            check_here(inputs.space, inputs.recipe.run)
        return dry_run(inputs.recipe.run, inputs.space, inputs.stages)
    if options.retry_failed:
        retry_failed(inputs.space, name, options.out)
    command = verbs.sweep_command(options.recipe, options.space, options.settings, options.add, name, options.out)
    if options.here:
        from vitray.sweeps.sweep_here import sweep_here

        outcome = sweep_here(inputs.recipe, inputs.space, name, options.out, f"{command} --here", inputs.stages)
        return {"name": name} if outcome is None else outcome._asdict()
    return sweep(inputs.recipe, inputs.space, name, options.out, command, inputs.stages)._asdict()


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
