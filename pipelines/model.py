"""vitray model NAME|WEIGHTS [setting=value ...]: the cost and shape of a network, and its weights in other layouts."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from pipelines.__main__ import run_verb
from vitray.config import Run, load_run
from vitray.config.parsing import parse_overrides


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray model",
        description="Parameters, GFLOPs (as the papers count them) and training memory from shapes, or "
        "of a model folder, or a weights file of timm, torchvision, Hugging Face, DeiT (.pth) or Google.",
        epilog="examples: vitray model ViT-B18x2/16 image_size=384 layerscale=1e-4 --json; vitray model "
        "deit_b.pth heads=12 --save models/deit_b",
    )
    parser.add_argument("name", help="vit_<width><depth>x<branches>_<patch>[_<stem>], the papers' spelling, or weights")
    settings_help = "any `model.` setting of a recipe; of weights also normalize, their `data.` setting"
    parser.add_argument("settings", nargs="*", metavar="setting=value", help=settings_help)
    parser.add_argument("--save", metavar="FOLDER", help="write the weights as a model folder (a path or s3://)")
    json_help = "print the result as JSON: params, gflops, activation_bytes"
    parser.add_argument("--json", action="store_true", help=json_help)
    options = parser.parse_args(args)
    remote = options.name.startswith(("s3://", "models:/", "runs:/"))
    is_weights = remote or Path(options.name).suffix != "" or os.path.isdir(options.name)
    if options.save and not is_weights:
        parser.error(f"--save writes weights, and {options.name} is a name; expected a file or folder of weights")
    overrides = [f"model.{override}" for override in (f"name={options.name}", *options.settings)]
    run = Run() if is_weights else load_run(None, overrides)

    # Imported late, because torch takes a second.
    from vitray.cluster.storage_check import check_outlives_job
    from vitray.models.counts import count, diagram
    from vitray.weights import open_weights, save_model

    if options.save:
        check_outlives_job(options.save)
    if is_weights:
        run, vit, classes = open_weights(options.name, parse_overrides(options.settings))
        if options.save:
            save_model(options.save, run, vit, classes)
            print(f"wrote the model folder {options.save}", file=sys.stderr)
    counts = count(run.model)
    print(diagram(run.model, counts))
    return {"name": run.model.name, **counts._asdict()}


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
