"""Interleaved rounds, medians and spreads, and the hardware and versions of a measurement."""

import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vitray.pages.files import csv_text
from vitray.system import host_facts


class Spread(NamedTuple):
    """The median over rounds, and half the interquartile range."""

    median: float
    spread: float

    def __str__(self) -> str:
        return f"{self.median:.4g} ± {self.spread:.2g}"

    def columns(self, name: str, digits: int = 9) -> dict[str, float]:
        """Return both numbers as columns of a table."""
        return {name: round(self.median, digits), f"{name}_spread": round(self.spread, digits)}


def interleave(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds: float,
    device: torch.device,
    images: int = 1,
    untimed: int = 0,
) -> dict[str, list[float]]:
    """Return each variant's images per second in each round. All take turns, so a slow minute affects each of them.

    `seconds` is the time of one variant in one round, `images` the number in a call. `untimed` calls precede the timed
    ones of a round: they use up what a variant has prepared while others ran.
    """
    # Allocations, compilation, folded weights; the second call of a compiled network may record a CUDA graph.
    warm_up, calls = 3 if device.type == "cuda" else 1, {}
    for name, variant in variants.items():
        _timed(variant, warm_up, device)
        calls[name] = max(1, int(seconds / _timed(variant, 1, device)))
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in rotated(list(variants), number):
            _timed(variants[name], untimed, device)
            speeds[name].append(images * calls[name] / _timed(variants[name], calls[name], device))
    return speeds


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Return names in the same cyclic order from another start, so that none is always the first after a pause."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


def spread_of(values: Sequence[float]) -> Spread:
    """Return the median and the spread of some rounds."""
    low, middle, high = np.percentile(values, [25, 50, 75]).tolist()
    return Spread(middle, (high - low) / 2)


def ratio_of(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Return the ratio of two variants, taken within rounds so that a slow round cancels."""
    return spread_of([one / other for one, other in zip(numerators, denominators, strict=True)])


def _timed(variant: Callable[[], object], calls: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        variant()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def circumstances(device: torch.device, threads: int | None = None) -> str:
    """Return hardware and versions in one line; `threads` is None for those of this process."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{host_facts.facts()['hardware.cpu']}, {threads or torch.get_num_threads()} threads"
    return f"{hardware}; torch {torch.__version__}, Python {platform.python_version()}"


class Results:
    """The rows of a benchmark, with hardware and versions; saved after each row, since a long one may be stopped."""

    def __init__(self, path: Path, device: torch.device, about: Mapping[str, Any]) -> None:
        """`path` is that of the files, without a suffix."""
        self._json, self._csv = path.with_name(f"{path.name}.json"), path.with_name(f"{path.name}.csv")
        self._device, self._about = device, about
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Save one more row."""
        self.rows.append(row)
        _write_json(self._json, _with_facts(self._device, {**self._about, "rows": self.rows, "is_partial": True}))

    def finish(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write both files, and return all of the JSON; `more` enters it too."""
        write_csv(self._csv, self.rows)
        result = {**self._about, **(more or {}), "rows": self.rows}
        result["files"] = [str(self._csv), *result.get("files", [])]
        return write_record(self._json, self._device, result)


def write_record(path: Path, device: torch.device, result: dict[str, Any]) -> dict[str, Any]:
    """Write a result with the hardware and the versions behind it as JSON; return all of it."""
    record = _with_facts(device, result)
    _write_json(path, record)
    print(f"wrote {path}")
    return record | {"files": [*result.get("files", []), str(path)]}


def _with_facts(device: torch.device, result: Mapping[str, Any]) -> dict[str, Any]:
    facts = host_facts.facts()
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return {
        "device": device.type,
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else facts["hardware.cpu"],
        "device_bytes": memory,
        "threads": torch.get_num_threads(),
        "cores": facts["hardware.cores"],
        "versions": {name.removeprefix("version."): text for name, text in facts.items() if "version." in name},
        "commit": facts.get("git.commit"),
        **result,
    }


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def capture(call: Callable[[], object]) -> Callable[[], object]:
    """Return a call as a CUDA graph, which repeats its kernels on the same memory without launching each."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # allocates, and chooses the algorithms of convolutions
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    """Write a table as CSV with the columns of all its rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    path.write_text(csv_text([names, *([row.get(name) for name in names] for row in rows)]), newline="")


def progress(text: str) -> None:
    """Print a line of progress to stderr; on a terminal it replaces the last one."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{text:<79}", end=end, file=sys.stderr, flush=True)
