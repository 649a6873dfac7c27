"""vitray doctor data RECIPE [a.b=c]: predict whether the images of a recipe keep up with its training.

It measures the nodes of the cluster at RAY_ADDRESS, also in a job of `vitray submit`; without one this machine.
"""

import argparse
import os
from typing import Any

from pipelines import recipes
from vitray.cluster import session
from vitray.config import load_run, split_words
from vitray.config.parsing import count_up_to, number_up_to
from vitray.errors import ConfigError


def main(words: list[str]) -> dict[str, Any]:
    """Measure the stages of a recipe, print the verdict and return it."""
    example = "example: vitray doctor data demo data.url=data/demo --seconds 20 --gpu-hour 2.5"
    parser = argparse.ArgumentParser(prog="vitray doctor data", description=__doc__, epilog=example)
    parser.add_argument("words", nargs="*", metavar="RECIPE setting=value", help="a YAML file or a built-in recipe")
    parser.add_argument("--seconds", type=number_up_to(3600), default=60.0, help="time to measure (%(default)s)")
    parser.add_argument("--cpus", type=count_up_to(10**6), help="CPUs of the run (those of this machine)")
    parser.add_argument("--gpu-hour", type=number_up_to(10**6), help="price of a GPU in an hour")
    parser.add_argument("--cpu-hour", type=number_up_to(10**6), help="price of a CPU in an hour")
    parser.add_argument("--json", action="store_true", help="the result as JSON: bottleneck, images_per_second, ...")
    options = parser.parse_intermixed_args(words)
    names, overrides = split_words(options.words)
    if len(names) != 1:
        raise ConfigError(f"got {' and '.join(names) or 'no recipe'}, expected one recipe: a file or a built-in one")
    run = load_run(recipes.path_of(names[0]), overrides)
    if options.cpus and "RAY_ADDRESS" in os.environ:
        raise ConfigError(f"--cpus: got {options.cpus} with RAY_ADDRESS, expected none: a cluster has its own CPUs")

    from vitray.bench.recipe_stages import check_measurable, measure_stages, plan_machines  # torch takes seconds
    from vitray.bench.verdict import Prices, ingest_verdict, verdict_text

    check_measurable(run)
    nodes = []
    if "RAY_ADDRESS" in os.environ:
        with session.ray_session():
            from vitray.bench.cluster_stages import measure_cluster
            from vitray.runs.placement import place_workers

            machines, seconds, nodes = measure_cluster(run, place_workers(run), options.seconds)
    else:
        machines = plan_machines(run, options.cpus)
        seconds = measure_stages(run, machines, options.seconds)
    result = ingest_verdict(seconds, machines, Prices(options.gpu_hour, options.cpu_hour))
    result["nodes"] = [node._asdict() for node in nodes]
    print(verdict_text(result))
    return result
