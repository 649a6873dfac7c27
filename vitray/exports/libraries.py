"""Exports to timm, torchvision and Hugging Face, and their runners."""

import json
import runpy
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from vitray.config import Run
from vitray.data.augment.mixing import normalized
from vitray.exports.parity import Runner
from vitray.exports.preparation import image_processor_of
from vitray.models.network import AnyNetwork
from vitray.models.probabilities import probability_of
from vitray.weights.export import LOADER, write_library


def _complete_hf(vit: AnyNetwork, run: Run, folder: Path) -> None:
    """Write the preparation of images, and let the pipelines of Hugging Face answer with the run's probabilities."""
    if processor := image_processor_of(run, vit.model.image_shape):
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
    if probability_of(run) == "sigmoid":
        config = folder / "config.json"
        content = json.loads(config.read_text()) | {"problem_type": "multi_label_classification"}
        config.write_text(json.dumps(content, indent=2))


# What a library reads beside the network.
COMPLETED = {"hf": _complete_hf}


def write_for_library(vit: AnyNetwork, run: Run, layout: str, folder: Path, classes: Sequence[str] | None) -> Runner:
    """Write a network for a library and return a runner of the network that the written program loads."""
    write_library(vit, layout, folder, classes)
    if layout in COMPLETED:
        COMPLETED[layout](vit, run, folder)
    network = runpy.run_path(str(folder / LOADER))["model"].eval()

    def logits_of(images_BCHW: Tensor) -> Tensor:
        output = network(normalized(images_BCHW.permute(0, 2, 3, 1), run.data.normalize))
        return getattr(output, "logits", output)

    return logits_of
