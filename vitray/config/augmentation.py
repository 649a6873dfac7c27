"""The settings of what happens to images: how each is changed, how a batch is mixed, how an evaluation sees them."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from vitray.config.sections import Positive, Section, Size, one_of


def rising(bounds: tuple[float, float]) -> tuple[float, float]:
    """Bounds, the lower one first."""
    if bounds[0] > bounds[1]:
        raise ValueError(f"got {list(bounds)}, wanted [lowest, highest]")
    return bounds


Chance = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Byte = Annotated[int, Field(ge=0, le=255)]
Colour = Annotated[tuple[Byte, Byte, Byte], Field(strict=False)]
Interpolation = Literal["bilinear", "bicubic"]


class RandomResizedCrop(Section):
    """A box of random area and shape, resized: the inception crop, by torchvision's rule."""

    kind: Literal["random_resized"] = "random_resized"
    scale: Annotated[tuple[Share, Share], Field(strict=False), AfterValidator(rising)] = (0.08, 1.0)
    """Least and largest share of the image's area."""
    ratio: Annotated[tuple[Positive, Positive], Field(strict=False), AfterValidator(rising)] = (3 / 4, 4 / 3)
    """Least and largest width / height."""
    interpolation: Interpolation = "bicubic"
    """Always antialiased."""


class SimpleRandomCrop(Section):
    """DeiT III's: the short side resized to the size of the view, the edges mirrored outwards, a random square."""

    kind: Literal["simple_random"] = "simple_random"
    padding: Annotated[int, Field(ge=0)] = 4
    """Mirrored pixels on each side."""
    interpolation: Interpolation = "bicubic"
    """Always antialiased."""


class CentreCrop(Section):
    """The middle of the image, as evaluations see it: nothing about it is random."""

    kind: Literal["centre"] = "centre"
    crop_ratio: Share = 0.875
    """Size of the view / length that the short side is resized to: 0.875 by custom, 0.95 for A2, 1 for DeiT III."""
    interpolation: Interpolation = "bicubic"
    """Always antialiased."""


class NoPolicy(Section):
    """Nothing beyond crop, flip and jitter."""

    kind: Literal["none"] = "none"


class ThreeAugment(Section):
    """DeiT III's: exactly one of grey, solarize, and a Gaussian blur of sigma 0.1 to 2, each as likely."""

    kind: Literal["three_augment"] = "three_augment"


class RandAugment(Section):
    """timm's RandAugment: rand-m7-n2-mstd0.5-inc1 is magnitude 7, ops 2, std 0.5, increasing true."""

    kind: Literal["randaugment"] = "randaugment"
    magnitude: NotNegative = 9.0
    """Strength, on timm's scale of 10."""
    ops: Size = 2
    """Operations drawn per image, with replacement, from 15."""
    std: NotNegative = 0.5
    """Standard deviation of the magnitude around its setting, drawn per operation."""
    increasing: bool = True
    """Every operation grows stronger with magnitude; false is the original set, where some grow weaker."""
    chance: Chance = 0.5
    """Chance that an operation, once drawn, is applied; big_vision's (2, 10) applies all: 1."""
    limit: Positive = 10.0
    """A drawn magnitude above it counts as it (timm's mmax)."""
    fill: Colour = (124, 116, 104)
    """Colour of what a rotation or a shift uncovers: ImageNet's mean, which timm takes."""

    @model_validator(mode="after")
    def _magnitude_is_reachable(self) -> Self:
        if self.magnitude > self.limit:
            raise ValueError(f"magnitude {self.magnitude} is above its limit {self.limit}, which would cut every draw")
        return self


class TorchvisionRandAugment(Section):
    """torchvision's RandAugment: another set of 14 operations, always applied, of one strength, on a scale of bins."""

    kind: Literal["randaugment_torchvision"] = "randaugment_torchvision"
    magnitude: Annotated[int, Field(ge=0)] = 9
    """Strength, from 0 to bins - 1."""
    ops: Size = 2
    """Operations drawn per image, with replacement."""
    bins: Annotated[int, Field(ge=2)] = 31
    """Steps of the scale."""
    fill: Colour = (0, 0, 0)
    """Colour of what a rotation or a shift uncovers."""

    @model_validator(mode="after")
    def _magnitude_is_on_the_scale(self) -> Self:
        if self.magnitude >= self.bins:
            raise ValueError(f"magnitude {self.magnitude} is off the scale of {self.bins} bins, 0 to {self.bins - 1}")
        return self


Crop = RandomResizedCrop | SimpleRandomCrop | CentreCrop
Policy = NoPolicy | ThreeAugment | RandAugment | TorchvisionRandAugment


class Augment(Section):
    """What happens to each training image, in this order."""

    crop: Annotated[Crop, Field(discriminator="kind"), one_of("random_resized")] = RandomResizedCrop()
    flip: Chance = 0.5
    """Chance of swapping left and right."""
    policy: Annotated[Policy, Field(discriminator="kind"), one_of("none")] = NoPolicy()
    """Its rotations, shears and shifts interpolate as the crop does."""
    jitter: NotNegative = 0.0
    """Brightness, contrast and saturation are each multiplied by up to 1 ± this, in random order, after the policy."""
    erase: Chance = 0.0
    """Chance that a rectangle (2 to 33 % of the area) becomes noise, after normalisation, on the device."""


class Mix(Section):
    """How a training batch is mixed, on the device: timm's rules, one draw per batch."""

    mixup: NotNegative = 0.0
    """Alpha of the Beta distribution of the share that an image keeps when two are blended; 0 is no mixup."""
    cutmix: NotNegative = 0.0
    """Alpha for pasting a box of the partner; 0 is no cutmix."""
    switch: Chance = 0.5
    """Chance that a batch is cut rather than blended, where both are on."""
    chance: Chance = 1.0
    """Chance that a batch is mixed at all."""

    @property
    def is_mixing(self) -> bool:
        """Whether images may be mixed."""
        return self.chance > 0 and (self.mixup > 0 or self.cutmix > 0)


class Normalise(Section):
    """Colours on the scale of 0 to 1, shifted by mean and divided by std; mean and std of 0.5 give -1 to 1."""

    mean: Annotated[tuple[float, float, float], Field(strict=False)] = (0.485, 0.456, 0.406)
    """Red, green, blue; the default is ImageNet's."""
    std: Annotated[tuple[Positive, Positive, Positive], Field(strict=False)] = (0.229, 0.224, 0.225)
    """Red, green, blue; the default is ImageNet's."""
