"""Three things, Table 4, on this machine: parallel branches in sequence, in a loop, fused, and as `auto` chooses."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitray.bench.charts import draw_ratios
from vitray.bench.rounds import Results, capture, circumstances, interleave, progress, ratio_of, spread_of
from vitray.config import Model
from vitray.errors import ConfigError
from vitray.models.blocks import most_fused
from vitray.models.vit import ViT, regroup
from vitray.pages.plotting import to_png

# Of the same network, between which `auto` chooses. The same blocks in sequence are another network.
EXECUTIONS = ("loop", "fused")
VARIANTS = ("seq", *EXECUTIONS, "auto")
GRAPHS = ("seq_graph", "fused_graph")


class BranchesSettings(NamedTuple):
    """Settings of `vitray bench branches`."""

    models: Sequence[str]
    batches: Sequence[int]
    image_size: int
    dtype: str
    compile: str | bool
    """A mode of compute.compile; `loop` and `auto` are compiled alike."""
    train: bool
    rounds: int
    seconds: float
    out: Path


def measure_branches(settings: BranchesSettings) -> dict[str, Any]:
    """Measure every model at every batch size, print and save the table, and return its rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compiled = f"compiled {settings.compile}" if settings.compile else "eager"
    phase = "training" if settings.train else "inference"
    names = variant_names(settings, device)
    where, mode = circumstances(device), f"{settings.dtype}, {compiled}, {phase}"
    print(f"images/s, median ± half the interquartile range of {settings.rounds} interleaved rounds")
    print(f"{where}; {mode}, {settings.image_size} px")
    print("gain: auto over seq, the same blocks in sequence; ratios are taken within rounds\n")
    print(f"{'model':<16}{'batch':>6}{''.join(f'{name:>16}' for name in names)}{'gain':>15}{'auto/loop':>16}")
    stem = f"branches_{device.type}_{mode.replace(', ', '_')}_{settings.image_size}"
    about = {"circumstances": where, "mode": mode, "image_size": settings.image_size}
    results = Results(settings.out / stem, device, about)
    started, steps = time.perf_counter(), len(settings.models) * len(settings.batches)
    for name in settings.models:
        networks = build_variants(name, settings, device)
        for batch in settings.batches:
            speeds = _measure(_compiled(networks, settings), batch, settings, device)
            gain, over_loop = ratio_of(speeds["auto"], speeds["seq"]), ratio_of(speeds["auto"], speeds["loop"])
            row: dict[str, Any] = {"model": name, "batch": batch, "elements": elements(name, batch, settings)}
            for variant, measured in speeds.items():
                row |= spread_of(measured).columns(variant, 2)
                row |= ratio_of(measured, speeds["seq"]).columns(f"{variant}_over_seq", 4)
            best = max(EXECUTIONS, key=lambda variant: row[variant])
            row |= ratio_of(speeds["auto"], speeds[best]).columns("auto_over_best", 4)
            results.add(row | {"auto_over_loop": round(over_loop.median, 4)})
            cells = "".join(f"{spread_of(measured)!s:>16}" for measured in speeds.values())
            gain_text = f"{gain.median - 1:>+8.0%} ± {gain.spread:<4.0%}"
            print(f"{name:<16}{batch:>6}{cells}{gain_text}{over_loop!s:>16}", flush=True)
            left = (time.perf_counter() - started) / len(results.rows) * (steps - len(results.rows))
            progress(f"{len(results.rows)} of {steps} measured, about {left:.0f} s left")
    chart = settings.out / f"{stem}.png"
    chart.write_bytes(to_png(draw_ratios(results.rows, VARIANTS[1:], f"{where}\n{mode}, {settings.image_size} px")))
    limit = fused_elements(results.rows)
    print(f"auto fuses up to {most_fused(device.type):,} elements; here the best limit is {limit:,}")
    return results.finish({"fused_elements": limit, "files": [str(chart)]})


def variant_names(settings: BranchesSettings, device: torch.device) -> tuple[str, ...]:
    """Return the measured variants: on a GPU also inference as a CUDA graph."""
    has_graphs = device.type == "cuda" and not settings.train and not settings.compile
    return (*VARIANTS, *(GRAPHS if has_graphs else ()))


def elements(name: str, batch: int, settings: BranchesSettings) -> int:
    """Return branches * rows * width of a level's input, by which `auto` decides."""
    model = Model(name=name, image_size=settings.image_size)
    tokens = math.prod(model.grid) + model.num_prefix
    return model.shape.branches * batch * tokens * model.shape.size


def fused_elements(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the limit of `auto` whose worst row loses least against the faster of loop and fused.

    Of equal limits the lowest.
    """

    def worst(limit: int) -> float:
        chosen = [(row, "fused" if row["elements"] <= limit else "loop") for row in rows]
        return min(row[variant] / max(row["fused"], row["loop"]) for row, variant in chosen)

    return max([0, *sorted(row["elements"] for row in rows)], key=worst)


def build_variants(name: str, settings: BranchesSettings, device: torch.device) -> dict[str, ViT]:
    """Return the model with each execution, and the same weights regrouped into one branch."""
    Model(name=name, image_size=settings.image_size).require_vit("--models")
    model = Model(name=name, image_size=settings.image_size, layerscale=1e-4)
    if model.shape.branches == 1:
        raise ConfigError(f"--models {name}: one branch leaves nothing to compare, choose for example vit_s18x2_16")
    torch.manual_seed(0)
    parallel = ViT(model)
    nets = {"seq": regroup(parallel, 1)}
    for execution in (*EXECUTIONS, "auto"):
        nets[execution] = ViT(model)
        nets[execution].load_state_dict(parallel.state_dict())
        nets[execution].execution = execution
    for net in nets.values():
        net.train(settings.train).to(device)
    return nets


def _compiled(networks: Mapping[str, ViT], settings: BranchesSettings) -> dict[str, Callable[[Tensor], Tensor]]:
    if not settings.compile:
        return dict(networks)
    mode: Any = settings.compile
    torch.compiler.reset()  # after 8 shapes and networks torch would run the others uncompiled
    return {variant: torch.compile(network, dynamic=False, mode=mode) for variant, network in networks.items()}


def _measure(
    variants: dict[str, Callable[[Tensor], Tensor]], batch: int, settings: BranchesSettings, device: torch.device
) -> dict[str, list[float]]:
    images = torch.randn(batch, 3, settings.image_size, settings.image_size, device=device)
    is_bf16 = settings.dtype == "bf16"

    def step(net: Callable[[Tensor], Tensor]) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            out = net(images)
        if settings.train:
            out.sum().backward()
            if isinstance(net, nn.Module):
                net.zero_grad()  # kept gradients would be memory of a CUDA graph, which the next pass overwrites

    calls: dict[str, Callable[[], object]] = {variant: partial(step, net) for variant, net in variants.items()}
    # In inference all calls share one context, which casts the weights once, as `fused` does without it.
    shared = torch.autocast(device.type, torch.bfloat16, enabled=is_bf16 and not settings.train)
    with torch.set_grad_enabled(settings.train), shared:
        for name in variant_names(settings, device)[len(VARIANTS) :]:
            calls[name] = capture(calls[name.removesuffix("_graph")])
        return interleave(calls, settings.rounds, settings.seconds, device, batch)
