"""vitray model NAME [setting=value ...]: what a network costs, and its picture."""

import argparse
import sys
from typing import Any

from pipelines.__main__ import run_verb
from vitray.config import load_run


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray model",
        description="Parameters, GFLOPs (as the papers count them) and training memory of a network, from its shapes.",
        epilog="example: vitray model ViT-B18x2/16 image_size=384 layerscale=1e-4 --json",
    )
    parser.add_argument("name", help="vit_<width><depth>x<branches>_<patch>[_<stem>], or the papers' spelling")
    parser.add_argument("settings", nargs="*", metavar="setting=value", help="any `model.` setting of a recipe")
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON: params, gflops, activation_bytes"
    )
    args = parser.parse_args(words)
    model = load_run(None, [f"model.{word}" for word in (f"name={args.name}", *args.settings)]).model

    from vitray.model.counts import (
        count,
        picture,
    )  # after the words were found good: torch takes a second to load

    counts = count(model)
    print(picture(model, counts))
    return {"name": model.name, **counts._asdict()}


if __name__ == "__main__":
    sys.exit(run_verb(main, sys.argv[1:]))
