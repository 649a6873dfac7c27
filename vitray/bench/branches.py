"""Three things, Table 4, on this machine: parallel branches in sequence, in a loop, fused, and as `auto` chooses."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitray.bench.results import Results
from vitray.config import Model
from vitray.errors import ConfigError
from vitray.models.blocks import most_fused
from vitray.models.graphs import capture
from vitray.models.vit import ViT, regroup
from vitray.system.timing import circumstances, interleave, progress, ratio_of, spread_of
from vitray.training.compiling import compiled

# Of the same network, between which `auto` chooses. The same blocks in sequence are another network.
EXECUTIONS = ("loop", "fused")
VARIANTS = ("seq", *EXECUTIONS, "auto")
GRAPHS = ("seq_graph", "fused_graph")


def measure_branches(
    models: Sequence[str],
    batches: Sequence[int],
    image_size: int,
    dtype: str,
    compile_mode: str | bool,
    train: bool,
    rounds: int,
    seconds: float,
    out: Path,
) -> dict[str, Any]:
    """Measure every model at every batch size, print and save the table, and return its rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compiled, phase = f"compiled {compile_mode}" if compile_mode else "eager", "training" if train else "inference"
    # On a GPU also inference as a CUDA graph.
    graphs = GRAPHS if device.type == "cuda" and not train and not compile_mode else ()
    where, mode = circumstances(device), f"{dtype}, {compiled}, {phase}"
    print(f"images/s, median ± half the interquartile range of {rounds} interleaved rounds")
    print(f"{where}; {mode}, {image_size} px")
    print("gain: auto over seq, the same blocks in sequence; ratios are taken within rounds\n")
    names = "".join(f"{name:>16}" for name in (*VARIANTS, *graphs))
    print(f"{'model':<16}{'batch':>6}{names}{'gain':>15}{'auto/loop':>16}")
    stem = f"branches_{device.type}_{mode.replace(', ', '_')}_{image_size}"
    about = {"circumstances": where, "mode": mode, "image_size": image_size}
    results = Results(out / stem, device, about)
    started, steps = time.perf_counter(), len(models) * len(batches)
    for name in models:
        networks = build_variants(name, image_size, device, train=train)
        for batch in batches:
            calls = _calls(networks, batch, image_size, dtype, compile_mode, device, train=train)
            # In inference all calls share one context, which casts the weights once, as `fused` does without it.
            shared = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16" and not train)
            with torch.set_grad_enabled(train), shared:
                for graph in graphs:
                    calls[graph] = capture(calls[graph.removesuffix("_graph")])
                speeds = interleave(calls, rounds, seconds, device, batch)
            gain, over_loop = ratio_of(speeds["auto"], speeds["seq"]), ratio_of(speeds["auto"], speeds["loop"])
            row: dict[str, Any] = {"model": name, "batch": batch, "elements": elements(name, batch, image_size)}
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
    limit = fused_elements(results.rows)
    print(f"auto fuses up to {most_fused(device.type):,} elements; here the best limit is {limit:,}")
    from vitray.bench.charts import draw_ratios  # loads matplotlib

    chart = draw_ratios(results.rows, VARIANTS[1:], f"{where}\n{mode}, {image_size} px")
    return results.finish({"fused_elements": limit}, chart)


def elements(name: str, batch: int, image_size: int) -> int:
    """Return branches * rows * width of a level's input, by which `auto` decides."""
    model = Model(name=name, image_size=image_size)
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


def build_variants(name: str, image_size: int, device: torch.device, *, train: bool) -> dict[str, ViT]:
    """Return the model with each execution, and the same weights regrouped into one branch."""
    Model(name=name, image_size=image_size).require_vit("--models")
    model = Model(name=name, image_size=image_size, layerscale=1e-4)
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
        net.train(train).to(device)
    return nets


def _calls(
    networks: Mapping[str, ViT],
    batch: int,
    image_size: int,
    dtype: str,
    compile_mode: str | bool,
    device: torch.device,
    *,
    train: bool,
) -> dict[str, Callable[[], object]]:
    """Return a pass of each network over the same images; `loop` and `auto` are compiled alike."""
    images = torch.randn(batch, 3, image_size, image_size, device=device)
    variants: dict[str, Callable[[Tensor], Tensor]] = dict(networks)
    if compile_mode:
        torch.compiler.reset()  # after 8 shapes and networks torch would run the others uncompiled
        variants = {name: compiled(network, str(compile_mode), dynamic=False) for name, network in networks.items()}

    def step(net: Callable[[Tensor], Tensor]) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
            out = net(images)
        if train:
            out.sum().backward()
            if isinstance(net, nn.Module):
                net.zero_grad()  # kept gradients would be memory of a CUDA graph, which the next pass overwrites

    return {name: partial(step, net) for name, net in variants.items()}
