"""vitray weights show URL | flatten DELTA TARGET | repatch MODEL PATCH TARGET: inspect, complete or resize a model."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray weights",
        description="A model folder holds a whole network, or a delta: the tensors that differ from another network, "
        "its base, which is loaded with it. show loads both and prints the share of each; flatten writes a whole "
        "model folder, with LoRA merged; repatch writes the network with patches of another size (FlexiViT). An "
        "address is a path, s3://, models:/name@alias, models:/name/3, models:/m-<id> or runs:/<run id>/<path>.",
        epilog="example: vitray weights flatten models:/tuned@champion models/tuned_whole",
    )
    parser.add_argument("action", choices=["show", "flatten", "repatch"], help="print, complete or resize the network")
    parser.add_argument("url", help="a model folder; for show and repatch, a weights file of another library too")
    parser.add_argument("patch", nargs="?", help="repatch: the side of a patch in pixels")
    parser.add_argument("target", nargs="?", help="flatten, repatch: a new folder (a path or s3://)")
    parser.add_argument("--image-size", type=int, help="repatch: the side of the images; default: the network's own")
    json_help = "print the result as JSON: url, model, kind, base, base_identity, taken, kept, bytes, whole, share"
    parser.add_argument("--json", action="store_true", help=json_help)
    options = parser.parse_args(args)
    if options.action == "flatten":  # its second word is the folder
        options.patch, options.target = options.target, options.patch
    given = (options.patch or "").isdecimal() if options.action == "repatch" else options.patch is None
    if not given or (options.target is None) != (options.action == "show"):
        wanted = {"show": "one address", "flatten": "DELTA TARGET", "repatch": "MODEL PATCH TARGET, PATCH in pixels"}
        parser.error(f"{options.action}: wanted {wanted[options.action]}")
    if options.image_size is not None and (options.action != "repatch" or options.image_size < 1):
        parser.error(f"--image-size {options.image_size}: wanted a number of pixels, and action repatch")

    from vitray.cluster.storage_check import check_outlives_job
    from vitray.tracking.model_uri import resolve_uri
    from vitray.weights import flatten_model, open_weights, read_delta, read_own
    from vitray.weights.repatch import repatch_model

    if options.action != "show":
        check_outlives_job(options.target)
    if options.action == "flatten":
        flatten_model(options.url, options.target)
    if options.action == "repatch":
        repatch_model(options.url, int(options.patch), options.target, options.image_size)
    place = resolve_uri(url := options.target or options.url)
    delta, loaded = read_delta(place), open_weights(place)
    network, model = loaded.vit.state_dict(), loaded.run.model.name
    taken, base, identity = ((), None, None) if delta is None else (delta.taken, delta.base.url, delta.base.identity)
    kept = len(tensors := network if delta is None else read_own(place))  # of LoRA, the factors
    own, whole = (sum(tensor.nbytes for tensor in each.values()) for each in (tensors, network))
    kind = "whole" if identity is None else f"a delta of {base} ({identity[:12]})"
    print(f"{url}: {model}, {kind}: {kept} of {kept + len(taken)} tensors, {own:,} bytes, {own / whole:.1%}")
    facts = {"url": url, "model": model, "kind": "whole" if delta is None else "delta"}
    facts |= {"base": base, "base_identity": identity, "taken": len(taken), "kept": kept}
    return facts | {"bytes": own, "whole": whole, "share": own / whole}


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
