"""vitray weights show URL | flatten DELTA TARGET: what a model folder holds, and a delta as a whole model."""

import argparse
import sys
from typing import Any

from pipelines.__main__ import run_verb


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray weights",
        description="A model folder holds a network whole, or as a delta: the tensors in which it differs from another "
        "network, its base, which is read with it. show reads all of it and says what is where; flatten writes a whole "
        "model folder. An address is a path, s3://, models:/name@alias, models:/name/3, models:/m-<id> or "
        "runs:/<run id>/<path>.",
        epilog="example: vitray weights flatten models:/tuned@champion models/tuned_whole",
    )
    parser.add_argument("action", choices=["show", "flatten"])
    parser.add_argument("url", help="a model folder; for show, a weights file of another library too")
    parser.add_argument("target", nargs="?", help="flatten: a new folder (a path or s3://)")
    as_json = "print the result as JSON: url, model, kind, base, base_identity, taken, kept, bytes, whole, share"
    parser.add_argument("--json", action="store_true", help=as_json)
    args = parser.parse_args(words)
    if (args.action == "flatten") != (args.target is not None):
        parser.error(f"{args.action}: wanted {'DELTA TARGET' if args.action == 'flatten' else 'one address'}")

    # Only after the words were found good: torch takes a second to load.
    from vitray.weights import flatten_model

    if args.action == "flatten":
        flatten_model(args.url, args.target)
    shown = show(args.target or args.url)
    base = f"a delta of {shown['base']} ({shown['base_identity'][:12]})" if shown["base"] else "whole"
    tensors = f"{shown['kept']} of {shown['kept'] + shown['taken']} tensors"
    print(f"{shown['url']}: {shown['model']}, {base}: {tensors}, {shown['bytes']:,} bytes, {shown['share']:.1%}")
    return shown


def show(url: str) -> dict[str, Any]:
    """What is at an address, as plain values."""
    from vitray.tracking.mlflow_client import resolve_uri
    from vitray.weights import open_weights, read_delta

    delta, loaded = read_delta(place := resolve_uri(url)), open_weights(place)
    sizes = {name: tensor.nbytes for name, tensor in loaded.vit.state_dict().items()}
    taken = () if delta is None else delta.taken
    kept, whole = sum(size for name, size in sizes.items() if name not in taken), sum(sizes.values())
    said = {"url": url, "model": loaded.run.model.name, "kind": "whole" if delta is None else "delta"}
    base = (None, None) if delta is None else (delta.base.url, delta.base.identity)
    said |= {"base": base[0], "base_identity": base[1], "taken": len(taken), "kept": len(sizes) - len(taken)}
    return said | {"bytes": kept, "whole": whole, "share": kept / whole}


if __name__ == "__main__":
    sys.exit(run_verb(main, sys.argv[1:]))
