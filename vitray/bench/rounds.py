"""Interleaved rounds, medians and spread, and the circumstances that a number belongs with."""

import csv
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch


class Spread(NamedTuple):
    """A number over rounds: its median, and half the distance between its quartiles."""

    median: float
    spread: float

    def __str__(self) -> str:
        return f"{self.median:.4g} ± {self.spread:.2g}"


def interleave(
    variants: Mapping[str, Callable[[], object]], rounds: int, seconds: float, device: torch.device
) -> dict[str, list[float]]:
    """Each variant's calls per second in each round, measured in turns so that a slow minute meets all of them.

    `seconds` is how long one variant runs in one round.
    """
    calls = {}
    for name, variant in variants.items():
        _timed(variant, 1, device)  # warm-up: allocations, compilation, folded weights
        calls[name] = max(1, int(seconds / _timed(variant, 1, device)))
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        # The order turns round too: what comes first after a pause is not always the same.
        names = list(variants)[turn % len(variants) :] + list(variants)[: turn % len(variants)]
        for name in names:
            speeds[name].append(calls[name] / _timed(variants[name], calls[name], device))
    return speeds


def spread_of(values: Sequence[float]) -> Spread:
    """The median of some rounds, and their spread."""
    if len(values) < 2:
        return Spread(values[0], 0.0)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, (high - low) / 2)


def ratio_of(these: Sequence[float], those: Sequence[float]) -> Spread:
    """These over those, round by round: what slows a whole round cancels."""
    return spread_of([this / that for this, that in zip(these, those, strict=True)])


def _timed(variant: Callable[[], object], calls: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        variant()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def circumstances(device: torch.device) -> str:
    """Hardware and versions, in one line."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
        hardware = f"{model}, {torch.get_num_threads()} threads"
    return f"{hardware}; torch {torch.__version__}, Python {platform.python_version()}"


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    """A table as CSV, its columns those of the first row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def progress(text: str) -> None:
    """One line of progress on stderr, over the last one on a terminal."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{text:<79}", end=end, file=sys.stderr, flush=True)


def draw_bars(path: Path, names: Sequence[str], values: Sequence[float], unit: str, title: str) -> None:
    """One bar a name, its value written at its end."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is asked for
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 0.5 * len(names) + 1.4), layout="constrained")
    bars = axis.barh(list(names), list(values), color="tab:blue", alpha=0.8)
    axis.bar_label(bars, fmt="%.0f", padding=3)
    axis.invert_yaxis()
    axis.set(xlabel=unit)
    axis.margins(x=0.12)
    axis.set_title(title, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
