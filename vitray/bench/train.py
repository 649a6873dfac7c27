"""The speed of a training step, against a plain PyTorch step with the same network, precision and batch.

With --augment the cost of `data.augment.on: device`: a step on batches that the worker augments, against plain crops.
Both come through the prefetcher of a run: copies and augmentation run beside the steps, as in training.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vitray.bench.results import Results
from vitray.config import Run, load_run
from vitray.data.augment.draws import Draws, draw_columns, draw_operations, read_draws, write_draws
from vitray.data.augment.keyed_random import generator
from vitray.data.augment.mixing import DeviceBatch, normalized
from vitray.data.stream.batches import HostBatch, Share
from vitray.data.stream.prefetch import Prefetcher
from vitray.errors import ConfigError, RunError, one_line
from vitray.system.timing import circumstances, interleave, ratio_of, spread_of
from vitray.tasks.build import build_task, task_costs
from vitray.training.compiling import compiled_for_training
from vitray.training.evaluator import autocast
from vitray.training.learner import Learner, compile_model
from vitray.training.optim import build_optimizer
from vitray.training.profiling import peak_flops
from vitray.training.schedule import length_of
from vitray.training.step import take_step

# Steps before the timed ones of --augment: more than the batches that a feed makes while the other variant runs.
UNTIMED = 4


def measure_train(
    models: Sequence[str],
    batch: int,
    image_size: int,
    dtype: str,
    compile_mode: str | bool,
    rounds: int,
    seconds: float,
    out: Path,
    *,
    augment: str | None = None,
    largest_batch: bool = False,
) -> dict[str, Any]:
    """Measure every model, print and save the table, and return its rows.

    `compile_mode` is a mode of compute.compile, `augment` the kind of a policy; `largest_batch` searches the largest
    batch that fits the memory of the GPU.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if largest_batch and device.type != "cuda":
        raise ConfigError(
            "--largest-batch: got a machine without a GPU, expected one: it finds the limit of GPU memory"
        )
    about = f"{mode_text(dtype, compile_mode)}, {image_size} px, batches of {batch}"
    about += f", policy {augment}" if augment else ""
    print(f"images/s of a training step, median ± half the interquartile range of {rounds} interleaved rounds")
    print(f"{circumstances(device)}; {about}")
    columns = ("augmented", "crops", "ratio") if augment else ("vitray", "bare loop", "ratio")
    more = "" if augment else f"{'MFU':>8}{'peak GB':>9}{'batch':>7}"
    print(f"\n{'model':<18}{''.join(f'{name:>18}' for name in columns)}{more}")
    stem = f"train_{augment or 'step'}_{device.type}_{dtype}" + (f"_{compile_mode}" if compile_mode else "")
    results = Results(out / stem, device, {"circumstances": circumstances(device), "about": about})
    for name in models:
        run = recipe(name, batch, image_size, dtype, compile_mode)
        try:
            if augment:
                row = _measure_augmented(run, augment, rounds, seconds, device)
            else:
                row = _measure(run, rounds, seconds, device, largest_batch=largest_batch)
        except RuntimeError as error:  # of memory, or of a kernel that cannot start with so many images
            row = {"error": f"batches of {batch}: {one_line(error)[:300]}"}
            print(f"{name:<18}{row['error']}", flush=True)
        torch.cuda.empty_cache()
        results.add({"model": name} | row)
    if all("error" in row for row in results.rows):
        raise RunError("; ".join(f"{row['model']}: {row['error']}" for row in results.rows))
    return results.finish()


def mode_text(dtype: str, compile_mode: str | bool) -> str:
    """Return precision and compilation in words."""
    return f"{dtype}{f', compiled {compile_mode}' if compile_mode else ''}"


def _measure(run: Run, rounds: int, seconds: float, device: torch.device, *, largest_batch: bool) -> dict[str, Any]:
    """Print and return the numbers of a model."""
    peak, largest = peak_bytes(run, device), None
    if largest_batch:
        largest = largest_fitting(lambda batch: fits(run, batch, device))
    speeds = interleave(step_variants(run, device), rounds, seconds, device, run.optim.batch)
    text, row = _compared(run.model.name, speeds)
    mfu = utilization(run, row["vitray"], device)
    mfu_text = "" if mfu is None else f"{mfu:.1%}"
    print(f"{text}{mfu_text:>8}{'' if peak is None else f'{peak / 1e9:.2f}':>9}{largest or '':>7}", flush=True)
    return row | {"mfu": mfu, "peak_bytes": peak, "largest_batch": largest}


def _measure_augmented(run: Run, policy: str, rounds: int, seconds: float, device: torch.device) -> dict[str, Any]:
    """Print and return the numbers of a model whose batches are augmented on its device."""
    run = run.replace({"data.augment.policy": policy, "data.augment.on": "device"})
    with fed_steps(run, device) as steps:
        text, row = _compared(run.model.name, interleave(steps, rounds, seconds, device, run.optim.batch, UNTIMED))
    print(text, flush=True)
    return row


def _compared(name: str, speeds: Mapping[str, Sequence[float]]) -> tuple[str, dict[str, Any]]:
    """Return the line and the row of two variants, and their ratio."""
    ratio, row, cells = ratio_of(*speeds.values()), {}, ""
    for variant, values in speeds.items():
        row |= spread_of(values).columns(variant, 2)
        cells += f"{spread_of(values)!s:>18}"
    return f"{name:<18}{cells}{ratio!s:>18}", row | ratio.columns("ratio", 4)


def recipe(name: str, batch: int, image_size: int, dtype: str, compile_mode: str | bool) -> Run:
    """Return the run of a model."""
    changes = {
        "model.name": name,
        "model.image_size": image_size,
        "model.num_classes": 1000,
        "optim.batch": batch,
        "optim.duration": "200 steps",
        "optim.warmup": "10 steps",
        "compute.workers": 1,
        "compute.precision": dtype,
        "compute.compile": compile_mode,
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
    mode = run.compute.compile_on(device.type, graphs=False)
    vit: Any = compiled_for_training(task.vit, mode)
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


# ---- augmentation on the device --------------------------------------------------------------------------------------


@contextmanager
def fed_steps(run: Run, device: torch.device) -> Iterator[dict[str, Callable[[], object]]]:
    """Yield {variant: a step on the next batch of its prefetcher}."""
    learner = training_step(run, random_batch(run, device))[0]

    def step(feed: Prefetcher) -> None:
        take_step(run, 20, next(feed), Share(0, 1), learner, length_of(run.optim, 1000))

    with ExitStack() as stack:
        feeds = [stack.enter_context(closing(Prefetcher(repeat(batch), device))) for batch in host_batches(run)]
        yield {variant: partial(step, feed) for variant, feed in zip(("augmented", "crops"), feeds, strict=True)}


def host_batches(run: Run) -> tuple[HostBatch, HostBatch]:
    """Return a batch of random crops with the draws of its augmentation, and the same without them."""
    images, labels, positions, rows, *_ = random_batch(run, torch.device("cpu"))
    batch = HostBatch(images.numpy(), labels.numpy(), positions, rows, 0, (draws_of(run),))
    return batch, batch._replace(draws=())


def draws_of(run: Run) -> Draws:
    """Return the draws of a batch, as a task makes them."""
    augment, (height, width) = run.data.augment, run.model.image_shape
    columns = draw_columns(augment, (run.optim.batch,))
    for row in range(run.optim.batch):
        rng: np.random.Generator = generator(run.seed, 0, str(row))
        write_draws(columns, (row,), rng.random() < augment.flip, draw_operations(augment, (width, height), rng))
    return read_draws(columns, augment)
