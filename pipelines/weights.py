"""vitray weights show URL | flatten DELTA TARGET: inspect a model folder, or write a delta as a whole model."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray weights",
        description="A model folder holds a whole network, or a delta: the tensors that differ from another network, "
        "its base, which is loaded with it. show loads both and prints the share of each; flatten writes a whole "
        "model folder, with LoRA merged. An address is a path, s3://, models:/name@alias, models:/name/3, "
        "models:/m-<id> or runs:/<run id>/<path>.",
        epilog="example: vitray weights flatten models:/tuned@champion models/tuned_whole",
    )
    parser.add_argument("action", choices=["show", "flatten"])
    parser.add_argument("url", help="a model folder; for show, a weights file of another library too")
    parser.add_argument("target", nargs="?", help="flatten: a new folder (a path or s3://)")
    json_help = "print the result as JSON: url, model, kind, base, base_identity, taken, kept, bytes, whole, share"
    parser.add_argument("--json", action="store_true", help=json_help)
    options = parser.parse_args(args)
    if (options.action == "flatten") != (options.target is not None):
        parser.error(f"{options.action}: wanted {'DELTA TARGET' if options.action == 'flatten' else 'one address'}")

    # Imported late, because torch takes a second.
    from vitray.tracking.model_uri import resolve_uri
    from vitray.weights import flatten_model, open_weights, read_delta, read_own

    if options.action == "flatten":
        flatten_model(options.url, options.target)
    url = options.target or options.url
    place = resolve_uri(url)
    delta, loaded = read_delta(place), open_weights(place)
    network = loaded.vit.state_dict()
    taken, base, identity = ((), None, None) if delta is None else (delta.taken, delta.base.url, delta.base.identity)
    tensors = network if delta is None else read_own(place)  # of LoRA, the factors
    own, whole = (sum(tensor.nbytes for tensor in each.values()) for each in (tensors, network))
    kept = len(tensors)
    kind = "whole" if identity is None else f"a delta of {base} ({identity[:12]})"
    model = loaded.run.model.name
    print(f"{url}: {model}, {kind}: {kept} of {kept + len(taken)} tensors, {own:,} bytes, {own / whole:.1%}")
    facts = {"url": url, "model": model, "kind": "whole" if delta is None else "delta"}
    facts |= {"base": base, "base_identity": identity, "taken": len(taken), "kept": kept}
    return facts | {"bytes": own, "whole": whole, "share": own / whole}


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
