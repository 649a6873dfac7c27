"""The forward pass of small batches: eager, compiled on request, and on a GPU as a CUDA graph."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitray.bench.rounds import Results, Spread, capture, circumstances, interleave, progress, ratio_of, spread_of
from vitray.config import Model
from vitray.models.network import build_network


class LatencySettings(NamedTuple):
    """Settings of `vitray bench latency`."""

    models: Sequence[str]
    batches: Sequence[int]
    image_size: int
    dtype: str
    compile: str | bool
    rounds: int
    seconds: float
    out: Path


def measure_latency(settings: LatencySettings) -> dict[str, Any]:
    """Measure every model at every batch size, print and save the table, and return its rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = f"{settings.dtype}, {settings.image_size} px"
    print(f"ms of a forward pass, median ± half the interquartile range of {settings.rounds} interleaved rounds")
    print(f"{circumstances(device)}; {about}\n")
    stem = f"latency_{device.type}_{settings.dtype}" + (f"_{settings.compile}" if settings.compile else "")
    results = Results(settings.out / stem, device, {"circumstances": circumstances(device), "about": about})
    for name in settings.models:
        network = build_network(Model(name=name, image_size=settings.image_size)).to(device).eval()
        forwards: dict[str, Callable[[torch.Tensor], object]] = {"eager": network}
        for batch in settings.batches:
            progress(f"{name}, batch {batch}")
            if settings.compile:
                mode: Any = settings.compile
                torch.compiler.reset()  # after 8 shapes torch would run the network uncompiled
                forwards["compiled"] = torch.compile(network, dynamic=False, mode=mode)
            times = _measure(forwards, batch, settings, device)
            row: dict[str, Any] = {"model": name, "batch": batch}
            for variant, milliseconds in times.items():
                row |= spread_of(milliseconds).columns(f"{variant}_ms", 5)
                row |= ratio_of(times["eager"], milliseconds).columns(f"{variant}_gain", 4)
            results.add(row)
            texts = (f"{variant} {Spread(row[f'{variant}_ms'], row[f'{variant}_ms_spread'])}" for variant in times)
            print(f"{name:<18}{batch:>5}  {', '.join(texts)}", flush=True)
    return results.finish()


def _measure(
    forwards: dict[str, Callable[[torch.Tensor], object]], batch: int, settings: LatencySettings, device: torch.device
) -> dict[str, list[float]]:
    """Return the milliseconds of each variant in each round."""
    images = torch.randn(batch, 3, settings.image_size, settings.image_size, device=device)
    images = images.to(memory_format=torch.channels_last)  # as batches are
    calls: dict[str, Callable[[], object]] = {name: partial(forward, images) for name, forward in forwards.items()}
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bf16"):
        if device.type == "cuda":
            calls["graph"] = capture(calls["eager"])
        speeds = interleave(calls, settings.rounds, settings.seconds, device)
    return {name: [1e3 / speed for speed in values] for name, values in speeds.items()}
