"""Published accuracies of two papers, for comparison with the same point of a sweep.

TOUVRON is "Three things" (2022), DOSOVITSKIY is the "ViT paper" (2021). Plots without printed digits are left out.
"""

from typing import NamedTuple

from vitray.config import Run

TOUVRON = "Three things everyone should know about Vision Transformers"
DOSOVITSKIY = "An image is worth 16x16 words"
# The pretraining of the networks that the papers fine-tune.
TOUVRON_START = "ImageNet-1k, 400 epochs"
STARTS = (TOUVRON_START, "ImageNet-1k", "ImageNet-21k", "JFT-300M")


class PaperPoint(NamedTuple):
    """A cell of a paper's table: a network, its training, and the dataset of its score."""

    model: str
    training: str
    images: str


class Printed(NamedTuple):
    """A printed accuracy and its place in a paper."""

    top1: float
    """In percent."""
    spread: float | None
    """The standard deviation, if printed."""
    source: str
    place: str


class DatasetSizes(NamedTuple):
    """The sizes that identify a dataset."""

    train: int
    evaluated: int
    classes: int


# Three things, Table 9. The papers give no sizes for Pets; these are the dataset's own.
DATASETS = {
    "ImageNet": DatasetSizes(1_281_167, 50_000, 1000),
    "iNaturalist 2018": DatasetSizes(437_513, 24_426, 8142),
    "iNaturalist 2019": DatasetSizes(265_240, 3003, 1010),
    "Flowers-102": DatasetSizes(2040, 6149, 102),
    "Stanford Cars": DatasetSizes(8144, 8041, 196),
    "CIFAR-100": DatasetSizes(50_000, 10_000, 100),
    "CIFAR-10": DatasetSizes(50_000, 10_000, 10),
    "Oxford-IIIT Pets": DatasetSizes(3680, 3669, 37),
}
# Tolerated share of missing training images: `vitray shard` drops those that are also in val.
MISSING = 0.02

# ---- the tables ------------------------------------------------------------------------------------------------------

# Three things, {(model, training): (top1 on ImageNet val, its spread, table)}; at 224 px, recipe A2.
TRAINED = {
    ("vit_ti12x1_16", "300 epochs"): (72.7, None, "Table 1"),
    ("vit_ti12x1_16", "400 epochs, LayerScale"): (73.5, None, "Table 1"),
    ("vit_s12x1_16", "300 epochs"): (79.7, None, "Table 1"),
    ("vit_s12x1_16", "400 epochs, LayerScale"): (80.7, None, "Table 1"),
    ("vit_s48x1_16", "300 epochs"): (82.3, None, "Table 3"),
    ("vit_s24x2_16", "300 epochs"): (82.6, None, "Table 3"),
    ("vit_b12x1_16", "300 epochs"): (82.20, 0.06, "Table 7"),
    ("vit_b12x1_16", "400 epochs, LayerScale"): (82.7, None, "Table 1"),
    ("vit_b36x1_16", "300 epochs"): (82.9, None, "Table 2"),
    ("vit_b36x1_16", "300 epochs, LayerScale"): (83.9, None, "Table 2"),
    ("vit_b36x1_16", "400 epochs"): (83.4, None, "Table 2"),
    ("vit_b36x1_16", "400 epochs, LayerScale"): (84.1, None, "Table 2"),
    ("vit_b18x2_16", "300 epochs"): (83.3, None, "Table 2"),
    ("vit_b18x2_16", "300 epochs, LayerScale"): (83.8, None, "Table 2"),
    ("vit_b18x2_16", "400 epochs"): (83.4, None, "Table 2"),
    ("vit_b18x2_16", "400 epochs, LayerScale"): (84.1, None, "Table 2"),
    ("vit_l24x1_16", "300 epochs"): (83.0, None, "Table 1"),
    ("vit_l24x1_16", "300 epochs, LayerScale"): (83.4, None, "Table 3"),
    ("vit_l24x1_16", "400 epochs, LayerScale"): (84.0, None, "Table 1"),
    ("vit_b12x1_16_linear_bn", "300 epochs"): (82.31, None, "Table 7"),
    ("vit_b12x1_16_linear_gelu", "300 epochs"): (81.55, None, "Table 7"),
    ("vit_b12x1_16_linear_bn_gelu", "300 epochs"): (82.38, None, "Table 7"),
    ("vit_b13x1_16", "300 epochs"): (82.35, 0.12, "Table 7"),
    ("vit_b12x1_16_conv", "300 epochs"): (82.57, None, "Table 7"),
    ("vit_b12x1_16_conv_ln", "300 epochs"): (82.50, None, "Table 7"),
    ("vit_b12x1_16_hmlp_bn", "300 epochs"): (82.54, 0.09, "Table 7"),
    ("vit_b12x1_16_hmlp_ln", "300 epochs"): (82.50, 0.07, "Table 7"),
}
# Three things, Table 5, {(model, optimizer): full, attn, ffn}: from 224 to 384 px on ImageNet.
FINER = {
    ("vit_s12x1_16", "adamw"): (82.7, 82.5, 82.2),
    ("vit_s12x1_16", "sgd"): (82.6, 82.3, 82.0),
    ("vit_b12x1_16", "adamw"): (84.3, 84.3, 84.1),
    ("vit_b12x1_16", "sgd"): (84.3, 84.2, 84.0),
    ("vit_l24x1_16", "adamw"): (85.5, 85.5, 85.2),
    ("vit_l24x1_16", "sgd"): (85.4, 85.3, 85.1),
}
# Three things, Table 6, {(model, mode): a number for each dataset}; it names no image size and no optimizer.
TRANSFERRED_TO = ("iNaturalist 2018", "iNaturalist 2019", "CIFAR-10", "CIFAR-100", "Stanford Cars", "Flowers-102")
TRANSFERRED = {
    ("vit_s12x1_16", "full"): (68.0, 73.9, 98.9, 90.5, 89.7, 96.8),
    ("vit_s12x1_16", "attn"): (60.6, 68.7, 98.7, 89.1, 89.8, 96.9),
    ("vit_s12x1_16", "ffn"): (64.4, 72.5, 98.9, 90.1, 88.3, 96.1),
    ("vit_b12x1_16", "full"): (74.1, 78.2, 99.3, 92.5, 92.7, 97.8),
    ("vit_b12x1_16", "attn"): (71.1, 75.7, 99.2, 91.8, 92.8, 98.5),
    ("vit_b12x1_16", "ffn"): (73.3, 77.3, 99.3, 92.1, 88.9, 97.5),
    ("vit_l24x1_16", "full"): (75.9, 79.7, 99.3, 93.2, 93.8, 98.3),
    ("vit_l24x1_16", "attn"): (75.3, 78.7, 99.2, 92.7, 93.8, 98.4),
    ("vit_l24x1_16", "ffn"): (75.4, 79.3, 99.2, 93.0, 93.0, 97.6),
}
# ViT paper, Table 5, {(pretraining, dataset): a number for each model}: all weights trained by SGD at 384 px.
FIRST_VITS = ("vit_b12x1_16", "vit_b12x1_32", "vit_l24x1_16", "vit_l24x1_32", "vit_h32x1_14")
FIRST = {
    ("ImageNet-1k", "CIFAR-10"): (98.13, 97.77, 97.86, 97.94, None),
    ("ImageNet-1k", "CIFAR-100"): (87.13, 86.31, 86.35, 87.07, None),
    ("ImageNet-1k", "ImageNet"): (77.91, 73.38, 76.53, 71.16, None),
    ("ImageNet-1k", "Flowers-102"): (89.49, 85.43, 89.66, 86.36, None),
    ("ImageNet-1k", "Oxford-IIIT Pets"): (93.81, 92.04, 93.64, 91.35, None),
    ("ImageNet-21k", "CIFAR-10"): (98.95, 98.79, 99.16, 99.13, 99.27),
    ("ImageNet-21k", "CIFAR-100"): (91.67, 91.97, 93.44, 93.04, 93.82),
    ("ImageNet-21k", "ImageNet"): (83.97, 81.28, 85.15, 80.99, 85.13),
    ("ImageNet-21k", "Flowers-102"): (99.38, 99.11, 99.61, 99.19, 99.51),
    ("ImageNet-21k", "Oxford-IIIT Pets"): (94.43, 93.02, 94.73, 93.09, 94.82),
    ("JFT-300M", "CIFAR-10"): (99.00, 98.61, 99.38, 99.19, 99.50),
    ("JFT-300M", "CIFAR-100"): (91.87, 90.49, 94.04, 92.52, 94.55),
    ("JFT-300M", "ImageNet"): (84.15, 80.73, 87.12, 84.37, 88.04),
    ("JFT-300M", "Flowers-102"): (99.56, 99.27, 99.56, 99.45, 99.68),
    ("JFT-300M", "Oxford-IIIT Pets"): (95.80, 93.40, 97.11, 95.83, 97.56),
}
MODES = ("full", "attn", "ffn")

PAPER: dict[PaperPoint, Printed] = {
    **{
        PaperPoint(model, training, "ImageNet"): Printed(top1, spread, TOUVRON, table)
        for (model, training), (top1, spread, table) in TRAINED.items()
    },
    **{
        PaperPoint(model, f"{mode} by {rule} at 384 px, from {TOUVRON_START}", "ImageNet"): Printed(
            top1, None, TOUVRON, "Table 5"
        )
        for (model, rule), row in FINER.items()
        for mode, top1 in zip(MODES, row, strict=True)
    },
    **{
        PaperPoint(model, f"{mode}, from {TOUVRON_START}", images): Printed(top1, None, TOUVRON, "Table 6")
        for (model, mode), row in TRANSFERRED.items()
        for images, top1 in zip(TRANSFERRED_TO, row, strict=True)
    },
    **{
        PaperPoint(model, f"full by sgd at 384 px, from {start}", images): Printed(top1, None, DOSOVITSKIY, "Table 5")
        for (start, images), row in FIRST.items()
        for model, top1 in zip(FIRST_VITS, row, strict=True)
        if top1 is not None
    },
}


# ---- lookup ----------------------------------------------------------------------------------------------------------


def dataset_of(train: int, evaluated: int, classes: int) -> str | None:
    """Return the papers' dataset with these numbers of images and classes; None for any other."""
    for name, sizes in DATASETS.items():
        complete = (1 - MISSING) * sizes.train <= train <= sizes.train
        if complete and (evaluated, classes) == (sizes.evaluated, sizes.classes):
            return name
    return None


def point_of(run: Run, images: str | None, start: str | None = None) -> PaperPoint | None:
    """Return the paper's point with the run's network and task; learning rates and the like may differ.

    `images` is the result of `dataset_of`; `start`, one of STARTS, is the pretraining of fine-tuned weights.
    A run with a hold-out split matches no point.
    """
    if images is None or run.data.development:
        return None
    assert start is None or start in STARTS, f"got {start!r}, wanted one of {STARTS}"
    size = run.model.image_shape
    match run.task.kind:
        case "supervised":
            scale = "" if run.model.layerscale is None else ", LayerScale"
            trainings = [f"{run.optim.duration}{scale}"] if size == (224, 224) and run.task.loss == "bce" else []
        case "finetune":
            comparable = not run.task.also and not run.task.first_branch and size[0] == size[1]
            training = f"{run.task.mode} by {run.optim.rule.kind} at {size[0]} px"
            trainings = [f"{training}, from {start}", f"{run.task.mode}, from {start}"] if comparable else []
        case "masked" | "tokenizer":
            trainings = []
    points = (PaperPoint(run.model.name, training, images) for training in trainings)
    return next((point for point in points if point in PAPER), None)
