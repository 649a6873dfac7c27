"""vitray doctor [URL]: check every node of a cluster before a long run."""

import argparse
from typing import Any

from pipelines import doctor_data
from pipelines.__main__ import run_verb
from vitray.cluster import session
from vitray.errors import RunError
from vitray.system import storage


def main(words: list[str]) -> dict[str, Any]:
    if words[:1] == ["data"]:
        return doctor_data.main(words[1:])
    parser = argparse.ArgumentParser(
        prog="vitray doctor",
        description="Checks every node of the cluster at RAY_ADDRESS (or this machine): versions, GPUs, disk, object"
        " store, clock, access to the results and to MLflow; and runs an all-reduce between the nodes.",
        epilog="examples: vitray doctor; vitray submit --follow doctor s3://bucket/runs;"
        " vitray doctor data demo data.url=data/demo",
    )
    parser.add_argument(
        "url", nargs="?", default="runs", metavar="URL", help="the destination of results (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON: nodes, faults")
    args = parser.parse_args(words)
    results_url = storage.absolute(args.url)
    with session.ray_session():
        from vitray.cluster.doctor import check_cluster  # torch and MLflow take seconds

        nodes, findings = check_cluster(results_url)
    print(f"{'node':<24} {'address':<16} {'CPUs':>5} {'GPUs':>5} {'store':>8} {'disk':>5} {'clock':>8}  ray, torch")
    for node in nodes:
        print(
            f"{node.name:<24} {node.address:<16} {node.cpus:>5g} {node.gpus:>5g} {node.store / 1e9:>5.1f} GB"
            f" {node.disk:>5.0%} {node.clock:>+6.1f} s  {node.versions['ray']}, {node.versions['torch']}"
        )
    for finding in findings:
        print(f"\n{finding.node}: {finding.problem}\n  remedy: {finding.remedy}")
    if findings:
        raise RunError(f"{len(findings)} problems on {len(nodes)} nodes")
    print("\nno problems found")
    return {"nodes": [node._asdict() for node in nodes], "faults": []}


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
