"""The stages of a recipe in seconds per image, measured on this machine one after another, without Ray."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from statistics import median

import numpy as np
import torch

from vitray.bench.loaders import blocks_of
from vitray.bench.train import random_batch, training_step
from vitray.bench.verdict import Machines, StageSeconds
from vitray.config import Run
from vitray.data.augment.batch_policy import apply_draws
from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.augment.draws import read_draws
from vitray.data.augment.image import augment_image, crop_and_draw
from vitray.data.augment.keyed_random import generator
from vitray.data.shards import open_dataset
from vitray.data.stream import Stream, StreamSpec
from vitray.data.stream.decoding import read_rows
from vitray.errors import ConfigError

# Images of the measured reads; more would hold too many in memory.
SAMPLE = 256


def plan_machines(run: Run, cpus: int | None) -> Machines:
    """Return the workers and CPUs of a run on this machine, or with that many CPUs."""
    gpus = 0 if run.compute.device == "cpu" else torch.cuda.device_count()
    if run.compute.device == "gpu" and not gpus:
        raise ConfigError("compute.device: got gpu, wanted cpu or auto: this machine has no GPU")
    fewest, workers = run.compute.worker_range or (max(1, gpus),) * 2
    if fewest != workers:
        raise ConfigError(f"compute.workers: got {run.compute.workers}, wanted one number")
    if gpus and workers * run.compute.gpus > gpus:
        raise ConfigError(f"compute.workers: got {workers}, wanted at most the {gpus} GPUs of this machine")
    all_cpus = cpus or len(os.sched_getaffinity(0))
    # As placement does: a GPU worker holds one CPU, and CPU workers share all but one.
    fair = 1.0 if gpus else (all_cpus - 1) / workers
    each = run.compute.cpus or (fair if fair < 1 else float(int(fair)))
    if not each or workers * each >= all_cpus:
        held = f"{workers} workers and the decoding of images do not fit into {all_cpus} CPUs"
        raise ConfigError(f"compute.workers: {held}, wanted fewer workers, or more --cpus")
    return Machines(workers, all_cpus - workers * each, all_cpus, workers * run.compute.gpus if gpus else 0)


def measure_stages(run: Run, machines: Machines, seconds: float) -> StageSeconds:
    """Return the seconds per image of each stage; `seconds` is the time of all measurements together."""
    if run.task.kind != "supervised" or run.distill:
        raise ConfigError(f"task.kind: got {run.task.kind}, wanted supervised without distillation")
    if run.data.url is None:
        raise ConfigError("data.url: got none, wanted a dataset written by vitray shard")
    device = torch.device("cuda" if machines.gpus else "cpu")
    dataset = open_dataset(run.data.url)
    local = run.optim.batch // machines.workers
    augment = run.data.augment.resolved(device.type == "cuda")
    spec = StreamSpec(run.data.train, local, run.model.image_shape, augment, run.seed, run.data.copies)
    stream = Stream(dataset, spec)
    if not local or not stream.steps:
        batch = f"got {run.optim.batch} for {machines.workers} workers"
        raise ConfigError(f"optim.batch: {batch}, wanted at most the {stream.images} images of {run.data.train}")
    classes = run.model.num_classes or len(dataset.classes)
    run = run.replace({"optim.batch": local, "model.num_classes": classes})
    share = seconds / 5
    threads = torch.get_num_threads()
    # ---- on a CPU of a task, which has one thread
    torch.set_num_threads(1)
    rows = np.arange(min(int(stream.rows.starts[-1]), SAMPLE))  # whole row groups, as tasks read them
    stored = read_rows(rows, stream.rows)
    read = _per_image(lambda: read_rows(rows, stream.rows), len(rows), share)
    images = _decodable([content for content, _, _ in stored.values()])
    if not images:
        raise ConfigError(f"{dataset.url}: none of the first {len(rows)} images can be decoded")
    decode = _per_image(lambda: _decodable([content for content, _, _ in stored.values()]), len(rows), share)
    view = crop_and_draw if stream.view(0).sent else augment_image
    rngs = [generator(run.seed, 0, str(at)) for at in range(len(images))]

    def make_views() -> None:
        for image, rng in zip(images, rngs, strict=True):
            view(image, augment, spec.size, rng)

    augmenting = _per_image(make_views, len(images), share)
    # ---- on the device of a worker
    (block,) = islice(blocks_of(stream, 0, local), 1)
    torch.set_num_threads(max(1, int((machines.cpus - machines.decoding_cpus) / machines.workers)))
    host = torch.from_numpy(block["image"])
    host = host.pin_memory() if device.type == "cuda" else host
    transfer = _per_image(lambda: _finished(host.to(device, copy=device.type == "cuda"), device), local, share / 2)
    on_device = 0.0
    if stream.view(0).sent:
        pixels, draws = host.to(device, copy=True), read_draws(block, augment)
        on_device = _per_image(lambda: _finished(apply_draws(pixels, draws), device), local, share / 2)
    take_step = training_step(run, random_batch(run, device))[1]
    step = _per_image(lambda: _finished(take_step(), device), local, share)
    torch.set_num_threads(threads)
    return StageSeconds(read, decode, augmenting, transfer, step + on_device)


def _decodable(encoded: list[bytes]) -> list[np.ndarray]:
    """Return the images that can be decoded."""
    images = []
    for content in encoded:
        with suppress(UndecodableImage):
            images.append(decode_image(content))
    return images


def _per_image(call: Callable[[], object], images: int, seconds: float) -> float:
    """Return the median seconds per image of repeated calls, after one that warms up."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) / images)
    return median(times)


def _finished(_result: object, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
