"""Time and memory of fine-tuning modes, relative to full fine-tuning."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitray.bench.results import Results
from vitray.config import Run, load_run
from vitray.system.storage import scratch_folder
from vitray.system.timing import Spread, circumstances, interleave, progress, ratio_of, spread_of
from vitray.tasks.build import build_task, recompute_activations
from vitray.training.evaluator import autocast
from vitray.training.optim import build_optimizer
from vitray.weights.freezing import audit

# Costs in bytes, measured once.
MEMORY_COSTS = ("peak", "activations", "gradients", "optimizer")


class Variant:
    """A partly frozen network, its optimizer, and a batch."""

    def __init__(self, run: Run, device: torch.device) -> None:
        torch.manual_seed(0)
        self.task = build_task(run).to(device).train()
        recompute_activations(self.task, run.compute.activation_checkpointing)
        self.optimizer = build_optimizer(self.task, run.optim, device)
        self.images = torch.randn(run.optim.batch, 3, *run.model.image_shape, device=device)
        classes = run.model.num_classes or 1
        self.targets = F.one_hot(torch.arange(run.optim.batch, device=device) % classes, classes).float()
        self.autocast = autocast(run, device)

    def loss(self) -> Tensor:
        """Run the forward pass."""
        with self.autocast:
            return self.task(self.images, self.targets)

    def step(self) -> None:
        """Run the forward pass, the backward pass and the optimizer."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def measure_finetune(
    model: str,
    modes: Sequence[str],
    batch: int | None,
    image_size: int,
    dtype: str,
    rounds: int,
    seconds: float,
    out: Path,
) -> dict[str, Any]:
    """Measure every mode, print and save the table, and return its rows.

    A mode is a fine-tuning mode, as in attn, attn+feedforward with recomputation, or lora:task.lora.rank=4 with a
    setting; the first is the reference. `batch` None is 8 on a GPU and 1 on a CPU.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = batch or (8 if device.type == "cuda" else 1)
    runs = {mode: recipe(model, mode, batch, image_size, dtype) for mode in modes}
    variants: dict[str, Variant] = {}
    costs: dict[str, dict[str, int]] = {}
    for mode, run in runs.items():
        progress(f"memory of {mode}, {len(costs) + 1} of {len(runs)}")
        variants[mode] = Variant(run, device)
        costs[mode] = measure_memory(variants[mode], device)
    progress(f"{rounds} rounds of steps")
    steps = {mode: variant.step for mode, variant in variants.items()}
    speeds = interleave(steps, rounds, seconds, device)
    where, first = circumstances(device), modes[0]
    place = f"{where}; {model}, {image_size} px, batch {batch}, AdamW, {dtype}"
    stem = f"finetune_{device.type}_{dtype}_{model}_{image_size}"
    results = Results(out / stem, device, {"circumstances": where, "about": place})
    for mode, variant in variants.items():
        row = {"mode": mode, "share_trained": round(audit(variant.task.vit).share, 4)}
        row |= spread_of([1 / speed for speed in speeds[mode]]).columns("seconds")
        row |= ratio_of(speeds[first], speeds[mode]).columns("seconds_ratio")
        for cost, count in costs[mode].items():
            row |= {f"{cost}_bytes": count, f"{cost}_ratio": round(count / costs[first][cost], 4)}
        results.add(row)
    print(f"A training step, median ± half the interquartile range of {rounds} interleaved rounds.")
    print(f"{place}. In brackets and under `time`: relative to {first}.")
    print("peak: weights, optimizer state, batch, and the largest allocation of a step by torch's allocator.")
    print(f"activations: tensors that the forward pass keeps for the backward pass.\n\n{markdown_table(results.rows)}")
    kinds = {"seconds": "time of a step"} | {cost: cost for cost in MEMORY_COSTS}
    from vitray.bench.charts import draw_costs  # loads matplotlib

    return results.finish(chart=draw_costs(results.rows, kinds, place))


def recipe(model: str, mode: str, batch: int, image_size: int, dtype: str) -> Run:
    """Return the run of a fine-tuning mode."""
    mode, *more = mode.split(":")
    trained, _, recomputed = mode.partition("+")
    changes = {
        "model.name": model,
        "model.image_size": image_size,
        "model.layerscale": 1e-4,  # as in the paper
        "task.kind": "finetune",
        "task.weights": "unread",
        "task.mode": trained,
        "optim.batch": batch,
        "compute.precision": dtype,
        "compute.activation_checkpointing": recomputed or "none",
    }
    return load_run(None, [f"{setting}={value}" for setting, value in changes.items()] + more)


# ---- memory ----------------------------------------------------------------------------------------------------------


def measure_memory(variant: Variant, device: torch.device) -> dict[str, int]:
    """Return each memory cost in bytes."""
    variant.step()  # creates the optimizer's state
    _, activations = allocated(variant.loss, device)
    variant.loss().backward()
    gradients = _bytes(parameter.grad for parameter in variant.task.parameters())
    variant.optimizer.zero_grad(set_to_none=True)
    states = [value for state in variant.optimizer.state.values() for value in state.values()]
    optimizer = _bytes(value for value in states if isinstance(value, Tensor))
    resident = _bytes([*variant.task.parameters(), *variant.task.buffers(), variant.images, variant.targets])
    most, _ = allocated(variant.step, device)
    sizes = resident + optimizer + most, activations, gradients, optimizer
    return dict(zip(MEMORY_COSTS, sizes, strict=True))


def allocated(call: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Return the bytes that a call allocates: at its peak, and those that live as long as its result."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        most, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        del result
        return most - before, left - before
    # Torch has no such counter for a CPU, but its profiler records every allocation.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides the profiler's own messages
    cpu = torch.profiler.ProfilerActivity.CPU
    # torch 2.11 warns of its default for acc_events, even in a single cycle.
    with torch.profiler.profile(activities=[cpu], profile_memory=True, acc_events=True) as profiler:
        result = call()
    del result
    with scratch_folder() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    most = left = 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        left += event["args"]["Bytes"]
        most = max(most, left)
    return most, left


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


# ---- the table -------------------------------------------------------------------------------------------------------


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [["trains", "of all weights", "ms a step", "time", *(f"{cost} MB" for cost in MEMORY_COSTS)]]
    for row in rows:
        milliseconds = Spread(1e3 * row["seconds"], 1e3 * row["seconds_spread"])
        time = f"{row['seconds_ratio']:.2f} ± {row['seconds_ratio_spread']:.2f}"
        costs = [f"{row[f'{cost}_bytes'] / 1e6:.1f} ({row[f'{cost}_ratio']:.2f})" for cost in MEMORY_COSTS]
        lines.append([row["mode"], f"{row['share_trained']:.1%}", str(milliseconds), time, *costs])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(f'{cell:<{width}}' for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )
