"""The speed of a training step, against a plain PyTorch step with the same network, precision and batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from vitray.bench.rounds import Results, circumstances, interleave, ratio_of, spread_of
from vitray.config import Run, load_run
from vitray.data.augment.mixing import DeviceBatch, normalized
from vitray.data.stream.batches import Share
from vitray.errors import ConfigError, RunError, one_line
from vitray.tasks.build import build_task, task_costs
from vitray.training.evaluator import autocast
from vitray.training.learner import Learner, compile_model
from vitray.training.loop import take_step
from vitray.training.optim import build_optimizer
from vitray.training.profiling import peak_flops
from vitray.training.schedule import length_of


class TrainSettings(NamedTuple):
    """Settings of `vitray bench train`."""

    models: list[str]
    batch: int
    image_size: int
    dtype: str
    compile: str | bool
    """A mode of compute.compile."""
    rounds: int
    seconds: float
    out: Path
    largest_batch: bool = False
    """Whether to search the largest batch that fits the memory of the GPU."""


def measure_train(settings: TrainSettings) -> dict[str, Any]:
    """Measure every model, print and save the table, and return its rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if settings.largest_batch and device.type != "cuda":
        raise ConfigError(
            "--largest-batch: got a machine without a GPU, expected one: it finds the limit of GPU memory"
        )
    print(f"images/s of a training step, median ± half the interquartile range of {settings.rounds} interleaved rounds")
    mode = f"{settings.dtype}{f', compiled {settings.compile}' if settings.compile else ''}"
    about = f"{mode}, {settings.image_size} px, batches of {settings.batch}"
    print(f"{circumstances(device)}; {about}")
    print(f"\n{'model':<18}{'vitray':>18}{'bare loop':>18}{'ratio':>18}{'MFU':>8}{'peak GB':>9}{'batch':>7}")
    stem = f"train_step_{device.type}_{settings.dtype}" + (f"_{settings.compile}" if settings.compile else "")
    results = Results(settings.out / stem, device, {"circumstances": circumstances(device), "about": about})
    for name in settings.models:
        run = recipe(settings, name)
        try:
            row = _measure(run, settings, device)
        except RuntimeError as error:  # of memory, or of a kernel that cannot start with so many images
            row = {"error": f"batches of {settings.batch}: {one_line(error)[:300]}"}
            print(f"{name:<18}{row['error']}", flush=True)
        torch.cuda.empty_cache()
        results.add({"model": name} | row)
    if all("error" in row for row in results.rows):
        raise RunError("; ".join(f"{row['model']}: {row['error']}" for row in results.rows))
    return results.finish()


def _measure(run: Run, settings: TrainSettings, device: torch.device) -> dict[str, Any]:
    """Print and return the numbers of a model."""
    peak, largest = peak_bytes(run, device), None
    if settings.largest_batch:
        largest = largest_fitting(lambda batch: fits(run, batch, device))
    speeds = interleave(step_variants(run, device), settings.rounds, settings.seconds, device, settings.batch)
    ours, bare, ratio = spread_of(speeds["vitray"]), spread_of(speeds["bare"]), ratio_of(*speeds.values())
    mfu = utilization(run, ours.median, device)
    mfu_text = "" if mfu is None else f"{mfu:.1%}"
    cells = f"{mfu_text:>8}{'' if peak is None else f'{peak / 1e9:.2f}':>9}{largest or '':>7}"
    print(f"{run.model.name:<18}{ours!s:>18}{bare!s:>18}{ratio!s:>18}{cells}", flush=True)
    row = ours.columns("vitray", 2) | bare.columns("bare", 2) | ratio.columns("ratio", 4)
    return row | {"mfu": mfu, "peak_bytes": peak, "largest_batch": largest}


def recipe(settings: TrainSettings, name: str) -> Run:
    """Return the run of a model."""
    changes = {
        "model.name": name,
        "model.image_size": settings.image_size,
        "model.num_classes": 1000,
        "optim.batch": settings.batch,
        "optim.duration": "200 steps",
        "optim.warmup": "10 steps",
        "compute.workers": 1,
        "compute.precision": settings.dtype,
        "compute.compile": settings.compile,
        "tracking.every": "10 steps",
    }
    return load_run().replace(changes)


def step_variants(run: Run, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return a step of vitray and a plain step, each with its own network."""
    batch, bare = random_batch(run, device), bare_step(run, device)
    floats = normalized(batch.images, run.data.normalize)
    return {"vitray": training_step(run, batch)[1], "bare": lambda: bare(floats, batch.labels)}


def random_batch(run: Run, device: torch.device) -> DeviceBatch:
    """Return a batch of random images."""
    images = torch.randint(0, 256, (run.optim.batch, *run.model.image_shape, 3), dtype=torch.uint8, device=device)
    labels = torch.arange(run.optim.batch, device=device) % (run.model.num_classes or 1)
    places = np.arange(run.optim.batch)
    return DeviceBatch(images, labels, places, places)


def training_step(run: Run, batch: DeviceBatch) -> tuple[Learner, Callable[[], object]]:
    """Return a learner on the device of a batch, and its step; sets the precision of products as a run does."""
    torch.set_float32_matmul_precision("high" if run.compute.tf32 else "highest")
    if run.compute.compile:
        torch.compiler.reset()  # after 8 networks torch would run the others uncompiled
    task = build_task(run).to(batch.images.device)
    if run.compute.channels_last:
        task.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(task, run.optim, batch.images.device)
    learner = Learner(task, compile_model(task, run), optimizer, None)
    return learner, lambda: take_step(run, 20, batch, Share(0, 1), learner, length_of(run.optim, 1000))


def bare_step(run: Run, device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a plain PyTorch step."""
    task = build_task(run).to(device)
    # Without CUDA graphs: its gradients are new tensors in each step.
    mode: Any = run.compute.evaluation_compile
    vit: Any = torch.compile(task.vit, mode=mode) if mode else task.vit
    optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-3, fused=True)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with autocast(run, device):
            loss = F.cross_entropy(vit(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def peak_bytes(run: Run, device: torch.device) -> int | None:
    """Return the peak memory of a training step with its weights and optimizer; None without a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step = training_step(run, random_batch(run, device))[1]
    step()
    step()
    return torch.cuda.max_memory_allocated(device) - before


def fits(run: Run, batch: int, device: torch.device) -> bool:
    """Return whether the GPU can take a step with a batch: it has the memory, and its kernels can start."""
    run = run.replace({"optim.batch": batch, "compute.compile": False})
    try:
        peak_bytes(run, device)
    except RuntimeError:  # also of a kernel that cannot start with so many images
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def largest_fitting(fits: Callable[[int], bool], first: int = 8, most: int = 2**16) -> int | None:
    """Return the largest batch that fits, within an eighth of it; None if `first` does not fit."""
    if not fits(first):
        return None
    low = first
    while 2 * low <= most and fits(2 * low):
        low *= 2
    if 2 * low > most:
        return low
    gap = low  # `low + gap` does not fit
    while gap > max(1, low // 8):
        gap //= 2
        low += gap if fits(low + gap) else 0
    return low


def utilization(run: Run, images_per_second: float, device: torch.device) -> float | None:
    """Return the model FLOPs utilization; None for a device of unknown peak."""
    peak = peak_flops(torch.cuda.get_device_name(device), run.compute.precision) if device.type == "cuda" else None
    return None if peak is None else 2e9 * task_costs(run).step_gflops * images_per_second / peak
