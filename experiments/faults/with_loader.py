"""with_loader.py LOOP: a loop of experiments/loops with a record of the images of each step.

The recorder knows a batch by its bytes when the network gets it, and the step by the optimizer's state: whatever the
framework reads ahead, a line says which images went into which step of the weights.
"""

import argparse
import os
import runpy
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import vitray

ROWS: dict[int, list[int]] = {}  # of a batch, by the checksum of its images


def checksum(images: torch.Tensor) -> int:
    """Return a number that tells batches apart."""
    return zlib.crc32(images.detach().contiguous().numpy().tobytes())


class Recorded(vitray.Loader):
    """A loader that notes the rows of its batches."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches."""
        for images, labels in super().__iter__():
            ROWS[checksum(images)] = self.rows.tolist()
            yield images, labels


def note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Tell the recorder how many steps the weights had taken before this one."""
    recording.RECORDER.step = max(int(state["step"]) for state in optimizer.state.values()) - 1


def see(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
    """Tell the recorder which images the network gets for training."""
    is_image = bool(arguments) and isinstance(arguments[0], torch.Tensor) and arguments[0].ndim == 4
    if module.training and is_image and (rows := ROWS.pop(checksum(arguments[0]), None)):
        recording.RECORDER.see(rows)


register_optimizer_step_post_hook(note_step)  # before the recorder's own
import recording  # noqa: E402

register_module_forward_pre_hook(see)
vitray.Loader = Recorded
script, out = Path(sys.argv[1]), recording.OUT
sys.argv = [str(script), *sys.argv[2:], str(recording.DATA / "demo"), str(out)]
sys.path[0] = str(script.parent)
names = runpy.run_path(str(script), run_name="__main__")
if recording.RECORDER.step == recording.SETTINGS["steps"] and os.environ["RANK"] == "0":
    last = out / "run" / "last.pth.tar"  # of timm, whose network is its own
    with torch.serialization.safe_globals([argparse.Namespace]):
        recording.save_final(
            names["vit"].state_dict() if "vit" in names else torch.load(last, weights_only=True)["state_dict"]
        )
