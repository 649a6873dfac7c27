"""python experiments/plain_loop.py IMAGES: `vitray train`, with and without Ray, beside a plain loop of timm and torch.

All train the same network on the same images with the same augmentation, schedule and compute threads; IMAGES is a
folder of class folders of small images. Vitray's times include its evaluations, MLflow's records, checkpoints and the
registered model, those of the loop one evaluation an epoch and a file of weights. `--loop` is that loop itself.

Each command starts anew in each round. CPU seconds are those of the whole machine, which must do nothing else.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from vitray.system.scratch import temporary_folder
from vitray.system.timing import circumstances, in_rounds, ratio_of, spread_of

BATCH, THREADS, MEAN, STD = 32, 1, 0.3, 0.36
RECIPE = f"""
seed: 1
model: {{name: vit_u4x1_4, image_size: 32, pool: mean, class_token: false}}
task: {{kind: supervised, smoothing: 0.1}}
data:
  url: data
  augment: {{crop: {{kind: random_resized, scale: [0.5, 1.0]}}, flip: 0.5}}
  normalize: {{mean: [{MEAN}, {MEAN}, {MEAN}], std: [{STD}, {STD}, {STD}]}}
  eval_crop: {{crop_ratio: 1.0}}
optim: {{batch: {BATCH}, warmup: 1 epoch, lr: 1e-3, rule: adamw, weight_decay: 0.05, clip: 1.0}}
compute: {{workers: 1, cpus: {THREADS}, device: cpu, compile: false}}
tracking: {{register_as: plain}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="a folder of class folders")
    parser.add_argument("--epochs", type=int, default=6, help="of each training (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (%(default)s)")
    parser.add_argument("--loop", action="store_true", help="run the plain loop, and measure nothing")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    options = parser.parse_args()
    if options.loop:
        train_plainly(options.images, options.epochs)
    else:
        measure(options)


# ---- the loop --------------------------------------------------------------------------------------------------------


def train_plainly(images: Path, epochs: int) -> None:
    """Train as one would without a library of training."""
    import timm
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Subset
    from torchvision import datasets
    from torchvision import transforms as T

    torch.manual_seed(1)
    torch.set_num_threads(THREADS)
    rest = [T.ToTensor(), T.Normalize([MEAN] * 3, [STD] * 3)]
    bicubic = T.InterpolationMode.BICUBIC
    crop = [T.RandomResizedCrop(32, (0.5, 1.0), interpolation=bicubic), T.RandomHorizontalFlip()]
    train = datasets.ImageFolder(images, T.Compose([*crop, *rest]))
    val = datasets.ImageFolder(images, T.Compose([T.Resize(32, bicubic), T.CenterCrop(32), *rest]))
    order = torch.randperm(len(train)).tolist()
    cut = len(order) // 5
    loader = partial(DataLoader, num_workers=1, persistent_workers=True)
    train_loader = loader(Subset(train, order[cut:]), BATCH, shuffle=True, drop_last=True)
    val_loader = loader(Subset(val, order[:cut]), 2 * BATCH)
    network = timm.models.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=2, class_token=False, global_pool="avg",
        num_classes=len(train.classes),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, weight_decay=0.05)
    steps, warmup = epochs * len(train_loader), len(train_loader)

    def factor(step: int) -> float:
        share = max(0.0, (step - warmup) / max(1, steps - warmup))
        return min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * share)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    step = 0
    for _ in range(epochs):
        network.train()
        for x, y in train_loader:
            loss = criterion(network(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step == 1:
                print(f"step 1/{steps}", file=sys.stderr, flush=True)
        network.eval()
        with torch.inference_mode():
            right = sum(int((network(x).argmax(1) == y).sum()) for x, y in val_loader)
        print(f"step {step}/{steps}  val top-1 {right / cut:.2%}", file=sys.stderr, flush=True)
    torch.save(network.state_dict(), "plain.pt")


# ---- the comparison --------------------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """One training, in seconds."""

    wall: float
    cpu: float
    first_step: float
    """From the start of the process."""
    epochs: float
    """From the first step to the last evaluation."""
    rest: float
    """From there to the end of the process."""
    top1: float
    """In percent."""


def measure(options: argparse.Namespace) -> None:
    """Train in turns, and print the table."""
    vitray, here = [sys.executable, "-m", "pipelines"], os.getcwd()
    images, environment = options.images.absolute(), os.environ | {"PYTHONPATH": here}
    with temporary_folder() as folder:
        (folder / "recipe.yaml").write_text(RECIPE)
        call = partial(subprocess.run, cwd=folder, env=environment, check=True, capture_output=True)
        call([*vitray, "shard", str(images), "data", "--split", "train", "--split", "val=0.2", "kind=folder"])
        train = [*vitray, "train", "recipe.yaml", f"optim.duration={options.epochs} epochs"]
        loop = [sys.executable, str(Path(__file__).absolute()), str(images), "--epochs", str(options.epochs), "--loop"]
        commands = {"plain loop": loop, "vitray train --here": [*train, "--here"], "vitray train": train}

        def timed(name: str, number: int) -> Timing:
            named = ["--name", f"{name.replace(' ', '')}-{number}"] if name != "plain loop" else []
            return time_training([*commands[name], *named], folder, environment)

        results = in_rounds({name: partial(timed, name) for name in commands}, options.rounds, warm_up=1, shown=True)
    import torch

    print(f"\n{circumstances(torch.device('cpu'), THREADS)}")
    print(f"{images.name}, {options.epochs} epochs; {options.rounds} interleaved rounds, median ± half the IQR\n")
    table = {}
    for name, timings in results.items():
        columns = {field: [getattr(each, field) for each in timings] for field in Timing._fields}
        plain = {field: [getattr(each, field) for each in results["plain loop"]] for field in Timing._fields}
        table[name] = {field: spread_of(values) for field, values in columns.items()}
        table[name] |= {f"{field}_ratio": ratio_of(columns[field], plain[field]) for field in ("wall", "cpu", "epochs")}
    fields = list(table["plain loop"])
    print("".join([f"{'':<22}", *(f"{field:>16}" for field in fields)]))
    for name, row in table.items():
        print("".join([f"{name:<22}", *(f"{row[field]!s:>16}" for field in fields)]))
    if options.json:
        print(json.dumps({name: {field: row[field]._asdict() for field in fields} for name, row in table.items()}))


def time_training(command: Sequence[str], folder: Path, environment: dict[str, str]) -> Timing:
    """Run a training and read its times off its lines."""
    before, start = busy_seconds(), time.perf_counter()
    first = evaluated = top1 = math.nan
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            now = time.perf_counter() - start
            lines.append(line)
            if math.isnan(first) and "step " in line:
                first = now
            if "val top-1" in line and "step" in line:
                evaluated, top1 = now, float(line.split("top-1 ")[1].split("%")[0])
    assert process.returncode == 0, "".join(lines)
    wall = time.perf_counter() - start
    time.sleep(2)  # processes of Ray end a little later, and count
    return Timing(wall, busy_seconds() - before, first, evaluated - first, wall - evaluated, top1)


def busy_seconds() -> float:
    """Return the CPU seconds of this machine since its boot."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


if __name__ == "__main__":
    main()
