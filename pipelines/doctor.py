"""vitray doctor [PLACE]: look at a cluster before a long run, and say what would end it later."""

import argparse
import sys
from typing import Any

from pipelines.__main__ import run_verb
from vitray import storage
from vitray.cluster import session
from vitray.errors import RunError


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray doctor",
        description="Asks every node of the cluster at RAY_ADDRESS (or this machine) what it has and reaches: versions,"
        " GPUs, disk, object store, clock, the place for results, MLflow; and lets the nodes meet as training does.",
        epilog="examples: vitray doctor; vitray submit --follow doctor s3://bucket/runs",
    )
    parser.add_argument(
        "place", nargs="?", default="runs", metavar="PLACE", help="where results will lie (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON: nodes, faults (node, what, wanted)")
    args = parser.parse_args(words)
    place = storage.absolute(args.place)
    with session.running():
        from vitray.cluster.doctor import examine  # torch and MLflow take seconds

        health = examine(place)
    print(f"{'node':<24} {'address':<16} {'CPUs':>5} {'GPUs':>5} {'store':>8} {'disk':>5} {'clock':>8}  ray, torch")
    for node in health.nodes:
        print(
            f"{node.name:<24} {node.address:<16} {node.cpus:>5g} {node.gpus:>5g} {node.store / 1e9:>5.1f} GB"
            f" {node.disk:>5.0%} {node.clock:>+6.1f} s  {node.versions['ray']}, {node.versions['torch']}"
        )
    for fault in health.faults:
        print(f"\n{fault.node}: {fault.what}\n  wanted: {fault.wanted}")
    if health.faults:
        raise RunError(f"{len(health.faults)} faults on {len(health.nodes)} nodes")
    print("\nnothing is wrong")
    return {"nodes": [node._asdict() for node in health.nodes], "faults": []}


if __name__ == "__main__":
    sys.exit(run_verb(main, sys.argv[1:]))
