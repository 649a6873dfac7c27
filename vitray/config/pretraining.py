"""Settings of the tasks without labels: masks, objectives, masked training and the tokenizer."""

import math
from typing import Annotated, Any, ClassVar, Literal, Self, assert_never

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from vitray.config.augmentation import Ascending
from vitray.config.model import Model
from vitray.config.model_names import MOST_PAIRS
from vitray.config.sections import MOST_PARAMETERS, Fraction, Positive, Section, Size, TaskTraits, Text, one_of
from vitray.config.stems import STEMS
from vitray.config.training import Data

# ---- masks -----------------------------------------------------------------------------------------------------------

# Every image has the same number of predicted patches: then any split of a batch has the same mean loss.
Ratio = Annotated[float, Field(gt=0, lt=1)]


class RandomMask(Section):
    """Patches drawn independently."""

    kind: Literal["random"] = "random"
    ratio: Ratio = 0.75
    """Fraction of patches to predict; the number of remaining patches is rounded down."""
    other: Fraction = 0.0
    """Probability that a predicted patch is replaced by another patch of the image."""
    kept: Fraction = 0.0
    """Probability that a predicted patch stays visible. The remaining predicted patches are hidden."""

    @model_validator(mode="after")
    def _some_are_hidden(self) -> Self:
        if self.other + self.kept >= 1:
            raise ValueError(
                f"other {self.other:g} and kept {self.kept:g} leave nothing hidden, expected a sum below 1"
            )
        return self


class BlockMask(Section):
    """Rectangles of patches, as in BeiT. They may overlap; the last one is cut to the exact number of patches, from a
    random corner."""

    kind: Literal["blocks"] = "blocks"
    ratio: Ratio = 0.38
    """Fraction of patches to predict; BeiT: 75 of 14 x 14."""
    min_patches: Size = 16
    """Area of the smallest rectangle in patches."""
    aspect: Annotated[tuple[Positive, Positive], Field(strict=False), Ascending] = (0.3, 1 / 0.3)
    """Smallest and largest height / width, drawn on a logarithmic scale."""


Mask = RandomMask | BlockMask


def predicted_patches(mask: Mask, patches: int) -> int:
    """Return the number of an image's patches that a mask selects."""
    # 10 * (1 - 0.9) is 0.99..., so it is rounded before the floor.
    return patches - math.floor(round(patches * (1 - mask.ratio), 6))


def largest_least(mask: BlockMask, grid: tuple[int, int]) -> float:
    """Return the area of the largest rectangle on a grid with an aspect ratio of the mask."""
    rows, columns = grid
    aspect = min(max(rows / columns, mask.aspect[0]), mask.aspect[1])
    return min(rows**2 / aspect, columns**2 * aspect)


# ---- objectives ------------------------------------------------------------------------------------------------------


class MeanColor(Section):
    """The mean color of each patch as one of 512 classes: three bits per channel (ViT paper, B.1.2)."""

    kind: Literal["mean_color"] = "mean_color"


class SmallPatch(Section):
    """Each patch scaled to 4 x 4 pixels, each of 512 colors (ViT paper, B.1.2)."""

    kind: Literal["small_patch"] = "small_patch"


class PixelsL2(Section):
    """The pixels, with the mean squared error (ViT paper, B.1.2)."""

    kind: Literal["pixels_l2"] = "pixels_l2"


class PixelsL1(Section):
    """The pixels, with the mean absolute error (SimMIM)."""

    kind: Literal["pixels_l1"] = "pixels_l1"


DecoderWidth = Annotated[Size, Field(description="Width of the decoder; a multiple of its heads, and of 4.")]
DecoderDepth = Annotated[Size, Field(description="Blocks of the decoder.")]
DecoderHeads = Annotated[Size, Field(description="Attention heads of the decoder.")]


def _check_decoder(width: int, depth: int, heads: int) -> None:
    if width % heads or width % 4:
        raise ValueError(f"decoder_width: got {width}, expected a multiple of its {heads} heads, and of 4")
    parameters = 12 * depth * width**2
    if depth > MOST_PAIRS or parameters > MOST_PARAMETERS:
        raise ValueError(
            f"decoder_depth: got {depth} blocks of width {width}, {parameters:.2g} parameters, expected at most"
            f" {MOST_PAIRS:,} blocks and {MOST_PARAMETERS:.2g} parameters"
        )


class Mae(Section):
    """Masked autoencoder: the encoder sees the visible patches only, a light decoder predicts the other pixels."""

    kind: Literal["mae"] = "mae"
    normalized: bool = True
    """Normalizes the pixels of each target patch to mean 0 and variance 1."""
    decoder_width: DecoderWidth = 512
    decoder_depth: DecoderDepth = 8
    decoder_heads: DecoderHeads = 16

    @model_validator(mode="after")
    def _decoder_divides(self) -> Self:
        _check_decoder(self.decoder_width, self.decoder_depth, self.decoder_heads)
        return self


class Beit(Section):
    """The code of each patch in the vocabulary of a tokenizer trained by vitray."""

    kind: Literal["beit"] = "beit"
    tokenizer: Text
    """The model folder of a tokenizer run: a path, s3://, runs:/ or models:/name@alias."""


Objective = MeanColor | SmallPatch | PixelsL2 | PixelsL1 | Mae | Beit


def paper_mask(objective: Objective) -> Mask:
    """Return the mask that the objective's paper uses."""
    match objective:
        case MeanColor() | SmallPatch() | PixelsL2():
            return RandomMask(ratio=0.5, other=0.1, kept=0.1)
        case PixelsL1():
            return RandomMask(ratio=0.5)
        case Mae():
            return RandomMask(ratio=0.75)
        case Beit():
            return BlockMask()
        case _:
            assert_never(objective)


def _complete_mask(given: Any, validated: ValidationInfo) -> Any:
    """Fill the omitted settings of a mask from the objective's paper, if it is of the paper's kind."""
    if "objective" not in validated.data:  # invalid, and reported on its own
        return given or RandomMask()
    own = paper_mask(validated.data["objective"]).model_dump()
    if given is None or isinstance(given, str):
        given = {"kind": given or own["kind"]}
    if not isinstance(given, dict):
        return given
    return {**own, **given} if given.get("kind", own["kind"]) == own["kind"] else given


# ---- tasks -----------------------------------------------------------------------------------------------------------


def check_label_free(kind: str, model: Model, data: Data) -> None:
    """Raise if the model or the data settings do not fit a task without labels."""
    model.require_vit(f"task.kind: {kind}")
    if model.num_classes is not None:
        raise ValueError(f"model.num_classes: got {model.num_classes}, expected null: task {kind} learns no classes")
    if data.mix.is_mixing:
        raise ValueError(
            f"data.mix: got mixup {data.mix.mixup:g}, cutmix {data.mix.cutmix:g}, expected 0: no labels to mix"
        )
    if data.augment.erase:
        raise ValueError(
            f"data.augment.erase: got {data.augment.erase:g}, expected 0: task {kind} would learn the noise"
        )
    if model.distillation_token:
        raise ValueError(f"model.distillation_token: got true, expected false: task {kind} has no teacher")
    if model.patches:
        raise ValueError(f"model.patches does not apply to task {kind}, which predicts patches of one size")


class Masked(Section):
    """Prediction of hidden patches, without labels. The network has no head; fine-tuning adds one."""

    traits: ClassVar = TaskTraits(needs=("masks",), may_collapse=True)
    kind: Literal["masked"] = "masked"
    objective: Annotated[Objective, Field(discriminator="kind"), one_of("mae")] = Mae()
    """The prediction target."""
    mask: Annotated[Mask, Field(discriminator="kind"), BeforeValidator(_complete_mask)] = Field(
        default=None, validate_default=True
    )
    """The patches to predict; omitted settings are those of the objective's paper."""
    allow_leak: bool = False
    """Permits a conv stem or a hybrid, which leak hidden pixels to other patches."""

    @model_validator(mode="after")
    def _mask_suits(self) -> Self:
        if self.objective.kind == "mae" and isinstance(self.mask, RandomMask) and self.mask.other + self.mask.kept:
            raise ValueError(
                f"mask.other and mask.kept: got {self.mask.other:g} and {self.mask.kept:g}, expected 0: objective mae"
                " drops the predicted patches"
            )
        return self

    def check(self, model: Model, data: Data) -> None:
        """Raise if the model or the data settings do not fit the task."""
        check_label_free(self.kind, model, data)
        shape, (rows, columns) = model.shape, model.grid
        *first, last = dict.fromkeys(stem.split("_")[0] for stem, row in STEMS.items() if not row.mixes_patches)
        wanted = f"expected a {', '.join(first)} or {last} stem, or task.allow_leak true"
        if shape.is_hybrid and not self.allow_leak:
            raise ValueError(
                f"model.name: got {shape}: the patches of a hybrid see each other through its ResNet, which so leaks"
                f" hidden pixels; {wanted}"
            )
        if shape.traits.mixes_patches and not self.allow_leak:
            raise ValueError(
                f"model.name: got {shape}, whose stem mixes neighboring patches and so leaks hidden pixels; {wanted}"
            )
        if self.objective.kind == "mae" and model.attention == "axial":
            raise ValueError(
                "task.objective mae and model.attention axial cannot be combined: its encoder sees some of the patches,"
                " and axial attention needs whole rows and columns"
            )
        if self.objective.kind == "small_patch" and shape.patch % 4:
            raise ValueError(
                f"task.objective small_patch needs patches whose side divides by 4; those of {shape} have {shape.patch}"
            )
        if predicted_patches(self.mask, rows * columns) == rows * columns:
            raise ValueError(
                f"task.mask.ratio: got {self.mask.ratio:g}, expected one that leaves some of {rows} x {columns} patches"
            )
        if isinstance(self.mask, BlockMask):
            largest = largest_least(self.mask, model.grid)
            if self.mask.min_patches > largest:
                raise ValueError(
                    f"task.mask.min_patches: got {self.mask.min_patches}, expected at most {math.floor(largest)}:"
                    f" the largest rectangle in {rows} x {columns} patches with an aspect of {self.mask.aspect[0]:.3g}"
                    f" to {self.mask.aspect[1]:.3g}"
                )

    def describe(self) -> str:
        """Return the loss in words."""
        return f"{self.objective.kind} of {self.mask.ratio:.0%} of the patches, {self.mask.kind}"


MOST_CODES = 2**20
Level = Annotated[int, Field(ge=2, le=MOST_CODES)]


class Tokenizer(Section):
    """A discrete autoencoder: each patch becomes a code of a few rounded numbers, from which it is reconstructed."""

    traits: ClassVar = TaskTraits(needs=(), saves="tokenizer")
    kind: Literal["tokenizer"] = "tokenizer"
    levels: Annotated[tuple[Level, ...], Field(strict=False, min_length=1, max_length=20)] = (8, 8, 8, 4, 4)
    """Number of levels of each number; the product is the vocabulary size (BeiT: 8192)."""
    decoder_width: DecoderWidth = 384
    decoder_depth: DecoderDepth = 4
    decoder_heads: DecoderHeads = 6

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        _check_decoder(self.decoder_width, self.decoder_depth, self.decoder_heads)
        if self.codes > MOST_CODES:
            raise ValueError(f"levels: got {self.codes:,} codes, expected at most {MOST_CODES:,}")
        return self

    def check(self, model: Model, data: Data) -> None:
        """Raise if the model or the data settings do not fit the task."""
        check_label_free(self.kind, model, data)

    def describe(self) -> str:
        """Return the loss in words."""
        return f"pixels, from {self.codes} codes"

    @property
    def codes(self) -> int:
        """The size of the vocabulary."""
        return math.prod(self.levels)
