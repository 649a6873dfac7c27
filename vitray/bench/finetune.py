"""What training some parts of a network costs, beside training all of it: time, memory, gradients, optimizer state."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitray.bench.rounds import Spread, circumstances, interleave, progress, ratio_of, spread_of, write_csv
from vitray.config import Run, load_run
from vitray.tasks.supervised import build_task, recompute_activations
from vitray.train.optim import build_optimizer
from vitray.weights.freezing import audit

# Beside the step's time, what is measured once, in bytes, and how the table calls it.
COSTS = {"peak": "peak MB", "activations": "activations MB", "gradients": "gradients MB", "optimizer": "optimizer MB"}


class Settings(NamedTuple):
    """What is measured, and how long."""

    model: str
    modes: Sequence[str] = ("full", "attn", "ffn", "head", "attn+feedforward")
    """A mode of the task, perhaps with a kind of recomputation; all are compared with the first."""
    batch: int | None = None
    """None: 8 on a GPU; 1 on a CPU, where a step of B/16 at 384 px takes seconds for an image."""
    image_size: int = 224
    dtype: str = "fp32"
    rounds: int = 7
    seconds: float = 0.5
    out: Path = Path("bench_out")


class Variant:
    """A network of which some parts train, its optimizer, and a batch."""

    def __init__(self, run: Run, device: torch.device) -> None:
        torch.manual_seed(0)
        self.task = build_task(run).to(device).train()
        recompute_activations(self.task, run.compute.recompute)
        self.optimizer = build_optimizer(self.task, run.optim, device)
        self.images = torch.randn(run.optim.batch, 3, *run.model.image_shape, device=device)
        classes = run.model.num_classes or 1
        self.targets = F.one_hot(torch.arange(run.optim.batch, device=device) % classes, classes).float()
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=run.compute.precision == "bf16")

    def loss(self) -> Tensor:
        """The forward pass."""
        with self.autocast:
            return self.task(self.images, self.targets)

    def step(self) -> None:
        """Forward, backward, and the descent."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def measure_finetune(settings: Settings) -> dict[str, Any]:
    """Measure every mode; print the table, write a CSV and a picture, return the rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if settings.batch is None:
        settings = settings._replace(batch=8 if device.type == "cuda" else 1)
    runs = {mode: recipe(settings, mode) for mode in settings.modes}
    variants: dict[str, Variant] = {}
    costs: dict[str, dict[str, int]] = {}
    for mode, run in runs.items():
        progress(f"memory of {mode}, {len(costs) + 1} of {len(runs)}")
        variants[mode] = Variant(run, device)
        costs[mode] = measure_memory(variants[mode], device)
    progress(f"{settings.rounds} rounds of steps")
    steps = {mode: variant.step for mode, variant in variants.items()}
    speeds = interleave(steps, settings.rounds, settings.seconds, device)
    first = settings.modes[0]
    rows: list[dict[str, Any]] = []
    for mode, variant in variants.items():
        seconds = spread_of([1 / speed for speed in speeds[mode]])
        relative = ratio_of(speeds[first], speeds[mode])
        row = {"mode": mode, "share_trained": round(audit(variant.task.vit).share, 4)}
        row |= {"seconds": seconds.median, "seconds_spread": seconds.spread}
        row |= {"seconds_ratio": relative.median, "seconds_ratio_spread": relative.spread}
        for cost, count in costs[mode].items():
            row |= {f"{cost}_bytes": count, f"{cost}_ratio": round(count / costs[first][cost], 4)}
        rows.append(row)
    place = f"{circumstances(device)}; {settings.model}, {settings.image_size} px, batch {settings.batch}, AdamW"
    print(f"A training step, median ± half the interquartile range of {settings.rounds} interleaved rounds.")
    print(f"{place}, {settings.dtype}. In brackets and under `time`: relative to {first}.")
    print(
        "peak: weights, optimizer, batch, and the most that a step has allocated on top at once, as torch's allocator"
    )
    print(f"tells. activations: what the forward pass leaves for the backward pass.\n\n{table(rows)}")
    stem = f"finetune_{device.type}_{settings.dtype}_{settings.model}_{settings.image_size}"
    files = [settings.out / f"{stem}.csv", settings.out / f"{stem}.png"]
    write_csv(files[0], rows)
    _draw(files[1], rows, f"{place}, {settings.dtype}")
    print(f"\nwrote {files[0]} and {files[1]}")
    return {"circumstances": circumstances(device), "rows": rows, "files": list(map(str, files))}


def recipe(settings: Settings, mode: str) -> Run:
    """The run that is measured."""
    trained, _, recomputed = mode.partition("+")
    words = {
        "model.name": settings.model,
        "model.image_size": settings.image_size,
        "model.layerscale": 1e-4,  # as the paper's networks have it
        "task.kind": "finetune",
        "task.weights": "unread",
        "task.mode": trained,
        "optim.batch": settings.batch,
        "compute.precision": settings.dtype,
        "compute.recompute": recomputed or "none",
    }
    return load_run(None, [f"{setting}={value}" for setting, value in words.items()])


# ---- memory ----------------------------------------------------------------------------------------------------------


def measure_memory(variant: Variant, device: torch.device) -> dict[str, int]:
    """Each of the costs, in bytes."""
    variant.step()  # the first step makes the optimizer's state
    _, activations = allocated(variant.loss, device)
    variant.loss().backward()
    gradients = _bytes(parameter.grad for parameter in variant.task.parameters())
    variant.optimizer.zero_grad(set_to_none=True)
    states = [value for state in variant.optimizer.state.values() for value in state.values()]
    optimizer = _bytes(value for value in states if isinstance(value, Tensor))
    standing = _bytes([*variant.task.parameters(), *variant.task.buffers(), variant.images, variant.targets])
    most, _ = allocated(variant.step, device)
    return {
        "peak": standing + optimizer + most,
        "activations": activations,
        "gradients": gradients,
        "optimizer": optimizer,
    }


def allocated(call: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Bytes of tensors that a call adds: the most at any time, and those that are left as long as its result is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        most, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        del result
        return most - before, left - before
    # There is no such counter for a CPU; but torch's profiler hears of every allocation.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it tells of its own start and end
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    del result
    with tempfile.TemporaryDirectory(prefix="vitray-") as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    most = left = 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        left += event["args"]["Bytes"]
        most = max(most, left)
    return most, left


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


# ---- what is shown ---------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [["trains", "of all weights", "ms a step", "time", *COSTS.values()]]
    for row in rows:
        milliseconds = Spread(1e3 * row["seconds"], 1e3 * row["seconds_spread"])
        time = f"{row['seconds_ratio']:.2f} ± {row['seconds_ratio_spread']:.2f}"
        costs = [f"{row[f'{cost}_bytes'] / 1e6:.1f} ({row[f'{cost}_ratio']:.2f})" for cost in COSTS]
        lines.append([row["mode"], f"{row['share_trained']:.1%}", str(milliseconds), time, *costs])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(f'{cell:<{width}}' for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )


def _draw(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")  # no display is asked for
    from matplotlib import pyplot

    kinds = ["seconds", *COSTS]
    figure, axis = pyplot.subplots(figsize=(1.6 * len(kinds) + 2, 4.2), layout="constrained")
    width = 0.8 / len(rows)
    for index, row in enumerate(rows):
        places = [kind + (index - (len(rows) - 1) / 2) * width for kind in range(len(kinds))]
        axis.bar(places, [row[f"{kind}_ratio"] for kind in kinds], width, label=row["mode"], alpha=0.85)
    axis.axhline(1, color="black", linewidth=1)
    axis.set_xticks(range(len(kinds)), ["time of a step", *(name.removesuffix(" MB") for name in COSTS.values())])
    axis.set_ylabel(f"relative to {rows[0]['mode']}")
    axis.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside right upper")
    axis.set_title(title, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
