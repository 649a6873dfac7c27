"""`vitray predict` and its alternatives in interleaved rounds: images per second, and the time to the first batch.

The bound is the lower of two speeds: that of decoding alone on the CPUs that the actors leave, and that of the network
alone on the actors.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch

from vitray.bench.charts import draw_bars, write_results
from vitray.bench.predict_pipelines import (
    Job,
    decode_alone,
    loader,
    make_plan,
    network_alone,
    ours,
    stock,
    write_images,
)
from vitray.bench.rounds import circumstances, progress, ratio_of, rotated, spread_of, write_record
from vitray.config import load_run
from vitray.errors import ConfigError
from vitray.inference.pipeline import pool_bounds
from vitray.models.vit import ViT
from vitray.system.scratch import temporary_folder
from vitray.weights import save_model

OURS = "vitray predict"
CLASSES = 1000


class PredictSettings(NamedTuple):
    """Settings of `vitray bench predict`."""

    url: str
    model: str = "vit_ti12x1_16"
    image_size: int = 224
    batch: int = 64
    images: int = 512
    workers: int | None = None
    """CPUs of the Ray started here; None is all."""
    rounds: int = 5
    out: Path = Path("bench_out")


class Timing(NamedTuple):
    """One pipeline in one round."""

    first: float
    """Seconds until the first batch; 0 for a half alone."""
    speed: float
    """Images per second, the start included."""


def measure_predict(settings: PredictSettings) -> dict[str, Any]:
    """Measure every pipeline in turns, print and save the table, and return its rows."""
    # Ray's workers run at nice 15 by default; here they get the same priority as the others.
    options: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.WARNING}
    options |= {"num_cpus": settings.workers, "_system_config": {"worker_niceness": 0}}
    with temporary_folder() as folder, nullcontext() if ray.is_initialized() else ray.init("local", **options):
        job = _open_job(settings, folder)
        return _report(settings, job, _measure(settings, job, folder))


def _open_job(settings: PredictSettings, folder: Path) -> Job:
    """Write the network and the images, and return the prediction."""
    size = f"model.image_size={settings.image_size}"
    run = load_run(None, [f"model.name={settings.model}", size, f"model.num_classes={CLASSES}"])
    torch.manual_seed(0)
    save_model(str(folder / "model"), run, ViT(run.model))
    files = write_images(settings.url, settings.images, settings.batch, folder / "images")
    if len(files) < 2:
        raise ConfigError(f"--batch {settings.batch}: expected at least two batches of the images of {settings.url}")
    device = "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"
    plan = make_plan(str(folder / "model"), str(folder / "images"), settings.batch, folder / "out", device)
    cpus, actors = int(ray.cluster_resources()["CPU"]), pool_bounds(None, device).most
    return Job(plan, files, actors, cpus if device == "cuda" else cpus - actors)


def _measure(settings: PredictSettings, job: Job, folder: Path) -> dict[str, list[Timing]]:
    def piped(pipeline: Callable[[Job, Path], Iterator[int]]) -> Timing:
        try:
            return _timed(pipeline(job, folder / "out"), len(job.plan.images))
        finally:
            shutil.rmtree(folder / "out", ignore_errors=True)

    def alone(rate: float) -> Timing:
        return Timing(0, rate)

    variants: dict[str, Callable[[], Timing]] = {
        "decode alone": lambda: alone(decode_alone(job)),
        "network alone": lambda: alone(network_alone(job)),
        OURS: partial(piped, ours),
        "Ray Data, Pillow": partial(piped, stock),
        "DataLoader, Pillow": partial(piped, loader),
    }
    timings: dict[str, list[Timing]] = {name: [] for name in variants}
    for number in range(settings.rounds + 1):
        for name in rotated(list(variants), number):
            timing = variants[name]()
            if number:  # the first round warms the page cache and the worker processes
                timings[name].append(timing)
        progress(f"round {number} of {settings.rounds}")
    return timings


def _timed(batches: Iterator[int], images: int) -> Timing:
    start = time.perf_counter()
    count = next(batches)
    first = time.perf_counter() - start
    count += sum(batches)
    end = time.perf_counter() - start
    assert count == images, f"got {count} images, expected {images}"
    return Timing(first, images / end)


def _report(settings: PredictSettings, job: Job, timings: dict[str, list[Timing]]) -> dict[str, Any]:
    where = circumstances(torch.device(job.plan.device))
    about = f"{len(job.plan.images)} images, {settings.model}, {settings.image_size} px, batches of {settings.batch}"
    about += f"; {job.actors} actors on {job.plan.device}, {job.decoders} CPUs to decode"
    print(f"{where}\n{about}; {settings.rounds} interleaved rounds, median ± half the interquartile range\n")
    limits = zip(timings["decode alone"], timings["network alone"], strict=True)
    bound = [min(decode.speed, network.speed) for decode, network in limits]
    print(f"{'pipeline':<22}{'images/s':>18}{'over the bound':>18}{'first batch s':>18}")
    rows: list[dict[str, Any]] = []
    for name, rounds in timings.items():
        first, speed = (spread_of(values) for values in zip(*rounds, strict=True))
        share = ratio_of([timing.speed for timing in rounds], bound)
        print(f"{name:<22}{speed!s:>18}{share!s:>18}{first!s:>18}")
        row: dict[str, Any] = {"pipeline": name} | speed.columns("images_per_second", 4)
        row |= share.columns("share_of_bound", 4)
        rows.append(row | first.columns("first_batch", 4))
    chart = draw_bars({row["pipeline"]: row["images_per_second"] for row in rows}, "images/s", f"{where}\n{about}")
    result = {"circumstances": where, "about": about} | write_results(settings.out, "predict", rows, chart)
    return write_record(settings.out / "predict.json", torch.device(job.plan.device), result)
