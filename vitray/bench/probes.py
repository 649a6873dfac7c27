"""The cost of evaluate.probes: training steps alone, and beside probes that run without a pause.

A run probes at its evaluations only, so its cost is this one times the share of the time in which a probe runs.
"""

import time
from collections.abc import Callable
from typing import Any, get_args

import ray
import torch

from vitray.bench.rounds import circumstances, progress, ratio_of, rotated, spread_of, write_csv
from vitray.bench.train import TrainSettings, random_batch, recipe, training_step
from vitray.cluster import session
from vitray.config.training import Probe
from vitray.data.augment.batch import DeviceBatch
from vitray.data.shards import Dataset, read_request, write_dataset
from vitray.errors import ConfigError
from vitray.storage import scratch_folder
from vitray.training.context import WorkerContext
from vitray.training.driver_client import DriverClient
from vitray.training.learner import Learner
from vitray.training.prober import Prober

IMAGES = 512


def measure_probes(settings: TrainSettings) -> dict[str, Any]:
    """Measure every model, print and save the table, and return its rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with session.ray_session(), scratch_folder() as folder:
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if cpus < 2:
            raise ConfigError(
                f"--probes: got a machine with {cpus} CPU, wanted 2: one for the steps, one for the probes"
            )
        if device.type == "cpu":
            torch.set_num_threads(cpus - 1)
        size = f"image_size={settings.image_size}"
        dataset = write_dataset(read_request("demo", str(folder / "demo"), overrides=[f"images={2 * IMAGES}", size]))
        print(
            f"images/s of a training step, median ± half the interquartile range of {settings.rounds} rounds in turns"
        )
        print(f"{circumstances(device)}; {settings.dtype}, {settings.image_size} px, batches of {settings.batch};")
        print(f"{cpus} CPUs, one of them for the probes of {IMAGES} images, which run without a pause")
        print(f"\n{'model':<18}{'beside probes':>18}{'alone':>18}{'ratio':>18}{'probes done':>13}")
        rows = [_measure(settings, name, dataset, device) for name in settings.models]
    write_csv(settings.out / f"train_probes_{device.type}_{settings.dtype}.csv", rows)
    return {"rows": rows}


def _measure(settings: TrainSettings, name: str, dataset: Dataset, device: torch.device) -> dict[str, Any]:
    changes = {"model.num_classes": len(dataset.classes), "data.url": dataset.url, "evaluate.probe_images": IMAGES}
    run = recipe(settings, name).replace(changes | {"evaluate.probes": list(get_args(Probe))})
    images, labels, places = random_batch(run, device)
    learner, step = training_step(run, DeviceBatch(images, labels, places, places))
    context = WorkerContext(run, dataset, None, "", 1, None)
    prober = Prober(context, DriverClient(None, is_reporter=False), is_reporter=True)
    prober.start(0, learner, is_last=False)  # reads the images
    done = len(list(prober.finished(wait=True)))
    calls = max(1, int(settings.seconds / _seconds(step, 2, device)))
    speeds: dict[str, list[float]] = {"probed": [], "alone": []}
    for number in range(settings.rounds):
        progress(f"{name}: round {number + 1} of {settings.rounds}")
        for variant in rotated(list(speeds), number):
            seconds, probes = _round(step, calls, device, (prober, learner) if variant == "probed" else None)
            speeds[variant].append(calls * settings.batch / seconds)
            done += probes + len(list(prober.finished(wait=True)))
    probed, alone, ratio = spread_of(speeds["probed"]), spread_of(speeds["alone"]), ratio_of(*speeds.values())
    print(f"{name:<18}{probed!s:>18}{alone!s:>18}{ratio!s:>18}{done:>13}", flush=True)
    return {"model": name, **probed.columns("probed"), **alone.columns("alone"), **ratio.columns("ratio")}


def _round(
    step: Callable[[], object], calls: int, device: torch.device, beside: tuple[Prober, Learner] | None
) -> tuple[float, int]:
    """Return the seconds of some steps and the probes that have ended; `beside` starts one whenever none runs."""
    done, start = 0, time.perf_counter()
    for call in range(calls):
        if beside is not None:
            prober, learner = beside
            done += len(list(prober.finished()))
            if not prober.pending:
                prober.start(call, learner, is_last=False)
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, done


def _seconds(step: Callable[[], object], calls: int, device: torch.device) -> float:
    _round(step, 1, device, None)  # warm-up
    return _round(step, calls, device, None)[0] / calls
