"""Networks side by side, by default those of the ViT paper's figure 13, and the forward pass of small batches."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitray.bench.results import Results
from vitray.config import Model, load_run
from vitray.errors import ConfigError
from vitray.models.counts import count
from vitray.models.graphs import capture
from vitray.models.network import build_network
from vitray.system.timing import Spread, circumstances, interleave, progress, ratio_of, spread_of
from vitray.training.compiling import compiled


def measure_networks(
    models: Sequence[str],
    batch: int,
    image_size: int,
    dtype: str,
    compile_mode: str | bool,
    train: bool,
    rounds: int,
    seconds: float,
    out: Path,
) -> dict[str, Any]:
    """Measure every network, print and save the table, and return its rows.

    A model is a name with settings after a colon, as in vit_b24x1_32:attention=axial:pool=mean; the first is the
    reference.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = {text: model_of(text, image_size) for text in models}
    if len(settings) < len(models):
        raise ConfigError("--models: got a network twice, expected each once")
    counts = {}
    for text, model in settings.items():
        progress(f"counts of {text}, {len(counts) + 1} of {len(settings)}")
        counts[text] = count(model)
    if compile_mode:  # past this limit torch would run the other networks uncompiled
        torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, len(settings))
    steps = {text: _step(model, batch, dtype, compile_mode, device, train=train) for text, model in settings.items()}
    progress(f"{rounds} rounds of {len(steps)} networks, about {seconds:g} s each")
    with torch.set_grad_enabled(train):
        speeds = interleave(steps, rounds, seconds, device, batch)
    how, phase = f"compiled {compile_mode}" if compile_mode else "eager", "training" if train else "inference"
    mode, where = f"{dtype}, {how}, {phase}, {image_size} px, batch {batch}", circumstances(device)
    stem = f"networks_{device.type}_{mode.replace(', ', '_').replace(' ', '')}"
    results = Results(out / stem, device, {"circumstances": where, "mode": mode})
    for text in settings:
        row: dict[str, Any] = {"network": text, **counts[text]._asdict(), "accuracy": None}
        row |= spread_of(speeds[text]).columns("images_per_second", 3)
        results.add(row | ratio_of(speeds[text], speeds[models[0]]).columns("speed", 4))
    print(f"images/s, median ± half the interquartile range of {rounds} interleaved rounds; speed: over {models[0]}")
    print(f"{where}; {mode}; training is the forward and backward pass")
    print("GFLOPs: multiply-adds of an image; memory: activations of an fp32 image in training, from shapes")
    print(f"accuracy (figure 13: ImageNet, 5-shot, after JFT): not measured\n\n{markdown_table(results.rows)}")
    bars = {row["network"]: row["images_per_second"] for row in results.rows}
    from vitray.bench.charts import draw_bars  # loads matplotlib

    return results.finish(chart=draw_bars(bars, "images/s", f"{where}\n{mode}"))


def model_of(text: str, image_size: int) -> Model:
    """Return the settings of a network, from NAME[:SETTING=VALUE ...]."""
    name, *changes = re.split(r":(?=[a-z_.]+=)", text)
    overrides = [f"name={name}", f"image_size={image_size}", *changes]
    return load_run(None, [f"model.{override}" for override in overrides]).model


def _step(
    model: Model, batch: int, dtype: str, compile_mode: str | bool, device: torch.device, *, train: bool
) -> Callable[[], None]:
    """Return one forward pass of a batch; in training, the backward pass too."""
    torch.manual_seed(0)
    network = compiled(
        build_network(model).train(train).to(device), str(compile_mode) if compile_mode else None, dynamic=False
    )
    images_BCHW = torch.randn(batch, 3, *model.image_shape, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
            out = network(images_BCHW)
        if train:
            out.sum().backward()
            network.zero_grad()  # kept gradients would be memory of a CUDA graph, which the next pass overwrites

    return step


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [["network", "M parameters", "GFLOPs", "MB/image", "images/s", "speed", "accuracy"], ["---"] * 7]
    for row in rows:
        spread = Spread(row["images_per_second"], row["images_per_second_spread"])
        speed = f"{row['speed']:.2f} ± {row['speed_spread']:.2f}"
        sizes = f"{row['params'] / 1e6:.1f}", f"{row['gflops']:.2f}", f"{row['activation_bytes'] / 1e6:.0f}"
        lines.append([row["network"], *sizes, str(spread), speed, "not measured"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---- the latency of small batches ------------------------------------------------------------------------------------


def measure_latency(
    models: Sequence[str],
    batches: Sequence[int],
    image_size: int,
    dtype: str,
    compile_mode: str | bool,
    rounds: int,
    seconds: float,
    out: Path,
) -> dict[str, Any]:
    """Measure every model at every batch size: eager, compiled on request, and on a GPU as a CUDA graph."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where, about = circumstances(device), f"{dtype}, {image_size} px"
    print(f"ms of a forward pass, median ± half the interquartile range of {rounds} interleaved rounds")
    print(f"{where}; {about}\n")
    stem = f"latency_{device.type}_{dtype}" + (f"_{compile_mode}" if compile_mode else "")
    results = Results(out / stem, device, {"circumstances": where, "about": about})
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16")
    for name in models:
        network = build_network(Model(name=name, image_size=image_size)).to(device).eval()
        for batch in batches:
            progress(f"{name}, batch {batch}")
            images = torch.randn(batch, 3, image_size, image_size, device=device)
            images = images.to(memory_format=torch.channels_last)  # as batches are
            calls: dict[str, Callable[[], object]] = {"eager": partial(network, images)}
            if compile_mode:
                torch.compiler.reset()  # after 8 shapes torch would run the network uncompiled
                calls["compiled"] = partial(compiled(network, str(compile_mode), dynamic=False), images)
            with torch.inference_mode(), autocast:
                if device.type == "cuda":
                    calls["graph"] = capture(calls["eager"])
                speeds = interleave(calls, rounds, seconds, device)
            times = {variant: [1e3 / speed for speed in values] for variant, values in speeds.items()}
            row: dict[str, Any] = {"model": name, "batch": batch}
            for variant, milliseconds in times.items():
                row |= spread_of(milliseconds).columns(f"{variant}_ms", 5)
                row |= ratio_of(times["eager"], milliseconds).columns(f"{variant}_gain", 4)
            results.add(row)
            texts = (f"{variant} {spread_of(milliseconds)}" for variant, milliseconds in times.items())
            print(f"{name:<18}{batch:>5}  {', '.join(texts)}", flush=True)
    return results.finish()
