"""Seed 000's Table 4 on this machine: parallel branches run sequentially, one by one, fused, and as `auto` decides."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitray.bench.rounds import circumstances, interleave, progress, ratio_of, spread_of, write_csv
from vitray.config import Model
from vitray.errors import ConfigError
from vitray.models.vit import ViT, regroup

VARIANTS = ("seq", "loop", "fused", "auto")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Settings(NamedTuple):
    """What is measured, and how long."""

    models: Sequence[str]
    batches: Sequence[int]
    image_size: int = 224
    dtype: str = "fp32"
    compile: bool = False
    train: bool = False
    rounds: int = 7
    seconds: float = 0.5
    out: Path = Path("bench_out")


def measure_branches(settings: Settings) -> dict[str, Any]:
    """Measure every model at every batch; print the table, write a CSV and a picture, return the rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    header = (
        f"{'model':<16}{'batch':>6}" + "".join(f"{name:>16}" for name in VARIANTS) + f"{'gain':>15}{'auto/loop':>16}"
    )
    print(f"images/s, median ± half the interquartile range of {settings.rounds} interleaved rounds")
    print(f"{circumstances(device)}; {_mode(settings)}, {settings.image_size} px")
    print(f"gain: auto over seq, the same blocks one after another; ratios are taken within rounds\n\n{header}")
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
    _draw(files[1], rows, f"{circumstances(device)}\n{_mode(settings)}, {settings.image_size} px")
    print(f"\nwrote {files[0]} and {files[1]}")
    return {
        "circumstances": circumstances(device),
        "mode": _mode(settings),
        "rows": rows,
        "files": list(map(str, files)),
    }


def build_variants(name: str, settings: Settings, device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    """The model in each execution, and the same weights regrouped to one branch."""
    model = Model(name=name, image_size=settings.image_size, layerscale=1e-4)
    if model.shape.branches == 1:
        raise ConfigError(f"--models {name}: one branch leaves nothing to compare, wanted for example vit_s18x2_16")
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
    variants: dict[str, Callable[[Tensor], Tensor]], batch: int, settings: Settings, device: torch.device
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


def _mode(settings: Settings) -> str:
    words = [settings.dtype, "compiled" if settings.compile else "eager", "training" if settings.train else "inference"]
    return ", ".join(words)


def _draw(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")  # no display is asked for
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(1, len(names), figsize=(5.5 * len(names), 4.2), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names, strict=True):
        mine = [row for row in rows if row["model"] == name]
        places = range(len(mine))
        for variant, style in zip(VARIANTS[1:], ("s-", "^-", "o-"), strict=True):
            ratio = [row[f"{variant}_over_seq"] for row in mine]
            error = [row[f"{variant}_over_seq_spread"] for row in mine]
            axis.errorbar(places, ratio, yerr=error, fmt=style, capsize=3, label=variant, alpha=0.85)
        axis.axhline(1, color="black", linewidth=1)
        axis.set(title=name, xlabel="images in a batch", xticks=list(places))
        axis.set_xticklabels([str(row["batch"]) for row in mine])
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("images/s relative to sequential")
    axes[0][0].legend()
    figure.suptitle(title, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
