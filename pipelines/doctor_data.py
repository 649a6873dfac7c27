"""vitray doctor data RECIPE [a.b=c]: predict whether the images of a recipe keep up with its training."""

import argparse
from typing import Any

from pipelines import recipes
from vitray.config import load_run
from vitray.config.parsing import count_up_to, number_up_to
from vitray.errors import ConfigError


def main(words: list[str]) -> dict[str, Any]:
    """Measure the stages of a recipe on this machine, print the verdict and return it."""
    example = "example: vitray doctor data demo data.url=data/demo --seconds 20 --gpu-hour 2.5"
    parser = argparse.ArgumentParser(prog="vitray doctor data", description=__doc__, epilog=example)
    parser.add_argument("words", nargs="*", metavar="RECIPE setting=value", help="a YAML file or a built-in recipe")
    parser.add_argument("--seconds", type=number_up_to(3600), default=60.0, help="time to measure (%(default)s)")
    parser.add_argument("--cpus", type=count_up_to(10**6), help="CPUs of the run (those of this machine)")
    parser.add_argument("--gpu-hour", type=number_up_to(10**6), help="price of a GPU in an hour")
    parser.add_argument("--cpu-hour", type=number_up_to(10**6), help="price of a CPU in an hour")
    parser.add_argument("--json", action="store_true", help="the result as JSON: bottleneck, images_per_second, ...")
    options = parser.parse_intermixed_args(words)
    names = [word for word in options.words if "=" not in word]
    if len(names) != 1:
        raise ConfigError(f"got {' and '.join(names) or 'no recipe'}, wanted one recipe: a file or a built-in one")
    run = load_run(recipes.path_of(names[0]), [word for word in options.words if "=" in word])

    from vitray.bench.recipe_stages import measure_stages, plan_machines  # torch takes seconds
    from vitray.bench.verdict import Prices, ingest_verdict

    machines = plan_machines(run, options.cpus)
    seconds = measure_stages(run, machines, options.seconds)
    result = ingest_verdict(seconds, machines, Prices(options.gpu_hour, options.cpu_hour))
    for name, value in seconds._asdict().items():
        print(f"{name:<12}{1e6 * value:>12,.1f} us per image")
    print(f"\nbottleneck  {result['bottleneck']}: {result['images_per_second']:,.0f} images/s")
    print(f"data wait   {result['wait_share']:.0%} of the time")
    unit = "GPU" if machines.gpus else "worker"
    print(f"CPUs        {result['cpus_per_gpu']:.2f} for each {unit}; {machines.decoding_cpus:g} CPUs decode")
    cached = result["with_cache"]
    print(
        f"cache       data.cache=decoded: {cached['images_per_second']:,.0f} images/s, wait {cached['wait_share']:.0%}"
    )
    if (cost := result["cost_per_million_images"]) is not None:
        print(f"cost        {cost:,.2f} for a million images")
    return result
