"""Three things, Table 4, on this machine: parallel branches in sequence, in a loop, fused, and as `auto` chooses."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitray.bench.charts import draw_ratios
from vitray.bench.rounds import circumstances, interleave, progress, ratio_of, spread_of, write_csv
from vitray.config import Model
from vitray.errors import ConfigError
from vitray.models.vit import ViT, regroup

VARIANTS = ("seq", "loop", "fused", "auto")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class BranchesSettings(NamedTuple):
    """Settings of `vitray bench branches`."""

    models: Sequence[str]
    batches: Sequence[int]
    image_size: int = 224
    dtype: str = "fp32"
    compile: bool = False
    train: bool = False
    rounds: int = 7
    seconds: float = 0.5
    out: Path = Path("bench_out")


def measure_branches(settings: BranchesSettings) -> dict[str, Any]:
    """Measure every model at every batch size, print and save the table, and return its rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    header = (
        f"{'model':<16}{'batch':>6}" + "".join(f"{name:>16}" for name in VARIANTS) + f"{'gain':>15}{'auto/loop':>16}"
    )
    print(f"images/s, median ± half the interquartile range of {settings.rounds} interleaved rounds")
    print(f"{circumstances(device)}; {_mode(settings)}, {settings.image_size} px")
    print(f"gain: auto over seq, the same blocks in sequence; ratios are taken within rounds\n\n{header}")
    started, steps = time.perf_counter(), len(settings.models) * len(settings.batches)
    for name in settings.models:
        variants = build_variants(name, settings, device)
        for batch in settings.batches:
            speeds = _measure(variants, batch, settings, device)
            rows.append(_row(name, batch, speeds))
            cells = "".join(f"{spread_of(speeds[variant])!s:>16}" for variant in VARIANTS)
            gain, over_loop = ratio_of(speeds["auto"], speeds["seq"]), ratio_of(speeds["auto"], speeds["loop"])
            print(
                f"{name:<16}{batch:>6}{cells}{gain.median - 1:>+8.0%} ± {gain.spread:<4.0%}{over_loop!s:>16}",
                flush=True,
            )
            left = (time.perf_counter() - started) / len(rows) * (steps - len(rows))
            progress(f"{len(rows)} of {steps} measured, about {left:.0f} s left")
    stem = f"branches_{device.type}_{_mode(settings).replace(', ', '_')}_{settings.image_size}"
    files = [settings.out / f"{stem}.csv", settings.out / f"{stem}.png"]
    write_csv(files[0], rows)
    draw_ratios(files[1], rows, VARIANTS[1:], f"{circumstances(device)}\n{_mode(settings)}, {settings.image_size} px")
    print(f"\nwrote {files[0]} and {files[1]}")
    return {
        "circumstances": circumstances(device),
        "mode": _mode(settings),
        "rows": rows,
        "files": list(map(str, files)),
    }


def build_variants(
    name: str, settings: BranchesSettings, device: torch.device
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the model with each execution, and the same weights regrouped into one branch."""
    model = Model(name=name, image_size=settings.image_size, layerscale=1e-4)
    if model.shape.branches == 1:
        raise ConfigError(f"--models {name}: one branch leaves nothing to compare, choose for example vit_s18x2_16")
    torch.manual_seed(0)
    parallel = ViT(model)
    nets = {"seq": regroup(parallel, 1)}
    for execution in ("loop", "fused", "auto"):
        nets[execution] = ViT(model)
        nets[execution].load_state_dict(parallel.state_dict())
        nets[execution].execution = execution
    variants: dict[str, Callable[[Tensor], Tensor]] = {}
    for variant, net in nets.items():
        net.train(settings.train).to(device)
        variants[variant] = torch.compile(net, dynamic=False) if settings.compile else net
    return variants


def _measure(
    variants: dict[str, Callable[[Tensor], Tensor]], batch: int, settings: BranchesSettings, device: torch.device
) -> dict[str, list[float]]:
    images = torch.randn(batch, 3, settings.image_size, settings.image_size, device=device)

    def step(net: Callable[[Tensor], Tensor]) -> None:
        with torch.autocast(device.type, DTYPES[settings.dtype], enabled=settings.dtype != "fp32"):
            out = net(images)
        if settings.train:
            out.sum().backward()

    calls = {variant: lambda net=net: step(net) for variant, net in variants.items()}
    with torch.set_grad_enabled(settings.train):
        speeds = interleave(calls, settings.rounds, settings.seconds, device)
    return {variant: [batch * speed for speed in rounds] for variant, rounds in speeds.items()}


def _row(name: str, batch: int, speeds: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "batch": batch}
    for variant in VARIANTS:
        images_per_second, over_seq = spread_of(speeds[variant]), ratio_of(speeds[variant], speeds["seq"])
        row |= {variant: round(images_per_second.median, 2), f"{variant}_spread": round(images_per_second.spread, 2)}
        row |= {
            f"{variant}_over_seq": round(over_seq.median, 4),
            f"{variant}_over_seq_spread": round(over_seq.spread, 4),
        }
    return row | {"auto_over_loop": round(ratio_of(speeds["auto"], speeds["loop"]).median, 4)}


def _mode(settings: BranchesSettings) -> str:
    compiled, phase = "compiled" if settings.compile else "eager", "training" if settings.train else "inference"
    return f"{settings.dtype}, {compiled}, {phase}"
