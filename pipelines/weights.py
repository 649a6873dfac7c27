"""vitray weights show|flatten|repatch|checkpoint ...: inspect, complete or resize a model, or take one from a run."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb
from vitray.weights.zoo import check_there

ARGUMENTS = {"show": "one address", "flatten": "DELTA TARGET", "repatch": "MODEL PATCH TARGET, PATCH in pixels"}
ARGUMENTS |= {"checkpoint": "RUN TARGET, or RUN/checkpoints/step-00001200 TARGET"}


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray weights",
        description="A model folder holds a whole network, or a delta: the tensors that differ from another network, "
        "its base, which is loaded with it. show loads both and prints the share of each; flatten writes a whole "
        "model folder, with LoRA merged; repatch writes the network with patches of another size (FlexiViT); checkpoint"
        " writes that of a run's best evaluation, or of one checkpoint. An address is a path, s3://, "
        "models:/name@alias, models:/name/3, models:/m-<id> or runs:/<run id>/<path>.",
        epilog="example: vitray weights flatten models:/tuned@champion models/tuned_whole",
    )
    action_help = "print, complete or resize a network, or take it from a run"
    parser.add_argument("action", choices=[*ARGUMENTS], help=action_help)
    url_help = "a model folder; show, repatch: or another library's file; checkpoint: a run folder"
    parser.add_argument("url", help=url_help)
    parser.add_argument("patch", nargs="?", help="repatch: the side of a patch in pixels")
    parser.add_argument("target", nargs="?", help="all but show: a new folder (a path or s3://)")
    parser.add_argument("--image-size", type=int, help="repatch: the side of the images; default: the network's own")
    json_help = (
        "print the result as JSON: url, model, kind, types, base, base_identity, taken, kept, bytes, whole, share"
    )
    parser.add_argument("--json", action="store_true", help=json_help)
    options = parser.parse_args(args)
    if options.action in ("flatten", "checkpoint"):  # their second argument is the target
        options.patch, options.target = options.target, options.patch
    given = (options.patch or "").isdecimal() if options.action == "repatch" else options.patch is None
    if not given or (options.target is None) != (options.action == "show"):
        parser.error(f"{options.action}: expected {ARGUMENTS[options.action]}")
    if options.image_size is not None and (options.action != "repatch" or options.image_size < 1):
        parser.error(f"--image-size {options.image_size}: expected a number of pixels, and action repatch")

    check_there(options.url)
    from vitray.cluster.storage_check import check_outlives_job
    from vitray.runs.model_output import save_checkpoint
    from vitray.weights import describe_weights, flatten_model, repatch_model

    if options.action != "show":
        check_outlives_job(options.target)
    if options.action == "flatten":
        flatten_model(options.url, options.target)
    if options.action == "repatch":
        repatch_model(options.url, int(options.patch), options.target, options.image_size)
    if options.action == "checkpoint":
        save_checkpoint(options.url, options.target)
    text, facts = describe_weights(options.target or options.url)
    print(text)
    return facts


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
