"""Published accuracies on ImageNet of networks trained from scratch, for comparison with the same run of a sweep."""

from typing import NamedTuple

from vitray.config import Run

# The paper of 2022, as its tables print it; of its plots without printed digits nothing is quoted.
TITLE = "Three things everyone should know about Vision Transformers"
# ImageNet's training images, evaluated images and classes.
IMAGENET = (1_281_167, 50_000, 1000)
# Tolerated share of missing training images: `vitray shard` drops those that are also in val.
MISSING = 0.02


class PaperResult(NamedTuple):
    """A printed accuracy: a network, its training, and its place in the paper."""

    model: str
    training: str
    top1: float
    """In percent, on ImageNet val at 224 px, by recipe A2."""
    spread: float | None
    """The standard deviation, if printed."""
    table: str


PAPER = (
    PaperResult("vit_ti12x1_16", "300 epochs", 72.7, None, "Table 1"),
    PaperResult("vit_ti12x1_16", "400 epochs, LayerScale", 73.5, None, "Table 1"),
    PaperResult("vit_s12x1_16", "300 epochs", 79.7, None, "Table 1"),
    PaperResult("vit_s12x1_16", "400 epochs, LayerScale", 80.7, None, "Table 1"),
    PaperResult("vit_s48x1_16", "300 epochs", 82.3, None, "Table 3"),
    PaperResult("vit_s24x2_16", "300 epochs", 82.6, None, "Table 3"),
    PaperResult("vit_b12x1_16", "300 epochs", 82.20, 0.06, "Table 7"),
    PaperResult("vit_b12x1_16", "400 epochs, LayerScale", 82.7, None, "Table 1"),
    PaperResult("vit_b36x1_16", "300 epochs", 82.9, None, "Table 2"),
    PaperResult("vit_b36x1_16", "300 epochs, LayerScale", 83.9, None, "Table 2"),
    PaperResult("vit_b36x1_16", "400 epochs", 83.4, None, "Table 2"),
    PaperResult("vit_b36x1_16", "400 epochs, LayerScale", 84.1, None, "Table 2"),
    PaperResult("vit_b18x2_16", "300 epochs", 83.3, None, "Table 2"),
    PaperResult("vit_b18x2_16", "300 epochs, LayerScale", 83.8, None, "Table 2"),
    PaperResult("vit_b18x2_16", "400 epochs", 83.4, None, "Table 2"),
    PaperResult("vit_b18x2_16", "400 epochs, LayerScale", 84.1, None, "Table 2"),
    PaperResult("vit_l24x1_16", "300 epochs", 83.0, None, "Table 1"),
    PaperResult("vit_l24x1_16", "300 epochs, LayerScale", 83.4, None, "Table 3"),
    PaperResult("vit_l24x1_16", "400 epochs, LayerScale", 84.0, None, "Table 1"),
    PaperResult("vit_b12x1_16_linear_bn", "300 epochs", 82.31, None, "Table 7"),
    PaperResult("vit_b12x1_16_linear_gelu", "300 epochs", 81.55, None, "Table 7"),
    PaperResult("vit_b12x1_16_linear_bn_gelu", "300 epochs", 82.38, None, "Table 7"),
    PaperResult("vit_b13x1_16", "300 epochs", 82.35, 0.12, "Table 7"),
    PaperResult("vit_b12x1_16_conv", "300 epochs", 82.57, None, "Table 7"),
    PaperResult("vit_b12x1_16_conv_ln", "300 epochs", 82.50, None, "Table 7"),
    PaperResult("vit_b12x1_16_hmlp_bn", "300 epochs", 82.54, 0.09, "Table 7"),
    PaperResult("vit_b12x1_16_hmlp_ln", "300 epochs", 82.50, 0.07, "Table 7"),
)


def is_imagenet(train: int, evaluated: int, classes: int) -> bool:
    """Whether a dataset has ImageNet's numbers of images and classes."""
    return (1 - MISSING) * IMAGENET[0] <= train <= IMAGENET[0] and (evaluated, classes) == IMAGENET[1:]


def paper_result(run: Run) -> PaperResult | None:
    """Return the paper's result for a run on ImageNet with the same network and training.

    The learning rate and the like may differ. A run with a hold-out split matches no result.
    """
    is_comparable = run.model.image_shape == (224, 224) and not run.data.holdout
    if run.task.kind != "supervised" or run.task.loss != "bce" or not is_comparable:
        return None
    training = f"{run.optim.duration}{'' if run.model.layerscale is None else ', LayerScale'}"
    return next((each for each in PAPER if each[:2] == (run.model.name, training)), None)
