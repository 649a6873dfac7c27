"""Inspection figures of a network over a few fixed images of the evaluated split, during training and of its result."""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vitray.config import Run
from vitray.config.evaluation import NEEDS
from vitray.data.shards.manifest import Dataset
from vitray.inference.images import split_images
from vitray.inference.models import spec_of
from vitray.inspection.report.drawings import FigureResult, file_name
from vitray.inspection.report.figures import make_figure
from vitray.inspection.report.measuring import measure
from vitray.inspection.report.subjects import ChosenImages, Subject, images_of
from vitray.models.vit import ViT
from vitray.pages.plotting import LIGHT, to_png
from vitray.training.examples import choose_examples


def read_shown_images(run: Run, dataset: Dataset, holdout_mask: np.ndarray | None) -> ChosenImages:
    """Return the images of evaluate.examples as they are stored."""
    assert run.data.evaluated is not None
    rows, total = choose_examples(run, dataset, holdout_mask)
    images = images_of(split_images(dataset, run.data.evaluated), rows.tolist(), total)
    if holdout_mask is None:
        return images
    part = f", {run.data.held_out} held out"
    return replace(images, name=images.name + part, origin=images.origin + part)


def make_results(subject: Subject, names: Sequence[str]) -> list[FigureResult]:
    """Return figures of one network, without lines of progress."""
    with redirect_stderr(io.StringIO()):
        [measured], _ = measure([subject], names)
        return [make_figure(name, [measured]) for name in NEEDS if name in names]


def draw_figures(
    run: Run, weights: dict[str, Tensor], images: ChosenImages, title: str, device: torch.device
) -> dict[str, bytes]:
    """Return evaluate.figures of a ViT's weights: the PNG of each picture by its name."""
    vit = ViT(run.model)
    vit.load_state_dict(weights)
    vit.to(device).eval().requires_grad_(False)
    classes = images.classes if run.model.num_classes == len(images.classes) else None
    spec = spec_of(run, vit, classes, "", title)
    subject = Subject(title, spec, vit, images, images.shown_views(spec))
    results = make_results(subject, run.evaluate.figures)
    end = f"-{file_name(title)}"
    drawings = [drawing for result in results for drawing in result.drawings]
    return {drawing.file.removesuffix(end): to_png(drawing.draw(LIGHT)) for drawing in drawings}
