"""The stages of a recipe in seconds per image, measured on this machine alone and beside each other, without Ray."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count as count_from
from itertools import islice
from multiprocessing import get_context
from statistics import median
from typing import Any

import numpy as np
import torch

from vitray.bench.ingest import blocks_of
from vitray.bench.train import random_batch, training_step
from vitray.bench.verdict import Machines, StageSeconds
from vitray.config import Run
from vitray.data.augment.crops import augment_image, crop_and_draw, decode_for_view
from vitray.data.augment.decode import DecodedImage, UndecodableImage
from vitray.data.augment.draws import read_draws
from vitray.data.augment.keyed_random import generator
from vitray.data.augment.ops_tensor import apply_draws
from vitray.data.shards import open_dataset
from vitray.data.stream.batches import StreamSpec
from vitray.data.stream.decoding import read_rows
from vitray.data.stream.stream import Stream
from vitray.errors import ConfigError, RunError

# Images of the measured reads; more would hold too many in memory.
SAMPLE = 256
# Images that a decoding process counts at a time.
BLOCK = 16
# Processes of a kind beside a measurement; more show the same.
MOST_PROCESSES = 16


def plan_machines(run: Run, cpus: int | None) -> Machines:
    """Return the workers and CPUs of a run on this machine, or with that many CPUs."""
    gpus = 0 if run.compute.device == "cpu" else torch.cuda.device_count()
    if run.compute.device == "gpu" and not gpus:
        raise ConfigError("compute.device: got gpu, expected cpu or auto: this machine has no GPU")
    fewest, workers = run.compute.worker_range or (max(1, gpus),) * 2
    if fewest != workers:
        raise ConfigError(f"compute.workers: got {run.compute.workers}, expected one number")
    if gpus and workers * run.compute.gpus > gpus:
        raise ConfigError(f"compute.workers: got {workers}, expected at most the {gpus} GPUs of this machine")
    all_cpus = cpus or len(os.sched_getaffinity(0))
    # As placement does: a GPU worker holds one CPU, and CPU workers share all but one.
    fair = 1.0 if gpus else (all_cpus - 1) / workers
    each = run.compute.cpus or (fair if fair < 1 else float(int(fair)))
    if not each or workers * each >= all_cpus:
        held = f"{workers} workers and the decoding of images do not fit into {all_cpus} CPUs"
        raise ConfigError(f"compute.workers: {held}, expected fewer workers, or more --cpus")
    threads = max(1, all_cpus // workers)
    return Machines(workers, all_cpus - workers * each, all_cpus, workers * run.compute.gpus if gpus else 0, threads)


def measure_stages(run: Run, machines: Machines, seconds: float) -> StageSeconds:
    """Return the seconds per image of each stage; `seconds` is the time of all measurements together.

    The others that run beside a stage in training, workers and decoding tasks, run as processes of their own.
    """
    device = torch.device("cuda" if machines.gpus else "cpu")
    run, stream = open_stream(run, machines)
    share, threads = seconds / 9, torch.get_num_threads()
    torch.set_num_threads(1)
    parts = measure_cpu(run, stream, 3 * share)
    local, augment = run.optim.batch, run.data.augment
    (block,) = islice(blocks_of(stream, 0, local), 1)
    torch.set_num_threads(machines.threads)  # decoding has set one
    host = torch.from_numpy(block["image"])
    host = host.pin_memory() if device.type == "cuda" else host
    transfer = _per_image(lambda: _finished(host.to(device, copy=device.type == "cuda"), device), local, share / 2)
    pixels, draws = host.to(device, copy=True), read_draws(block, augment) if stream.view(0).sent else None
    train = training_step(run, random_batch(run, device))[1]

    def take_step() -> None:
        if draws is not None:
            apply_draws(pixels, draws)
        _finished(train(), device)

    take_step()
    with background_load(run, machines) as load:
        load.run_only("step")
        step = _per_image(take_step, local, share)
        load.run_only("step", "decode")
        decoded = load.count()
        step_beside = _per_image(take_step, local, 2 * share)
        cpu_beside = decoded()
        parts, cpu = scale_to_full_load(parts, load, share)
    torch.set_num_threads(threads)
    return StageSeconds(*parts, transfer, step, max(1.0, step_beside / step), max(1.0, cpu_beside / cpu))


def check_measurable(run: Run) -> None:
    """Refuse a run whose stages are not measured."""
    if run.task.kind != "supervised" or run.distill:
        raise ConfigError(f"task.kind: got {run.task.kind}, expected supervised without distillation")
    if run.data.url is None:
        raise ConfigError("data.url: got none, expected a dataset written by vitray shard")


def open_stream(run: Run, machines: Machines) -> tuple[Run, Stream]:
    """Return the run of one worker and its stream; refuse what is not measured."""
    check_measurable(run)
    assert run.data.url is not None
    dataset = open_dataset(run.data.url)
    local = run.optim.batch // machines.workers
    augment = run.data.augment.resolved(machines.gpus > 0)
    stream = Stream(
        dataset, StreamSpec(run.data.train, local, run.model.image_shape, augment, run.seed, run.data.repeats)
    )
    if not local or not stream.steps:
        batch = f"got {run.optim.batch} for {machines.workers} workers"
        raise ConfigError(f"optim.batch: {batch}, expected at most the {stream.images} images of {run.data.train}")
    classes = run.model.num_classes or len(dataset.classes)
    changes = {"optim.batch": local, "model.num_classes": classes, "data.augment.on": augment.on}
    return run.replace(changes), stream


def measure_cpu(run: Run, stream: Stream, seconds: float) -> tuple[float, float, float]:
    """Return the seconds per image of read, decode and augment on one CPU of a task, which has one thread."""
    read, decode, make_views, count = _cpu_stages(run, stream)
    return tuple(_per_image(stage, count, seconds / 3) for stage in (read, decode, make_views))  # pyright: ignore[reportReturnType]


def scale_to_full_load(
    parts: tuple[float, float, float], load: "BackgroundLoad", seconds: float
) -> tuple[tuple[float, float, float], float]:
    """Return the parts while all CPUs decode and compete for memory, and their sum."""
    load.run_only("decode")
    decoded = load.count()
    time.sleep(seconds)
    cpu = decoded()
    read, decode, augment = (part * cpu / sum(parts) for part in parts)
    return (read, decode, augment), cpu


def _cpu_stages(
    run: Run, stream: Stream
) -> tuple[Callable[[], object], Callable[[], object], Callable[[], object], int]:
    """Return the stages of some images as calls, and the number of images."""
    rows = np.arange(min(int(stream.rows.starts[-1]), SAMPLE))  # whole row groups, as tasks read them
    contents = [content for content, _, _ in read_rows(rows, stream.rows).values()]
    augment: Any = stream.spec.crop
    keys = [str(at) for at in range(len(contents))]

    def decode() -> dict[str, DecodedImage]:
        images = {}
        for key, content in zip(keys, contents, strict=True):
            with suppress(UndecodableImage):
                images[key] = decode_for_view(content, augment, stream.spec.size, generator(run.seed, 0, key))
        return images

    images = decode()
    if not images:
        raise ConfigError(f"{stream.dataset.url}: none of the first {len(rows)} images can be decoded")
    view = crop_and_draw if stream.view(0).sent else augment_image

    def make_views() -> None:
        for key, image in images.items():
            view(image.pixels, augment, stream.spec.size, generator(run.seed, 0, key), image.whole)

    return lambda: read_rows(rows, stream.rows), decode, make_views, len(rows)


# ---- processes beside a measurement ----------------------------------------------------------------------------------


class BackgroundLoad:
    """Background processes that decode or train; only the chosen kinds run."""

    def __init__(self, processes: Sequence[Any], go: dict[str, Any], images: Any, decoders: int) -> None:
        self._processes, self._go, self._images, self._decoders = processes, go, images, decoders

    def check(self) -> None:
        """Raise if one has ended."""
        for process in self._processes:
            if not process.is_alive():
                raise RunError(f"a measuring process exited with status {process.exitcode}")

    def run_only(self, *kinds: str) -> None:
        """Run only these kinds of processes; returns when they do."""
        for kind, event in self._go.items():
            event.set() if kind in kinds else event.clear()
        time.sleep(0.2)  # longer than most batches

    def count(self) -> Callable[[], float]:
        """Return a function that returns the CPU seconds per image since this call; it waits for at least one image."""
        start, before = time.perf_counter(), self._images.value

        def seconds() -> float:
            while self._images.value == before:
                self.check()
                time.sleep(0.01)
            return (time.perf_counter() - start) * self._decoders / (self._images.value - before)

        return seconds


@contextmanager
def background_load(run: Run, machines: Machines) -> Iterator[BackgroundLoad]:
    """Start the decoding tasks of a run and its other workers on CPUs as processes, which wait to be chosen."""
    context = get_context("spawn")  # torch's threads do not survive a fork
    go = {"step": context.Event(), "decode": context.Event()}
    images, ready = context.Value("q", 0), context.Semaphore(0)
    decoders = max(1, min(MOST_PROCESSES, round(machines.decoding_cpus)))
    steppers = 0 if machines.gpus else min(MOST_PROCESSES, machines.workers - 1)
    targets = [(_decode_while, go["decode"])] * decoders + [(_step_while, go["step"])] * steppers
    processes: list[Any] = []
    try:
        for work, event in targets:
            processes.append(context.Process(target=work, args=(run, machines, event, images, ready), daemon=True))
            processes[-1].start()
        load = BackgroundLoad(processes, go, images, decoders)
        for _ in processes:
            while not ready.acquire(timeout=0.5):
                load.check()
        yield load
    finally:
        for process in processes:
            process.kill()
            process.join()


def _decode_while(run: Run, machines: Machines, go: Any, images: Any, ready: Any) -> None:
    torch.set_num_threads(1)
    stream = open_stream(run, machines._replace(workers=1))[1]  # `run` is of one worker
    small = Stream(stream.dataset, stream.spec._replace(batch=min(BLOCK, run.optim.batch)))
    for number, block in enumerate(_endless(small)):
        if not number:
            ready.release()
        elif go.is_set():
            with images.get_lock():
                images.value += len(block["label"])
        go.wait()


def _endless(stream: Stream) -> Iterator[Any]:
    for epoch in count_from(0):
        yield from blocks_of(stream, epoch, stream.steps * stream.spec.batch)


def _step_while(run: Run, machines: Machines, go: Any, _images: Any, ready: Any) -> None:
    torch.set_num_threads(machines.threads)
    step = training_step(run, random_batch(run, torch.device("cpu")))[1]
    step()
    ready.release()
    while go.wait():
        step()


# ---- parts of the measurements ---------------------------------------------------------------------------------------


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
