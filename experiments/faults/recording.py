"""Shared by the subjects: the network, the images, and a record of the images of each step.

The harness sets the environment: `FAULTS_SETTINGS` is a JSON object, `FAULTS_RECORD` the file that every worker
appends to, a line for each of its steps: time, process, rank, step, images.
"""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchvision import transforms
from torchvision.datasets import ImageFolder

SETTINGS = json.loads(os.environ["FAULTS_SETTINGS"])
OUT, DATA = Path(SETTINGS["out"]), Path(SETTINGS["data"])
SEED, LR = 0, 1e-3
# Crop and flip draw from torch's random state, as most users' augmentations do.
AUGMENT = transforms.Compose(
    [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)


def network() -> torch.nn.Module:
    """Return the network of `model.name=vit_u6x1_8`, as timm builds it."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 6, "num_heads": 2, "num_classes": 10}
    return timm.create_model("vit_tiny_patch16_224", **sizes)


class Recorder:
    """Writes a line for each optimizer step of this process, and paces the steps."""

    def __init__(self) -> None:
        self.images: list[int] = []
        """Those of the present step."""
        self.step = 0
        """Steps in the weights."""
        self._file = os.open(os.environ["FAULTS_RECORD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._last = 0.0
        register_optimizer_step_post_hook(self._after_step)

    def see(self, rows: Iterable[int]) -> None:
        """Note the images of the step that follows."""
        self.images += map(int, rows)

    def _after_step(self, *_: Any) -> None:
        if not self.images:  # Composer makes the optimizer's state by a step without gradients, before it loads it
            return
        rank = dist.get_rank() if dist.is_initialized() else 0
        line = " ".join(map(str, [f"{time.time():.3f}", os.getpid(), rank, self.step, *self.images]))
        os.write(self._file, f"{line}\n".encode())
        self.images = []
        self.step += 1
        time.sleep(max(0.0, self._last + SETTINGS["pace"] - time.monotonic()))
        self._last = time.monotonic()


RECORDER = Recorder()


class Images(ImageFolder):
    """The training images."""

    def __getitem__(self, index: int) -> tuple[Any, int, int]:
        """Return an image, its label and its row, which is the name of its file."""
        return *super().__getitem__(index), int(Path(self.imgs[index][0]).stem)


def training_images() -> Images:
    """Return the training images."""
    return Images(str(DATA / "folder" / "train"), AUGMENT)


def save_final(weights: dict[str, torch.Tensor]) -> None:
    """Write the weights that the harness compares."""
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, OUT / "final.safetensors")
