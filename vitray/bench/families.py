"""A family of deltas against one model, in one process: throughput, latency and memory of mixed batches."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitray.bench.rounds import circumstances, progress, ratio_of, rotated, spread_of, write_csv
from vitray.config import Run, load_run
from vitray.models.vit import ViT
from vitray.weights.family import Family, Member
from vitray.weights.files import State


class FamilySettings(NamedTuple):
    """Settings of `vitray bench family`."""

    model: str
    deltas: int = 100
    batch: int = 64
    image_size: int = 224
    dtype: str = "fp32"
    rounds: int = 7
    out: Path = Path("bench_out")


def measure_family(settings: FamilySettings) -> dict[str, Any]:
    """Measure one model, a mixed family, and the same rows network by network; print and save the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = load_run(None, [f"model.name={settings.model}", f"model.image_size={settings.image_size}"])
    family = build_family(run, settings.deltas, device)
    network = ViT(run.model).eval().to(device)
    network.load_state_dict(family.base)
    images_BCHW = torch.randn(settings.batch, 3, *run.model.image_shape, device=device)
    generator = np.random.default_rng(0)

    def mixed() -> list[str]:
        return [f"t{number}" for number in generator.integers(settings.deltas, size=settings.batch)]

    variants: dict[str, Callable[[], object]] = {
        "one model": lambda: network(images_BCHW),
        "family, one task": lambda: family(images_BCHW, ["t0"] * settings.batch),
        "family, mixed": lambda: family(images_BCHW, mixed()),
        "family, task by task": lambda: _by_task(family, images_BCHW, mixed()),
    }
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bf16")
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    with torch.inference_mode(), autocast:
        for number in range(settings.rounds + 1):  # the first one warms up
            for name in rotated(list(variants), number):
                took = _timed(variants[name], device)
                if number:
                    seconds[name].append(took)
            progress(f"round {number} of {settings.rounds}")
    rows = [_row(name, seconds, settings.batch) for name in variants]
    where = circumstances(device)
    print(f"{where}; {settings.model}, {settings.image_size} px, {settings.dtype}, batch {settings.batch}")
    print(f"{settings.deltas} deltas with their own attention, drawn at random; {settings.rounds} interleaved rounds\n")
    print(f"{'':<22}{'images/s':>18}{'over one model':>18}{'p50 ms':>10}{'p99 ms':>10}")
    for row in rows:
        speed, ratio = (f"{row[key]:.4g} ± {row[f'{key}_spread']:.2g}" for key in ("images_per_second", "ratio"))
        print(f"{row['variant']:<22}{speed:>18}{ratio:>18}{row['p50_ms']:>10.1f}{row['p99_ms']:>10.1f}")
    share = family.nbytes / family.nbytes_apart
    print(
        f"\nmemory: {family.nbytes / 1e6:,.0f} MB; {settings.deltas} whole models {family.nbytes_apart / 1e6:,.0f} MB"
    )
    print(f"share: {share:.1%}")
    stem = f"family_{device.type}_{settings.dtype}_{settings.model}_{settings.image_size}_{settings.deltas}"
    write_csv(table := settings.out / f"{stem}.csv", rows)
    memory = {"bytes": family.nbytes, "bytes_apart": family.nbytes_apart}
    return {"circumstances": where, "rows": rows, "files": [str(table)]} | memory


def build_family(run: Run, deltas: int, device: torch.device) -> Family:
    """Return a drawn base, and deltas of it with attention of their own."""
    torch.manual_seed(0)
    base: State = ViT(run.model).state_dict()
    family = Family(base, {}, device)
    for number in range(deltas):
        own = {name: torch.randn_like(tensor) * 0.02 for name, tensor in base.items() if ".attn" in name}
        family.add(f"t{number}", Member(run, None, base | own, base))
    return family


def _by_task(family: Family, images_BCHW: Tensor, tasks: list[str]) -> None:
    """Compute each task's rows by themselves."""
    for task in set(tasks):
        rows = [row for row, other in enumerate(tasks) if other == task]
        family(images_BCHW[rows], [task] * len(rows))


def _timed(variant: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    variant()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _row(name: str, seconds: dict[str, list[float]], batch: int) -> dict[str, Any]:
    speed = spread_of([batch / each for each in seconds[name]])
    ratio = ratio_of(seconds["one model"], seconds[name])
    p50, p99 = np.percentile(seconds[name], [50, 99]).tolist()
    row = {"variant": name} | speed.columns("images_per_second", 2) | ratio.columns("ratio", 4)
    return row | {"p50_ms": round(1e3 * p50, 2), "p99_ms": round(1e3 * p99, 2)}
