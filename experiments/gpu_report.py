"""python -m experiments.gpu_report [--minutes 8]: what one GPU does, in experiments/gpu.json and docs/gpu.md.

It runs from a bare checkout, on a machine that has torch, torchvision, numpy, pyarrow, Pillow, PyYAML, psutil,
safetensors and pydantic alone. The parts come in the order of their worth; each row is printed and saved at once, so
that a run that is cut off leaves what it has. Without a GPU everything runs at toy size, for --out alone. `--page`
writes docs/gpu.md from experiments/gpu.json.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments.gpu_page import page
from vitray.bench.branches import build_variants, elements, fused_elements
from vitray.bench.finetune import Variant
from vitray.bench.finetune import recipe as finetune_recipe
from vitray.bench.train import fed_steps, peak_bytes, random_batch, recipe, training_step, utilization
from vitray.config import Model, Run
from vitray.data.shards.manifest import Dataset
from vitray.errors import one_line
from vitray.models.graphs import GraphedNetwork, capture
from vitray.models.network import build_network
from vitray.models.precision import round_products
from vitray.runs.local_host import LocalHost
from vitray.runs.resolve import resolve
from vitray.runs.worker_mailbox import Mailbox
from vitray.system import host_facts
from vitray.system.timing import interleave, ratio_of, spread_of
from vitray.training.loop import train_loop
from vitray.training.messages import Metrics

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "gpu.md"
THRESHOLDS = HERE.parent / "vitray" / "models" / "auto_thresholds.json"
STEMS = ("hmlp_bn", "hmlp_ln", "conv", "local")
# As DeiT III trains; LAMB where a part says so.
DEIT = {"model.layerscale": 1e-4, "model.drop_path": 0.1}

Row = Mapping[str, Any]


class Size(NamedTuple):
    """What is measured."""

    small: str
    base: str
    large: str
    wide: Sequence[str]
    """Networks with parallel branches."""
    pixels: int
    large_pixels: int
    """Of a fine-tuning."""
    batches: Mapping[str, int]
    """Of a training step, by network; 64 for others."""
    small_batches: Sequence[int]
    dtype: str
    rounds: int
    seconds: float
    """Of a variant in a round."""
    steps: int
    """Of the whole run."""


FULL = Size(
    small="vit_s12x1_16",
    base="vit_b12x1_16",
    large="vit_l24x1_16",
    wide=("vit_s18x2_16", "vit_b18x2_16"),
    pixels=224,
    large_pixels=384,
    batches={"vit_s12x1_16": 256, "vit_b12x1_16": 256, "vit_l24x1_16": 128},
    small_batches=(1, 8, 64),
    dtype="bf16",
    rounds=5,
    seconds=0.3,
    steps=400,
)
TOY = Size(
    small="vit_u1x1_8",
    base="vit_u1x1_8",
    large="vit_u1x1_8",
    wide=("vit_u1x2_8",),
    pixels=32,
    large_pixels=48,
    batches={"vit_u1x1_8": 4},
    small_batches=(1, 2),
    dtype="fp32",
    rounds=2,
    seconds=0.01,
    steps=12,
)


class Bench(NamedTuple):
    """The size, the device, and the end of the time."""

    size: Size
    device: torch.device
    end: float

    @property
    def has_time(self) -> bool:
        """Whether time is left for a row that has no share of its own."""
        return time.monotonic() < self.end

    def run(self, network: str, batch: int | None = None, compile_mode: str | bool = False) -> Run:
        """Return the run of a training step."""
        size = self.size
        return recipe(network, batch or size.batches.get(network, 64), size.pixels, size.dtype, compile_mode)

    def speeds(self, variants: Mapping[str, Callable[[], object]], images: int = 1) -> dict[str, list[float]]:
        """Return the images per second of each variant and round."""
        return interleave(variants, self.size.rounds, self.size.seconds, self.device, images)


# ---- the parts, in the order of their worth --------------------------------------------------------------------------


def steps(bench: Bench, compile_mode: str | bool = False) -> Iterator[Row]:
    """Training steps of S, B and L, with MFU and peak memory."""
    for network in dict.fromkeys([bench.size.small, bench.size.base, bench.size.large]):
        if not bench.has_time:
            return
        run = bench.run(network, compile_mode=compile_mode).replace(DEIT)
        began = time.perf_counter()
        step = training_step(run, random_batch(run, bench.device))[1]
        step()
        first = time.perf_counter() - began
        speed = spread_of(bench.speeds({"step": step}, run.optim.batch)["step"])
        row = {"network": network, "batch": run.optim.batch, **speed.columns("images_per_second", 2)}
        row |= {"mfu": utilization(run, speed.median, bench.device), "first_step_s": round(first, 1)}
        yield row if compile_mode else row | {"peak_bytes": peak_bytes(run, bench.device)}


def compiled(bench: Bench) -> Iterator[Row]:
    """The same steps compiled; a toy is too small to be worth a compiler."""
    if bench.size is FULL:
        yield from steps(bench, "default")


def branches(bench: Bench) -> Iterator[Row]:
    """The forward pass of parallel branches: one by one, fused, as CUDA graphs, and the blocks in sequence."""
    for network in bench.size.wide:
        nets = build_variants(network, bench.size.pixels, bench.device, train=False)
        for batch in bench.size.small_batches:
            images = torch.randn(batch, 3, bench.size.pixels, bench.size.pixels, device=bench.device)
            calls: dict[str, Callable[[], object]] = {
                name: lambda net=net, images=images: net(images) for name, net in nets.items()
            }
            with torch.inference_mode(), autocast(bench):
                if bench.device.type == "cuda":
                    calls |= {f"{name}_graph": capture(calls[name]) for name in ("seq", "loop", "fused")}
                speeds = bench.speeds(calls, batch)
            row: dict[str, Any] = {"network": network, "batch": batch}
            row |= {name: round(spread_of(values).median, 2) for name, values in speeds.items()}
            row |= ratio_of(speeds["auto"], speeds["seq"]).columns("auto_over_seq", 3)
            yield row | {"elements": elements(network, batch, bench.size.pixels)}


def drop_path(bench: Bench) -> Iterator[Row]:
    """A step of B at a rate of 0.4, where samples are left out one by one or as a share, and without drop path."""
    changes = {"none": {"model.drop_path": 0.0}, "sample": {}, "share": {"model.drop_path_draw": "share"}}
    yield from _compared(
        bench, bench.size.base, {name: {"model.drop_path": 0.4} | each for name, each in changes.items()}
    )


def optimizers(bench: Bench) -> Iterator[Row]:
    """A step of S by AdamW and by LAMB."""
    rules = {"adamw": "adamw", "lamb": "lamb"}
    yield from _compared(bench, bench.size.small, {name: {"optim.rule": rule} for name, rule in rules.items()})


def stems(bench: Bench) -> Iterator[Row]:
    """A step of S with each stem, on patches of 16."""
    names = {"linear": bench.size.small}
    if bench.size is FULL:
        names |= {stem: f"{bench.size.small}_{stem}" for stem in STEMS}
    yield from _compared(bench, bench.size.small, {stem: {"model.name": name} for stem, name in names.items()})


def _compared(bench: Bench, network: str, variants: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """Yield the speed of a step with each of some settings, over that of the first."""
    runs = {name: bench.run(network, 64).replace(DEIT | changes) for name, changes in variants.items()}
    calls = {name: training_step(run, random_batch(run, bench.device))[1] for name, run in runs.items()}
    speeds = bench.speeds(calls, next(iter(runs.values())).optim.batch)
    first = next(iter(speeds.values()))
    for name, values in speeds.items():
        row = {"network": network, "variant": name, **spread_of(values).columns("images_per_second", 2)}
        yield row | ratio_of(values, first).columns("speed", 3)


def residual(bench: Bench) -> Iterator[Row]:
    """A step of S, B and L whose blocks add in bf16, over one whose blocks add in fp32."""
    for network in dict.fromkeys([bench.size.small, bench.size.base, bench.size.large]):
        yield from _compared(bench, network, {name: {"model.residual": name} for name in ("fp32", "bf16")})


def attention_only(bench: Bench) -> Iterator[Row]:
    """A fine-tuning step of B, of all weights and of attention alone."""
    batch = bench.size.batches.get(bench.size.base, 64) // 4
    modes = {}
    for mode in ("full", "attn"):
        run = finetune_recipe(bench.size.base, mode, batch, bench.size.large_pixels, bench.size.dtype)
        modes[mode] = Variant(run, bench.device)
    speeds = bench.speeds({mode: variant.step for mode, variant in modes.items()})
    for mode, values in speeds.items():
        row = {"network": bench.size.base, "batch": batch, "variant": mode}
        row |= spread_of([1 / value for value in values]).columns("seconds", 5)
        yield row | ratio_of(speeds["full"], values).columns("time", 3)


def latency(bench: Bench) -> Iterator[Row]:
    """The forward pass of small batches in bf16: fp32 weights, weights kept in bf16, and these as a CUDA graph."""
    for network in dict.fromkeys([bench.size.small, bench.size.base, bench.size.large]):
        model = Model(name=network, image_size=bench.size.pixels)
        plain, rounded = (build_network(model).to(bench.device).eval().requires_grad_(False) for _ in range(2))
        round_products(rounded)
        networks: dict[str, Callable[..., object]] = {"autocast_ms": plain, "bf16_ms": rounded}
        if bench.device.type == "cuda":
            networks["graph_ms"] = GraphedNetwork(rounded)
        for batch in bench.size.small_batches:
            images = torch.randn(batch, 3, bench.size.pixels, bench.size.pixels, device=bench.device)
            calls: dict[str, Callable[[], object]] = {
                name: partial(network, images) for name, network in networks.items()
            }
            with torch.inference_mode(), torch.autocast(bench.device.type, torch.bfloat16):
                speeds = bench.speeds(calls)
            medians = {name: round(1e3 / spread_of(values).median, 4) for name, values in speeds.items()}
            yield {"network": network, "batch": batch, **medians}


def augmentation(bench: Bench) -> Iterator[Row]:
    """Steps of S whose batches the device augments (3-Augment), over steps with plain crops."""
    run = bench.run(bench.size.small).replace({"data.augment.policy": "three_augment", "data.augment.on": "device"})
    with fed_steps(run, bench.device) as calls:
        speeds = interleave(calls, bench.size.rounds, bench.size.seconds, bench.device, run.optim.batch, 4)
    ratio = ratio_of(speeds["augmented"], speeds["crops"])
    row = {"network": bench.size.small, **spread_of(speeds["augmented"]).columns("images_per_second", 2)}
    yield row | ratio.columns("speed", 3)


def whole_run(bench: Bench) -> Iterator[Row]:
    """A run of S without Ray, by the loop of every run: checkpoints, records and prefetching, from pixels in memory."""
    run = bench.run(bench.size.small)
    run = run.replace({"optim.duration": f"{bench.size.steps} steps", "optim.warmup": "1 steps", "data.url": "pixels"})
    run = run.replace({"data.val": None, "tracking.every": f"{bench.size.steps // 4} steps"})
    dataset = in_memory(4 * run.optim.batch)
    resolved, mailbox = resolve(run.replace({"model.num_classes": len(dataset.classes)}), dataset), Mailbox()
    with tempfile.TemporaryDirectory(prefix="vitray-") as folder:
        host = LocalHost(
            resolved,
            folder,
            "",
            place=(0, 1),
            device=bench.device,
            threads=torch.get_num_threads(),
            decoders=Pixels(resolved.run.model.image_shape),  # pyright: ignore[reportArgumentType]
            initial=None,
            is_stop_requested=lambda: False,
            mailbox=mailbox,
        )
        with closing(host):
            train_loop(resolved, folder, host)
    speeds = [
        message.values["train/images_per_second"]
        for message in mailbox.take()
        if isinstance(message, Metrics) and "train/images_per_second" in message.values
    ]
    # The first record has the start.
    yield {"network": bench.size.small, **spread_of(speeds[1:]).columns("images_per_second", 2)}


class Pixels:
    """Decoded images of one process, in place of the processes that decode a dataset's."""

    def __init__(self, shape: tuple[int, int]) -> None:
        rng = np.random.default_rng(0)
        self._images = rng.integers(0, 256, (64, *shape, 3), np.uint8)

    def __len__(self) -> int:
        return 1

    def new_stream(self) -> int:
        """Return the number of a stream, as those of one process need none."""
        return 0

    def submit(self, place: int, number: int, source: Any, epoch: int, positions: np.ndarray) -> Future[Any]:
        """Return the columns of the images at some positions of an epoch."""
        del place, number, source, epoch
        rows, future = positions % len(self._images), Future[Any]()
        none = np.full(len(rows), -1)
        future.set_result(
            {"image": self._images[rows], "label": rows % 10, "position": positions, "row": rows, "corrupt": none}
        )
        return future


def in_memory(images: int) -> Dataset:
    """Return the description of a dataset without files."""
    shard = {"name": "none", "rows": images, "bytes": 1, "sha256": "0" * 64, "row_groups": [images]}
    counts = [images // 10 + (label < images % 10) for label in range(10)]
    return Dataset.model_validate_json(
        json.dumps(
            {
                "splits": {"train": {"shards": [shard], "class_counts": counts}},
                "classes": [str(label) for label in range(10)],
                "mean": [0.5] * 3,
                "std": [0.25] * 3,
                "source": "random pixels",
                "seed": 0,
                "settings": {},
                "rejects": {"count": 0, "reasons": {}},
                "duplicates": {"within": {}, "across": 0, "removed": 0},
            }
        )
    ).model_copy(update={"url": "pixels"})


def autocast(bench: Bench) -> torch.autocast:
    """Return the precision of the forward passes of a size."""
    return torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.size.dtype == "bf16")


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "steps": steps,
    "compiled": compiled,
    "branches": branches,
    "drop_path": drop_path,
    "residual": residual,
    "optimizers": optimizers,
    "attention_only": attention_only,
    "latency": latency,
    "whole_run": whole_run,
    "augmentation": augmentation,
    "stems": stems,
}

# ---- the report ------------------------------------------------------------------------------------------------------


def measure(bench: Bench, path: Path, parts: Mapping[str, Callable[[Bench], Iterator[Row]]] = PARTS) -> dict[str, Any]:
    """Measure the parts until the time is over; print each row, save all so far, and return them."""
    facts, is_gpu = host_facts.facts(), bench.device.type == "cuda"
    report: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name() if is_gpu else facts["hardware.cpu"],
        "device": bench.device.type,
        "device_bytes": torch.cuda.get_device_properties(bench.device).total_memory if is_gpu else None,
        "cores": facts["hardware.cores"],
        "versions": {name.removeprefix("version."): text for name, text in facts.items() if "version." in name},
        "commit": facts.get("git.commit"),
        "rows": [],
        "errors": {},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        if not bench.has_time:
            report["errors"][name] = "no time was left"
        else:
            try:
                for row in part(bench):
                    report["rows"].append({"part": name, **row})
                    print(json.dumps(report["rows"][-1]), flush=True)
                    path.write_text(json.dumps(report, indent=1) + "\n")
            except Exception as error:  # of memory, or of a kernel: the other parts go on
                traceback.print_exc()
                report["errors"][name] = one_line(error)[:300]
        if is_gpu:
            torch.cuda.empty_cache()
    path.write_text(json.dumps(report, indent=1) + "\n")
    return report


def with_threshold(measured: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the limits that `auto` reads, with that of this report's hardware."""
    rows = [row for row in report["rows"] if row["part"] == "branches"]
    if not rows:
        return list(measured)
    new = {name: report[name] for name in ("device", "hardware", "versions")}
    new |= {"fused_elements": fused_elements(rows), "source": "experiments/gpu_report.py, inference in bf16, 224 px"}
    others = [each for each in measured if (each["device"], each["hardware"]) != (new["device"], new["hardware"])]
    return [*others, new]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="time of all parts (%(default)s)")
    parser.add_argument("--only", help="names of parts, separated by commas; nothing but --out is written")
    parser.add_argument("--out", type=Path, help="write gpu.json and gpu.md to this folder alone")
    parser.add_argument("--toy", action="store_true", help="toy sizes, as without a GPU")
    parser.add_argument("--page", action="store_true", help="only write docs/gpu.md from experiments/gpu.json")
    options = parser.parse_args(arguments)
    if options.page:
        PAGE.write_text(page(json.loads((HERE / "gpu.json").read_text())))
        return
    is_real = torch.cuda.is_available() and not options.toy
    if not options.out and (options.only or not is_real):
        parser.error("--out: expected a folder, as only the whole report of a GPU is kept here")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(FULL if is_real else TOY, device, time.monotonic() + 60 * options.minutes)
    chosen = options.only.split(",") if options.only else list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"--only: got {unknown[0]}, expected some of {', '.join(PARTS)}")
    report = measure(bench, (options.out or HERE) / "gpu.json", {name: PARTS[name] for name in chosen})
    (options.out / "gpu.md" if options.out else PAGE).write_text(page(report))
    if not options.out:
        measured = with_threshold(json.loads(THRESHOLDS.read_text()), report)
        THRESHOLDS.write_text(json.dumps(measured, indent=1) + "\n")
    if report["errors"]:
        sys.exit(f"without a result: {', '.join(report['errors'])}")


if __name__ == "__main__":
    main()
