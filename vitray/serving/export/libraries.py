"""Exports to timm, torchvision and Hugging Face, and their runners."""

import runpy
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from vitray.config.augmentation import Normalise
from vitray.data.augment.batch import normalised
from vitray.models.network import AnyNetwork
from vitray.serving.export.parity import Runner
from vitray.weights.export import LOADER, write_library


def write_for_library(
    vit: AnyNetwork, layout: str, folder: Path, classes: Sequence[str] | None, normalise: Normalise
) -> Runner:
    """Write a network for a library and return a runner of the network that the written program loads."""
    write_library(vit, layout, folder, classes)
    network = runpy.run_path(str(folder / LOADER))["model"].eval()

    def run(images_BCHW: Tensor) -> Tensor:
        output = network(normalised(images_BCHW.permute(0, 2, 3, 1), normalise))
        return getattr(output, "logits", output)

    return run
