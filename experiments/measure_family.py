"""python experiments/measure_family.py: many deltas in mixed batches against one model, in one process.

Throughput, latency and memory; see experiments/LOG.md.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitray.bench.results import Results
from vitray.config import Run, load_run
from vitray.models.vit import ViT
from vitray.system.timing import circumstances, in_rounds, ratio_of, spread_of
from vitray.weights.family import Family, Member
from vitray.weights.files import State


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Measure one model, a mixed family, and the same rows network by network; print and save the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_b12x1_16", help="a model name (%(default)s)")
    parser.add_argument("--deltas", type=int, default=100, help="attention deltas (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images in a batch (%(default)s)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of a side (%(default)s)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16 uses autocast (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the results (%(default)s)")
    options = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = load_run(None, [f"model.name={options.model}", f"model.image_size={options.image_size}"])
    family = build_family(run, options.deltas, device)
    network = ViT(run.model).eval().to(device)
    network.load_state_dict(family.base)
    images_BCHW = torch.randn(options.batch, 3, *run.model.image_shape, device=device)
    generator = np.random.default_rng(0)

    def mixed() -> list[str]:
        return [f"t{number}" for number in generator.integers(options.deltas, size=options.batch)]

    def task_by_task() -> None:
        tasks = mixed()
        for task in set(tasks):
            rows = [row for row, other in enumerate(tasks) if other == task]
            family(images_BCHW[rows], [task] * len(rows))

    variants: dict[str, Callable[[], object]] = {
        "one model": lambda: network(images_BCHW),
        "family, one task": lambda: family(images_BCHW, ["t0"] * options.batch),
        "family, mixed": lambda: family(images_BCHW, mixed()),
        "family, task by task": task_by_task,
    }

    def seconds_of(variant: Callable[[], object], _number: int) -> float:
        began = time.perf_counter()
        variant()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    calls = {name: partial(seconds_of, variant) for name, variant in variants.items()}
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.dtype == "bf16")
    with torch.inference_mode(), autocast:
        seconds = in_rounds(calls, options.rounds, warm_up=1, shown=True)
    where = circumstances(device)
    about = f"{options.model}, {options.image_size} px, {options.dtype}, batch {options.batch}"
    print(f"{where}; {about}")
    print(f"{options.deltas} deltas with their own attention, drawn at random; {options.rounds} interleaved rounds\n")
    print(f"{'':<22}{'images/s':>18}{'over one model':>18}{'p50 ms':>10}{'p99 ms':>10}")
    stem = f"family_{device.type}_{options.dtype}_{options.model}_{options.image_size}_{options.deltas}"
    results = Results(options.out / stem, device, {"circumstances": where, "about": about})
    for name, taken in seconds.items():
        speed = spread_of([options.batch / each for each in taken])
        ratio = ratio_of(seconds["one model"], taken)
        p50, p99 = (1e3 * np.percentile(taken, [50, 99])).tolist()
        print(f"{name:<22}{speed!s:>18}{ratio!s:>18}{p50:>10.1f}{p99:>10.1f}", flush=True)
        row = {"variant": name} | speed.columns("images_per_second", 2) | ratio.columns("ratio", 4)
        results.add(row | {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2)})
    memory = f"{family.nbytes / 1e6:,.0f} MB; {options.deltas} whole models {family.nbytes_apart / 1e6:,.0f} MB"
    print(f"\nmemory: {memory}\nshare: {family.nbytes / family.nbytes_apart:.1%}")
    return results.finish({"bytes": family.nbytes, "bytes_apart": family.nbytes_apart})


def build_family(run: Run, deltas: int, device: torch.device) -> Family:
    """Return a drawn base, and deltas of it with attention of their own."""
    torch.manual_seed(0)
    base: State = ViT(run.model).state_dict()
    family = Family(base, {}, device)
    for number in range(deltas):
        own = {name: torch.randn_like(tensor) * 0.02 for name, tensor in base.items() if ".attn" in name}
        family.add(f"t{number}", Member(run, None, base | own, base))
    return family


if __name__ == "__main__":
    main()
