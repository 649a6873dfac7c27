"""How fast training is: vitray's step against a bare loop on tensors in memory, and a whole run against a DataLoader.

Both neighbours are plain PyTorch: the same network, optimizer, precision and batch, and no Ray.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from vitray.augment.batch import normalised
from vitray.bench.ingest.pipelines import Batches
from vitray.bench.ingest.pipelines import ours as decode_ours
from vitray.bench.measure import circumstances, interleave, progress, ratio_of, spread_of, write_csv
from vitray.config import Run, load_run
from vitray.loop.reporting import peak_flops
from vitray.loop.training import take_step
from vitray.model.counts import count
from vitray.optim import build_optimizer
from vitray.schedule import total_steps
from vitray.shards import open_dataset
from vitray.shards.manifest import Dataset
from vitray.stream import Share, Stream
from vitray.stream.feed import DeviceBatch
from vitray.task import build_task


class Settings(NamedTuple):
    """What is measured, and how long."""

    dataset: str | None
    """None measures the step alone."""
    models: list[str]
    batch: int = 32
    image_size: int = 224
    dtype: str = "fp32"
    compile: bool = False
    rounds: int = 7
    seconds: float = 2.0
    steps: int = 200
    """Of one run against a DataLoader."""
    out: Path = Path("bench_out")


def measure_train(settings: Settings) -> dict[str, Any]:
    """Measure, print the table, write a CSV, and return the rows."""
    if settings.dataset:
        return _measure_runs(settings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"images/s of a training step, median ± half the interquartile range of {settings.rounds} interleaved rounds")
    print(f"{circumstances(device)}; {_mode(settings)}, {settings.image_size} px, batches of {settings.batch}")
    print(f"\n{'model':<18}{'vitray':>18}{'bare loop':>18}{'ratio':>18}{'MFU':>8}")
    rows = []
    for name in settings.models:
        run = recipe(settings, name, 1000)
        speeds = interleave(step_variants(run, device), settings.rounds, settings.seconds, device)
        images = {variant: [speed * settings.batch for speed in some] for variant, some in speeds.items()}
        ours, bare, ratio = spread_of(images["vitray"]), spread_of(images["bare"]), ratio_of(*images.values())
        mfu = utilisation(run, ours.median, device)
        told = "" if mfu is None else f"{mfu:.1%}"
        print(f"{name:<18}{ours!s:>18}{bare!s:>18}{ratio!s:>18}{told:>8}", flush=True)
        rows.append({"model": name, "vitray": ours.median, "bare": bare.median, "ratio": ratio.median, "mfu": mfu})
    write_csv(settings.out / f"train_step_{device.type}_{settings.dtype}.csv", rows)
    return {"rows": rows}


def recipe(settings: Settings, name: str, classes: int) -> Run:
    """The run that is measured."""
    changes = {
        "model.name": name,
        "model.image_size": settings.image_size,
        "model.num_classes": classes,
        "optim.batch": settings.batch,
        "optim.duration": f"{settings.steps} steps",
        "optim.warmup": "10 steps",
        "compute.workers": 1,
        "compute.precision": settings.dtype,
        "compute.compile": settings.compile,
        "tracking.every": "10 steps",
    }
    return load_run().replace(changes)


def step_variants(run: Run, device: torch.device) -> dict[str, Callable[[], object]]:
    """A step of ours and a bare one, each on a network of its own."""
    images = torch.randint(0, 256, (run.optim.batch, *run.model.image_shape, 3), dtype=torch.uint8, device=device)
    labels = torch.arange(run.optim.batch, device=device) % (run.model.num_classes or 1)
    places = np.arange(run.optim.batch)
    batch = DeviceBatch(images, labels, torch.ones(run.optim.batch, device=device), places, places)
    task = build_task(run).to(device)
    optimizer = build_optimizer(task, run.optim, device)
    model: Any = torch.compile(task) if run.compute.compile else task
    bare = bare_step(run, device)
    floats = normalised(images, run.data.normalise)
    return {
        "vitray": lambda: take_step(run, 20, batch, Share(0, 1), model, task, optimizer, None, 1000),
        "bare": lambda: bare(floats, labels),
    }


def bare_step(run: Run, device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The step that one would write by hand."""
    task = build_task(run).to(device)
    vit: Any = torch.compile(task.vit) if run.compute.compile else task.vit
    optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-3, fused=True)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=run.compute.precision == "bf16"):
            loss = F.cross_entropy(vit(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def utilisation(run: Run, images_per_second: float, device: torch.device) -> float | None:
    """Share of the device's peak that the network's products reach, where the peak is known."""
    peak = peak_flops(torch.cuda.get_device_name(device), run.compute.precision) if device.type == "cuda" else None
    return None if peak is None else 6e9 * count(run.model).gflops * images_per_second / peak


def _mode(settings: Settings) -> str:
    return f"{settings.dtype}{', compiled' if settings.compile else ''}"


# ---- whole runs ------------------------------------------------------------------------------------------------------


def _measure_runs(settings: Settings) -> dict[str, Any]:
    """`vitray train` and a loop around a DataLoader that decodes as the stream does, turn by turn."""
    dataset = open_dataset(settings.dataset or "")
    run = recipe(settings, settings.models[0], len(dataset.classes)).replace(
        {"data.url": str(Path(dataset.url).absolute()), "data.val": None, "tracking.experiment": "bench"}
    )
    ours: list[float] = []
    theirs: list[float] = []
    stages: list[dict[str, float]] = []
    for turn in range(settings.rounds):
        for name in ("vitray", "loader") if turn % 2 == 0 else ("loader", "vitray"):
            progress(f"round {turn + 1} of {settings.rounds}: {name}")
            if name == "loader":
                theirs.append(_loader_speed(run, dataset))
                continue
            outcome = _outcome_of(run)
            ours.append(outcome["images_per_second"])
            stages.append(outcome["start"])
    started = {stage: spread_of([stage_of[stage] for stage_of in stages]) for stage in stages[0]}
    ratio = ratio_of(ours, theirs)
    print(f"\nimages/s of whole runs, median ± half the interquartile range of {settings.rounds} interleaved rounds")
    print(f"{circumstances(torch.device('cpu'))}; {_mode(settings)}, {run.model.name}, {settings.image_size} px")
    print(f"batches of {settings.batch}, {settings.steps} steps, the first fifth left out")
    print(f"\n  vitray train                      {spread_of(ours)!s:>18}")
    print(f"  DataLoader, same decode, no Ray   {spread_of(theirs)!s:>18}\n  ratio{ratio!s:>47}")
    print("\nseconds from the call of train() to: " + ", ".join(f"{name} {time_}" for name, time_ in started.items()))
    row = {"model": run.model.name, "vitray": spread_of(ours).median, "loader": spread_of(theirs).median}
    row |= {"ratio": ratio.median, **{f"start_{name}": time_.median for name, time_ in started.items()}}
    write_csv(settings.out / "train_runs.csv", [row])
    return {"rows": [row]}


def _outcome_of(run: Run) -> dict[str, Any]:
    """What `vitray train` says of a run, in a process and with a tracking store of its own."""
    with tempfile.TemporaryDirectory(prefix="vitray-") as folder:
        recipe_file = Path(folder) / "bench.yaml"
        recipe_file.write_text(run.to_yaml())
        store = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlruns.db", "VITRAY_HOME": folder}
        words = [sys.executable, "-m", "pipelines.train", str(recipe_file), "--out", f"{folder}/runs", "--json"]
        done = subprocess.run(words, env=os.environ | store, stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout.splitlines()[-1])


def _loader_speed(run: Run, dataset: Dataset) -> float:
    """Images a second of the bare step on what one process of a DataLoader decodes."""
    stream = Stream(dataset, run.data.train, batch=run.optim.batch, size=run.model.image_shape, crop=run.data.augment)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step, images_of_run = bare_step(run, device), total_steps(run.optim, stream.steps) * run.optim.batch
    done, first, first_done, began = 0, images_of_run // 5, 0, 0.0
    for epoch in range(-(-images_of_run // stream.images)):
        batches = Batches(stream, epoch, stream.steps * stream.batch, decode_ours)
        for images, labels in DataLoader(batches, batch_size=None, num_workers=1, multiprocessing_context="fork"):
            step(normalised(images.to(device), run.data.normalise), labels.to(device))
            done += len(images)
            if done >= images_of_run:
                break
            if done - len(images) < first <= done:
                began, first_done = time.perf_counter(), done
    return (done - first_done) / (time.perf_counter() - began)
