"""The ingest verdict as arithmetic: seconds per image of each stage in, bottleneck, speed and cost out."""

from typing import Any, NamedTuple


class StageSeconds(NamedTuple):
    """Seconds per image of each stage: the first three on one CPU, the others on one worker's device."""

    read: float
    decode: float
    augment: float
    transfer: float
    step: float
    """Of one worker beside the others, with the part of the augmentation that runs on its device."""
    step_slowdown: float = 1.0
    """Factor of the step's time while the CPUs decode."""
    cpu_slowdown: float = 1.0
    """Factor of a CPU's time while the workers take steps."""

    @property
    def cpu(self) -> float:
        """Seconds of one CPU per image."""
        return self.read + self.decode + self.augment


class Machines(NamedTuple):
    """What a run has: training workers, and the CPUs that decode."""

    workers: int
    decoding_cpus: float
    cpus: float
    """All CPUs, those of the workers among them."""
    gpus: float
    threads: int = 1
    """Compute threads of a worker on CPUs."""


class Prices(NamedTuple):
    """Prices of an hour, in any currency; None leaves the cost out."""

    gpu: float | None
    cpu: float | None


class Prediction(NamedTuple):
    """The speed of a run, and the stage that limits it."""

    bottleneck: str
    images_per_second: float
    wait_share: float


def predict(seconds: StageSeconds, machines: Machines) -> Prediction:
    """Return the speed of the slowest of three overlapping stages, and the time in which devices wait for the others.

    The named CPU stage is the longest of read, decode and augment, which follow each other on the same CPUs. Steps and
    decoding slow each other down while both run; the faster of them pauses for a part of the time.
    """
    parts = {"read": seconds.read, "decode": seconds.decode, "augment": seconds.augment}
    cpu_stage = max(parts, key=lambda name: parts[name])
    step, cpu = _rate(machines.workers, seconds.step), _rate(machines.decoding_cpus, seconds.cpu)
    slow_step, slow_cpu = step / seconds.step_slowdown, cpu / seconds.cpu_slowdown
    if slow_step <= slow_cpu:  # the CPUs decode for a part rate / slow_cpu of the time
        bottleneck, rate = "step", 1 / (1 / step + (1 - slow_step / step) / slow_cpu)
    else:  # devices compute for a part rate / slow_step of the time
        bottleneck, rate = cpu_stage, 1 / (1 / cpu + (1 - slow_cpu / cpu) / slow_step)
    transfer = _rate(machines.workers, seconds.transfer)
    if transfer < rate:
        bottleneck, rate = "transfer", transfer
    # Transfers may limit steps that run at their full speed for a part of the time.
    return Prediction(bottleneck, rate, 0.0 if bottleneck == "step" else max(0.0, 1 - rate / slow_step))


def cpus_per_gpu(seconds: StageSeconds, machines: Machines) -> float:
    """Return the CPUs that decode as fast as one GPU trains, or one worker on CPUs."""
    cpus_per_worker = seconds.cpu * seconds.cpu_slowdown / (seconds.step * seconds.step_slowdown)
    return cpus_per_worker * machines.workers / machines.gpus if machines.gpus else cpus_per_worker


def with_cache(seconds: StageSeconds) -> StageSeconds:
    """Return the stages of `data.cache=decoded` after its first pass: neither read nor decode."""
    return seconds._replace(read=0.0, decode=0.0)


def cost_per_million(images_per_second: float, machines: Machines, prices: Prices) -> float | None:
    """Return the price of a million images, of all GPUs and CPUs together; None without prices."""
    if prices.gpu is None and prices.cpu is None:
        return None
    hourly = machines.gpus * (prices.gpu or 0.0) + machines.cpus * (prices.cpu or 0.0)
    return hourly * 1e6 / images_per_second / 3600


def ingest_verdict(seconds: StageSeconds, machines: Machines, prices: Prices) -> dict[str, Any]:
    """Return the verdict as the JSON of `vitray doctor data`."""
    prediction, cached = predict(seconds, machines), predict(with_cache(seconds), machines)
    return {
        **prediction._asdict(),
        "cpus_per_gpu": cpus_per_gpu(seconds, machines),
        "seconds_per_image": seconds._asdict(),
        "with_cache": cached._asdict() | {"cpus_per_gpu": cpus_per_gpu(with_cache(seconds), machines)},
        "cost_per_million_images": cost_per_million(prediction.images_per_second, machines, prices),
        "machines": machines._asdict(),
    }


def verdict_text(result: dict[str, Any]) -> str:
    """Return a verdict as text."""
    stages, machines, cached = result["seconds_per_image"], result["machines"], result["with_cache"]
    lines = [f"{name:<12}{1e6 * value:>12,.1f} us per image" for name, value in list(stages.items())[:5]]
    for node in result.get("nodes", []):
        microseconds = 1e6 * (node["read"] + node["decode"] + node["augment"])
        lines.append(f"{node['node']}: {node['cpus']:g} CPUs, {microseconds:,.1f} us per image")
    lines += [
        f"\nbottleneck  {result['bottleneck']}: {result['images_per_second']:,.0f} images/s",
        f"data wait   {result['wait_share']:.0%} of the time",
        f"contention  steps take {stages['step_slowdown']:.2f} x as long while CPUs decode, decoding"
        f" {stages['cpu_slowdown']:.2f} x while workers take steps",
        f"CPUs        {result['cpus_per_gpu']:.2f} for each {'GPU' if machines['gpus'] else 'worker'};"
        f" {machines['decoding_cpus']:g} CPUs decode",
        f"cache       data.cache=decoded: {cached['images_per_second']:,.0f} images/s, wait {cached['wait_share']:.0%}",
    ]
    if (cost := result["cost_per_million_images"]) is not None:
        lines.append(f"cost        {cost:,.2f} for a million images")
    return "\n".join(lines)


def _rate(units: float, seconds: float) -> float:
    return units / seconds if seconds else float("inf")
