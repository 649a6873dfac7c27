"""The speed of a training step, against a plain PyTorch step with the same network, precision and batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from vitray.bench.rounds import circumstances, interleave, ratio_of, spread_of, write_csv
from vitray.config import Run, load_run
from vitray.data.augment.batch import DeviceBatch, normalised
from vitray.data.stream import Share
from vitray.models.counts import count
from vitray.tasks.build import build_task
from vitray.training.evaluator import autocast
from vitray.training.learner import Learner
from vitray.training.loop import take_step
from vitray.training.optim import build_optimizer
from vitray.training.profiling import peak_flops


class TrainSettings(NamedTuple):
    """Settings of `vitray bench train`."""

    models: list[str]
    batch: int
    image_size: int
    dtype: str
    compile: bool
    rounds: int
    seconds: float
    out: Path


def measure_train(settings: TrainSettings) -> dict[str, Any]:
    """Measure every model, print and save the table, and return its rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"images/s of a training step, median ± half the interquartile range of {settings.rounds} interleaved rounds")
    mode = f"{settings.dtype}{', compiled' if settings.compile else ''}"
    print(f"{circumstances(device)}; {mode}, {settings.image_size} px, batches of {settings.batch}")
    print(f"\n{'model':<18}{'vitray':>18}{'bare loop':>18}{'ratio':>18}{'MFU':>8}")
    rows = []
    for name in settings.models:
        run = recipe(settings, name)
        speeds = interleave(step_variants(run, device), settings.rounds, settings.seconds, device, settings.batch)
        ours, bare, ratio = spread_of(speeds["vitray"]), spread_of(speeds["bare"]), ratio_of(*speeds.values())
        mfu = utilisation(run, ours.median, device)
        mfu_text = "" if mfu is None else f"{mfu:.1%}"
        print(f"{name:<18}{ours!s:>18}{bare!s:>18}{ratio!s:>18}{mfu_text:>8}", flush=True)
        rows.append({"model": name, "vitray": ours.median, "bare": bare.median, "ratio": ratio.median, "mfu": mfu})
    write_csv(settings.out / f"train_step_{device.type}_{settings.dtype}.csv", rows)
    return {"rows": rows}


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
    floats = normalised(batch.images, run.data.normalise)
    return {"vitray": training_step(run, batch)[1], "bare": lambda: bare(floats, batch.labels)}


def random_batch(run: Run, device: torch.device) -> DeviceBatch:
    """Return a batch of random images."""
    images = torch.randint(0, 256, (run.optim.batch, *run.model.image_shape, 3), dtype=torch.uint8, device=device)
    labels = torch.arange(run.optim.batch, device=device) % (run.model.num_classes or 1)
    places = np.arange(run.optim.batch)
    return DeviceBatch(images, labels, places, places)


def training_step(run: Run, batch: DeviceBatch) -> tuple[Learner, Callable[[], object]]:
    """Return a learner on the device of a batch, and its step."""
    task = build_task(run).to(batch.images.device)
    optimizer = build_optimizer(task, run.optim, batch.images.device)
    model: Any = torch.compile(task) if run.compute.compile else task
    learner = Learner(task, model, optimizer, None)
    return learner, lambda: take_step(run, 20, batch, Share(0, 1), learner, 1000)


def bare_step(run: Run, device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a plain PyTorch step."""
    task = build_task(run).to(device)
    vit: Any = torch.compile(task.vit) if run.compute.compile else task.vit
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


def utilisation(run: Run, images_per_second: float, device: torch.device) -> float | None:
    """Return the model FLOPs utilisation; None for a device of unknown peak."""
    peak = peak_flops(torch.cuda.get_device_name(device), run.compute.precision) if device.type == "cuda" else None
    return None if peak is None else 6e9 * run.submodels * count(run.model).gflops * images_per_second / peak
