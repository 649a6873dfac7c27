"""vitray doctor data RECIPE [a.b=c]: measure whether the images of a recipe keep up with its training.

The stream alone, the step alone, and both, on the workers that training would have: on the cluster at RAY_ADDRESS, also
in a job of `vitray submit`; without one on this machine.
"""

import argparse
import os
from typing import Any

from vitray.cluster import session
from vitray.config import load_run, split_words
from vitray.config.parsing import count_up_to, number_up_to
from vitray.errors import ConfigError
from vitray.runs.resolve import resolve


def main(words: list[str]) -> dict[str, Any]:
    """Measure a recipe, print the verdict and return it."""
    example = "example: vitray doctor data demo data.url=data/demo --seconds 20 --gpu-hour 2.5"
    parser = argparse.ArgumentParser(prog="vitray doctor data", description=__doc__, epilog=example)
    parser.add_argument("words", nargs="*", metavar="RECIPE setting=value", help="a YAML file or a built-in recipe")
    text = "time of each of the three measurements (%(default)s)"
    parser.add_argument("--seconds", type=number_up_to(3600), default=30.0, help=text)
    text = "interleaved rounds that share this time (%(default)s)"
    parser.add_argument("--rounds", type=count_up_to(1000), default=3, help=text)
    parser.add_argument("--cpus", type=count_up_to(10**6), help="CPUs of the Ray started here (those of this machine)")
    parser.add_argument("--gpu-hour", type=number_up_to(10**6), help="price of a GPU in an hour")
    parser.add_argument("--cpu-hour", type=number_up_to(10**6), help="price of a CPU in an hour")
    parser.add_argument("--json", action="store_true", help="the result as JSON: bottleneck, images_per_second, ...")
    options = parser.parse_intermixed_args(words)
    names, overrides = split_words(options.words)
    if len(names) != 1:
        raise ConfigError(f"got {' and '.join(names) or 'no recipe'}, expected one recipe: a file or a built-in one")
    run = load_run(names[0], overrides)
    if run.compute.worker_range and len(set(run.compute.worker_range)) > 1:
        raise ConfigError(f"compute.workers: got {run.compute.workers}, expected one number")
    if options.cpus and "RAY_ADDRESS" in os.environ:
        raise ConfigError(f"--cpus: got {options.cpus} with RAY_ADDRESS, expected none: a cluster has its own CPUs")
    resolved = resolve(run)
    with session.ray_session(cpus=options.cpus):
        from vitray.bench.data_check import check_data, verdict_text  # torch takes seconds

        result = check_data(resolved, options.seconds, options.rounds, options.gpu_hour, options.cpu_hour)
    print(verdict_text(result))
    return result
