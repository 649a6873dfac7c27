"""Timing of alternatives in interleaved rounds: medians, spreads, and the hardware and versions behind them."""

import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from vitray.system import host_facts

Name = TypeVar("Name")
Result = TypeVar("Result")


class Spread(NamedTuple):
    """The median over rounds, and half the interquartile range."""

    median: float
    spread: float

    def __str__(self) -> str:
        return f"{self.median:.4g} ± {self.spread:.2g}"

    def columns(self, name: str, digits: int = 9) -> dict[str, float]:
        """Return both numbers as columns of a table."""
        return {name: round(self.median, digits), f"{name}_spread": round(self.spread, digits)}


def spread_of(values: Sequence[float]) -> Spread:
    """Return the median and the spread of some rounds."""
    low, middle, high = np.percentile(values, [25, 50, 75]).tolist()
    return Spread(middle, (high - low) / 2)


def ratio_of(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Return the ratio of two variants, taken within rounds so that a slow round cancels."""
    return spread_of([one / other for one, other in zip(numerators, denominators, strict=True)])


def in_rounds(
    variants: Mapping[Name, Callable[[int], Result]], rounds: int, *, warm_up: int = 0, shown: bool = False
) -> dict[Name, list[Result]]:
    """Call each variant in each round, with the number of the round, and return {variant: what it returned}.

    All take turns, so a slow minute affects each of them; in each round another one is first, so that none always
    follows a pause. `warm_up` rounds come before those that count.
    """
    names = list(variants)
    results: dict[Name, list[Result]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            result = variants[name](number)
            if number >= warm_up:
                results[name].append(result)
        if shown:
            progress(f"round {number + 1 - warm_up} of {rounds}" if number >= warm_up else "warm-up")
    return results


def interleave(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds: float,
    device: torch.device,
    images: int = 1,
    untimed: int = 0,
) -> dict[str, list[float]]:
    """Return each variant's images per second in each round.

    `seconds` is the time of one variant in one round, `images` the number in a call. `untimed` calls precede the timed
    ones of a round: they use up what a variant has prepared while others ran.
    """
    # Allocations, compilation, folded weights; the second call of a compiled network may record a CUDA graph.
    warm_up, calls = 3 if device.type == "cuda" else 1, {}
    for name, variant in variants.items():
        _timed(variant, warm_up, device)
        calls[name] = max(1, int(seconds / _timed(variant, 1, device)))

    def speed(name: str, _number: int) -> float:
        _timed(variants[name], untimed, device)
        return images * calls[name] / _timed(variants[name], calls[name], device)

    return in_rounds({name: partial(speed, name) for name in variants}, rounds)


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


def progress(text: str) -> None:
    """Print a line of progress to stderr; on a terminal it replaces the last one."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{text:<79}", end=end, file=sys.stderr, flush=True)
