"""The ingest verdict as arithmetic: seconds per image of each stage in, bottleneck, speed and cost out."""

from typing import Any, NamedTuple


class StageSeconds(NamedTuple):
    """Seconds per image of each stage: the first three on one CPU, the others on one worker's device."""

    read: float
    decode: float
    augment: float
    transfer: float
    step: float
    """Of one worker, with the part of the augmentation that runs on its device."""

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

    The named CPU stage is the longest of read, decode and augment, which follow each other on the same CPUs.
    """
    parts = {"read": seconds.read, "decode": seconds.decode, "augment": seconds.augment}
    rates = {
        "step": _rate(machines.workers, seconds.step),
        "transfer": _rate(machines.workers, seconds.transfer),
        max(parts, key=lambda name: parts[name]): _rate(machines.decoding_cpus, seconds.cpu),
    }
    bottleneck = min(rates, key=lambda name: rates[name])
    rate = rates[bottleneck]
    return Prediction(bottleneck, rate, 1 - rate / rates["step"])


def cpus_per_worker(seconds: StageSeconds) -> float:
    """Return the CPUs that decode as fast as one worker trains."""
    return seconds.cpu / seconds.step


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
        "cpus_per_gpu": cpus_per_worker(seconds),
        "seconds_per_image": seconds._asdict(),
        "with_cache": cached._asdict() | {"cpus_per_gpu": cpus_per_worker(with_cache(seconds))},
        "cost_per_million_images": cost_per_million(prediction.images_per_second, machines, prices),
        "machines": machines._asdict(),
    }


def _rate(units: float, seconds: float) -> float:
    return units / seconds if seconds else float("inf")
