"""Networks side by side: parameters, multiply-adds, memory and speed; by default those of the ViT paper's figure 13."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitray.bench.charts import draw_bars, write_results
from vitray.bench.rounds import Spread, circumstances, interleave, progress, ratio_of, spread_of
from vitray.config import Model, load_run
from vitray.errors import ConfigError
from vitray.models.counts import Counts, count
from vitray.models.network import build_network


class NetworksSettings(NamedTuple):
    """Settings of `vitray bench networks`."""

    models: Sequence[str]
    """Names, each with settings after a colon, as in vit_b24x1_32:attention=axial:pool=mean; the first is the
    reference."""
    batch: int = 8
    image_size: int = 224
    dtype: str = "fp32"
    compile: str | bool = False
    """A mode of compute.compile."""
    train: bool = False
    rounds: int = 7
    seconds: float = 0.5
    out: Path = Path("bench_out")


def measure_networks(settings: NetworksSettings) -> dict[str, Any]:
    """Measure every network, print and save the table, and return its rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = {text: model_of(text, settings.image_size) for text in settings.models}
    if len(models) < len(settings.models):
        raise ConfigError("--models: got a network twice, expected each once")
    counts = {}
    for text, model in models.items():
        progress(f"counts of {text}, {len(counts) + 1} of {len(models)}")
        counts[text] = count(model)
    if settings.compile:  # past this limit torch would run the other networks uncompiled
        torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, len(models))
    steps = {text: _step(model, settings, device) for text, model in models.items()}
    progress(f"{settings.rounds} rounds of {len(steps)} networks, about {settings.seconds:g} s each")
    with torch.set_grad_enabled(settings.train):
        speeds = interleave(steps, settings.rounds, settings.seconds, device, settings.batch)
    first = settings.models[0]
    rows = [_row(text, counts[text], speeds[text], speeds[first]) for text in models]
    compiled = f"compiled {settings.compile}" if settings.compile else "eager"
    phase = "training" if settings.train else "inference"
    mode = f"{settings.dtype}, {compiled}, {phase}, {settings.image_size} px, batch {settings.batch}"
    where = circumstances(device)
    print(
        f"images/s, median ± half the interquartile range of {settings.rounds} interleaved rounds; speed: over {first}"
    )
    print(f"{where}; {mode}; training is the forward and backward pass")
    print("GFLOPs: multiply-adds of an image; memory: activations of an fp32 image in training, from shapes")
    print(f"accuracy (figure 13: ImageNet, 5-shot, after JFT): not measured\n\n{markdown_table(rows)}")
    stem = f"networks_{device.type}_{mode.replace(', ', '_').replace(' ', '')}"
    bars = {row["network"]: row["images_per_second"] for row in rows}
    chart = draw_bars(bars, "images/s", f"{where}\n{mode}")
    return {"circumstances": where, "mode": mode} | write_results(settings.out, stem, rows, chart)


def model_of(text: str, image_size: int) -> Model:
    """Return the settings of a network, from NAME[:SETTING=VALUE ...]."""
    name, *changes = re.split(r":(?=[a-z_.]+=)", text)
    overrides = [f"name={name}", f"image_size={image_size}", *changes]
    return load_run(None, [f"model.{override}" for override in overrides]).model


def _step(model: Model, settings: NetworksSettings, device: torch.device) -> Callable[[], None]:
    """Return one forward pass of a batch; in training, the backward pass too."""
    torch.manual_seed(0)
    network: Any = build_network(model).train(settings.train).to(device)
    if settings.compile:
        mode: Any = settings.compile
        network = torch.compile(network, dynamic=False, mode=mode)
    images_BCHW = torch.randn(settings.batch, 3, *model.image_shape, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bf16"):
            out = network(images_BCHW)
        if settings.train:
            out.sum().backward()
            network.zero_grad()  # kept gradients would be memory of a CUDA graph, which the next pass overwrites

    return step


def _row(text: str, counts: Counts, speeds: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    row: dict[str, Any] = {"network": text, **counts._asdict(), "accuracy": None}
    row |= spread_of(speeds).columns("images_per_second", 3)
    return row | ratio_of(speeds, reference).columns("speed", 4)


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [["network", "M parameters", "GFLOPs", "MB/image", "images/s", "speed", "accuracy"], ["---"] * 7]
    for row in rows:
        spread = Spread(row["images_per_second"], row["images_per_second_spread"])
        speed = f"{row['speed']:.2f} ± {row['speed_spread']:.2f}"
        sizes = f"{row['params'] / 1e6:.1f}", f"{row['gflops']:.2f}", f"{row['activation_bytes'] / 1e6:.0f}"
        lines.append([row["network"], *sizes, str(spread), speed, "not measured"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
