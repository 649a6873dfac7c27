"""The settings of what is learned from images without labels: patches that are hidden, and a code for each patch."""

import math
from typing import Annotated, Any, Literal, Self, assert_never

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from vitray.config.augmentation import rising
from vitray.config.sections import Fraction, Model, Positive, Section, Size, one_of
from vitray.config.training import Data

# ---- masks -----------------------------------------------------------------------------------------------------------

# As many patches of every image are predicted, so that a loss over images is the mean of theirs on any split of them.
Ratio = Annotated[float, Field(gt=0, lt=1)]


class RandomMask(Section):
    """Patches drawn one by one."""

    kind: Literal["random"] = "random"
    ratio: Ratio = 0.75
    """Share of an image's patches that is predicted; of the others the number is rounded down."""
    other: Fraction = 0.0
    """Chance that in place of a predicted patch another one of the image is seen, drawn at random."""
    kept: Fraction = 0.0
    """Chance that a predicted patch is seen as it is. Neither other nor kept, it is hidden."""

    @model_validator(mode="after")
    def _some_are_hidden(self) -> Self:
        if self.other + self.kept >= 1:
            raise ValueError(f"other {self.other:g} and kept {self.kept:g} leave nothing hidden, wanted a sum below 1")
        return self


class BlockMask(Section):
    """Rectangles of patches, which may overlap, until there are enough: BeiT's. Of the last one the end is cut off."""

    kind: Literal["blocks"] = "blocks"
    ratio: Ratio = 0.38
    """As of a random mask; 0.38 of 14 x 14 patches are BeiT's 75."""
    least: Size = 16
    """Area of the smallest rectangle, in patches; the largest is what is missing."""
    aspect: Annotated[tuple[Positive, Positive], Field(strict=False), AfterValidator(rising)] = (0.3, 1 / 0.3)
    """Least and largest height / width, drawn on a logarithmic scale."""


Mask = RandomMask | BlockMask


def predicted_patches(mask: Mask, patches: int) -> int:
    """How many of an image's patches a mask picks."""
    # 10 * (1 - 0.9) is 0.99...: what a person would call 1 is 1.
    return patches - math.floor(round(patches * (1 - mask.ratio), 6))


def largest_least(mask: BlockMask, grid: tuple[int, int]) -> float:
    """The area of the largest rectangle on a grid whose height / width is one of the mask's."""
    rows, columns = grid
    aspect = min(max(rows / columns, mask.aspect[0]), mask.aspect[1])
    return min(rows**2 / aspect, columns**2 * aspect)


# ---- objectives ------------------------------------------------------------------------------------------------------


class MeanColour(Section):
    """The mean colour of each patch, of 512: three bits for each of red, green and blue (seed 002, B.1.2)."""

    kind: Literal["mean_colour"] = "mean_colour"


class SmallPatch(Section):
    """Each patch scaled down to 4 x 4, every one of whose colours is of 512 (seed 002, B.1.2)."""

    kind: Literal["small_patch"] = "small_patch"


class PixelsL2(Section):
    """The pixels, by the mean squared error (seed 002, B.1.2)."""

    kind: Literal["pixels_l2"] = "pixels_l2"


class PixelsL1(Section):
    """The pixels, by the mean absolute error (seed 001)."""

    kind: Literal["pixels_l1"] = "pixels_l1"


def _check_decoder(width: int, heads: int) -> None:
    if width % heads or width % 4:
        raise ValueError(f"decoder_width: got {width}, wanted a multiple of its {heads} heads, and of 4")


class Mae(Section):
    """The pixels of what the network never sees, by a light decoder of what it sees (masked autoencoder)."""

    kind: Literal["mae"] = "mae"
    normalised: bool = True
    """Whether each patch's pixels are shifted and scaled to mean 0 and variance 1 before they are a target."""
    decoder_width: Size = 512
    decoder_depth: Size = 8
    decoder_heads: Size = 16

    @model_validator(mode="after")
    def _decoder_divides(self) -> Self:
        _check_decoder(self.decoder_width, self.decoder_heads)
        return self


class Beit(Section):
    """The code of each patch, in the vocabulary of a tokenizer that vitray has trained."""

    kind: Literal["beit"] = "beit"
    tokenizer: str
    """The model folder of a run of task tokenizer: a path, s3://, runs:/ or models:/name@alias."""


Objective = MeanColour | SmallPatch | PixelsL2 | PixelsL1 | Mae | Beit


def paper_mask(objective: Objective) -> Mask:
    """How the objective's source hides patches."""
    match objective:
        case MeanColour() | SmallPatch() | PixelsL2():
            return RandomMask(ratio=0.5, other=0.1, kept=0.1)
        case PixelsL1():
            return RandomMask(ratio=0.5)
        case Mae():
            return RandomMask(ratio=0.75)
        case Beit():
            return BlockMask()
        case _:
            assert_never(objective)


def _as_in_the_paper(given: Any, validated: ValidationInfo) -> Any:
    """What is not said of a mask, as the objective's paper has it; of another kind of mask the paper says nothing."""
    if "objective" not in validated.data:  # refused: no word about its mask
        return given or RandomMask()
    own = paper_mask(validated.data["objective"]).model_dump()
    if given is None or isinstance(given, str):
        given = {"kind": given or own["kind"]}
    if not isinstance(given, dict):
        return given
    return {**own, **given} if given.get("kind", own["kind"]) == own["kind"] else given


# ---- tasks -----------------------------------------------------------------------------------------------------------


class Masked(Section):
    """Some patches of an image, learned from the others. Its network has no head; a fine-tuning adds one."""

    kind: Literal["masked"] = "masked"
    objective: Annotated[Objective, Field(discriminator="kind"), one_of("mae")] = Mae()
    """What of a patch is predicted."""
    mask: Annotated[Mask, Field(discriminator="kind"), BeforeValidator(_as_in_the_paper)] = Field(
        default=None, validate_default=True
    )
    """Which patches are predicted, and what is seen of them; what is left open is as in the objective's paper."""
    allow_leak: bool = False
    """Whether the stem may look beyond its patch: then a patch that is hidden after it is not hidden from others."""

    @model_validator(mode="after")
    def _mask_suits(self) -> Self:
        if self.objective.kind == "mae" and isinstance(self.mask, RandomMask) and self.mask.other + self.mask.kept:
            raise ValueError(
                f"mask.other and mask.kept: got {self.mask.other:g} and {self.mask.kept:g}, wanted 0: objective mae"
                " drops what it predicts"
            )
        return self


class Tokenizer(Section):
    """A code for each patch, from which the image can be drawn again: a few numbers, each rounded to its levels."""

    kind: Literal["tokenizer"] = "tokenizer"
    levels: Annotated[tuple[Annotated[int, Field(ge=2)], ...], Field(strict=False, min_length=1)] = (8, 8, 8, 4, 4)
    """How many levels each number has; their product is the size of the vocabulary, 8192 as BeiT's."""
    decoder_width: Size = 384
    decoder_depth: Size = 4
    decoder_heads: Size = 6

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        _check_decoder(self.decoder_width, self.decoder_heads)
        if self.codes > 2**20:
            raise ValueError(f"levels: got {self.codes:,} codes, wanted at most {2**20:,}")
        return self

    @property
    def codes(self) -> int:
        """The size of the vocabulary."""
        return math.prod(self.levels)


# ---- beside the other settings ---------------------------------------------------------------------------------------


def misfit(task: Masked | Tokenizer, model: Model, data: Data) -> str | None:
    """What of a run does not go with its task, where, got and wanted; None where all does."""
    if model.num_classes is not None:
        return f"model.num_classes: got {model.num_classes}, wanted null: task {task.kind} learns no classes"
    if data.mix.is_mixing:
        return f"data.mix: got mixup {data.mix.mixup:g}, cutmix {data.mix.cutmix:g}, wanted 0: no labels to mix"
    if data.augment.erase:
        return f"data.augment.erase: got {data.augment.erase:g}, wanted 0: task {task.kind} would learn the noise"
    return _mask_misfit(task, model) if isinstance(task, Masked) else None


def _mask_misfit(task: Masked, model: Model) -> str | None:
    shape, (rows, columns) = model.shape, model.grid
    if shape.leaks and not task.allow_leak:
        return (
            f"model.name: got {shape}, whose stem mixes neighbouring patches: others would tell the network what is"
            " hidden after the stem; wanted a linear or hmlp stem, or task.allow_leak true"
        )
    if task.objective.kind == "small_patch" and shape.patch % 4:
        return f"task.objective: got small_patch, wanted another: patches of {shape.patch} pixels do not divide by 4"
    if predicted_patches(task.mask, rows * columns) == rows * columns:
        return f"task.mask.ratio: got {task.mask.ratio:g}, wanted one that leaves some of {rows} x {columns} patches"
    if isinstance(task.mask, BlockMask) and task.mask.least > (largest := largest_least(task.mask, model.grid)):
        return (
            f"task.mask.least: got {task.mask.least}, wanted at most {math.floor(largest)}: what fits into a grid of"
            f" {rows} x {columns} patches with an aspect of {task.mask.aspect[0]:.3g} to {task.mask.aspect[1]:.3g}"
        )
    return None
