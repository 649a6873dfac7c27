"""timm's own train.py (`FAULTS_TIMM`, its path), with a record of the images of each step; nothing else is changed."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import timm.data
import timm.models
import torch
from recording import DATA, OUT, RECORDER, SETTINGS, save_final
from torchvision.datasets import ImageFolder

plain_dataset, plain_resume = timm.data.create_dataset, timm.models.resume_checkpoint
STEPS_PER_EPOCH = SETTINGS["steps"] // SETTINGS["epochs"]


class Images(ImageFolder):
    """The training images; without worker processes and prefetcher, a read image is trained on in the next step."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Return an image and its label."""
        RECORDER.see([int(Path(self.imgs[index][0]).stem)])
        return super().__getitem__(index)


def create_dataset(name: str, root: Any, split: str = "validation", **rest: Any) -> Any:
    """Return timm's dataset, or the recorded images for training; timm sets their transform."""
    if rest.get("is_training"):
        return Images(str(DATA / "folder" / "train"))
    return plain_dataset(name, root=root, split=split, **rest)


def resume_checkpoint(model: Any, checkpoint_path: str, *rest: Any, **more: Any) -> Any:
    """Resume as timm does, and tell the recorder at which step the weights are."""
    epoch = plain_resume(model, checkpoint_path, *rest, **more)
    RECORDER.step = epoch * STEPS_PER_EPOCH
    return epoch


timm.data.create_dataset, timm.models.resume_checkpoint = create_dataset, resume_checkpoint
sys.path.insert(0, str(Path(os.environ["FAULTS_TIMM"]).parent))
runpy.run_path(os.environ["FAULTS_TIMM"], run_name="__main__")
last = OUT / "faults" / "last.pth.tar"
if os.environ.get("RANK", "0") == "0" and RECORDER.step == SETTINGS["steps"]:
    save_final(torch.load(last, weights_only=True, map_location="cpu")["state_dict"])
