"""vitray demo [setting=value ...]: draw a dataset, train a small network on it and register it, in this folder."""

import argparse
from typing import Any

from pipelines import shard, train
from pipelines.__main__ import run_verb
from vitray.data.shards.manifest import MANIFEST
from vitray.system import storage

DATA, IMAGES, REGISTER = "data/demo", 6000, "tracking.register_as=demo"


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray demo",
        description=f"Draws {IMAGES:,} images as the dataset {DATA}, unless it exists, trains the recipe demo with"
        " two workers on it for some minutes, and registers the network as the model demo. Works in any"
        " folder, on any machine.",
        epilog='example: vitray demo --images 600 model.image_size=32 "optim.duration=2 epochs"',
    )
    parser.add_argument(
        "settings", nargs="*", metavar="setting=value", help="overrides of the recipe, as optim.lr=1e-3"
    )
    parser.add_argument("--images", type=int, metavar="N", help=f"images of a new dataset (default: {IMAGES})")
    parser.add_argument("--name", help="of the run (default: demo and the time)")
    parser.add_argument("--json", action="store_true", help="print the result of the training as JSON")
    options = parser.parse_intermixed_args(args)
    if options.images is not None or not storage.exists(storage.join(DATA, MANIFEST)):
        shard.main(["demo", DATA, f"images={options.images or IMAGES}", "image_size=64", "workers=2"])
    name = ["--name", options.name] if options.name else []
    register = [] if any(each.startswith("tracking.register_as=") for each in options.settings) else [REGISTER]
    result = train.main(["demo", f"data.url={DATA}", *register, *options.settings, *name])
    print(
        "try next:\n"
        "  vitray ui                                            the run in MLflow: curves, pictures, the network\n"
        f"  vitray evaluate {result['model']} {DATA}\n"
        "                                                       its mistakes, with intervals, as a page\n"
        '  vitray sweep demo demo_lr model.image_size=32 "optim.duration=2 epochs"\n'
        "                                                       eight learning rates and their report"
    )
    return result


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
