"""Settings of cropping, augmentation, mixing and normalization."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from vitray.config.sections import MOST_COUNT, NotNegative, Positive, Section, one_of


def check_ascending(bounds: tuple[float, float]) -> tuple[float, float]:
    """Return the bounds unchanged, or raise if the lower one is not first."""
    if bounds[0] > bounds[1]:
        raise ValueError(f"got {list(bounds)}, expected [lowest, highest]")
    return bounds


Chance = Annotated[float, Field(ge=0, le=1)]
Chances = Annotated[tuple[Chance, ...], Field(strict=False, min_length=1, max_length=64)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
EvenCount = Annotated[int, Field(ge=2, le=MOST_COUNT, multiple_of=2)]
Byte = Annotated[int, Field(ge=0, le=255)]
Color = Annotated[tuple[Byte, Byte, Byte], Field(strict=False)]
Interpolation = Annotated[
    Literal["bilinear", "bicubic"], Field(description="Filter of the resize, always antialiased.")
]
Ascending = AfterValidator(check_ascending)


class RandomResizedCrop(Section):
    """A box of random area and aspect ratio, resized (torchvision's RandomResizedCrop)."""

    kind: Literal["random_resized"] = "random_resized"
    scale: Annotated[tuple[PositiveFraction, PositiveFraction], Field(strict=False), Ascending] = (0.08, 1.0)
    """Smallest and largest fraction of the image's area."""
    ratio: Annotated[tuple[Positive, Positive], Field(strict=False), Ascending] = (3 / 4, 4 / 3)
    """Smallest and largest width / height."""
    interpolation: Interpolation = "bicubic"


class SimpleRandomCrop(Section):
    """DeiT III's crop: resize the short side to the output size, pad by reflection, crop a random square."""

    kind: Literal["simple_random"] = "simple_random"
    padding: Annotated[int, Field(ge=0, le=1000)] = 4
    """Reflected pixels on each side."""
    interpolation: Interpolation = "bicubic"


class CenterCrop(Section):
    """The center of the image, without randomness, as evaluations use it."""

    kind: Literal["center"] = "center"
    crop_ratio: Annotated[float, Field(ge=0.01, le=1)] | None = 0.875
    """Output size / length to which the short side is resized (rounded down): commonly 0.875; 0.95 for A2, 1 for DeiT
    III. null: no crop; the whole image is squeezed to the output size, as in VTAB."""
    interpolation: Interpolation = "bicubic"

    def __str__(self) -> str:
        """Return the settings as a page shows them."""
        crop = "the whole image, squeezed" if self.crop_ratio is None else f"crop ratio {self.crop_ratio:g}"
        return f"{crop}, {self.interpolation}"


class NoPolicy(Section):
    """No policy; crop, flip, jitter and erase still apply."""

    kind: Literal["none"] = "none"


class ThreeAugment(Section):
    """DeiT III's 3-Augment: one of grayscale, solarize and Gaussian blur (sigma 0.1 to 2), equally likely."""

    kind: Literal["three_augment"] = "three_augment"


class DinoColors(Section):
    """DINO's: jitter of brightness, contrast, saturation and hue in random order, then grayscale, Gaussian blur (sigma
    0.1 to 2; in proportion less where a view is below 96 pixels) and solarize, each by its chance. Where an image has
    several views, blur and solarize have the chance of each, and the last one holds for all further views."""

    kind: Literal["dino"] = "dino"
    jitter: Chance = 0.8
    """Probability of the jitter."""
    brightness: NotNegative = 0.4
    """Brightness is scaled by a factor from 1 - brightness (at least 0) to 1 + brightness."""
    contrast: NotNegative = 0.4
    """Contrast is scaled by a factor from 1 - contrast (at least 0) to 1 + contrast."""
    saturation: NotNegative = 0.2
    """Saturation is scaled by a factor from 1 - saturation (at least 0) to 1 + saturation."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """The largest turn of the hue in either direction; 1 is a whole turn."""
    gray: Chance = 0.2
    """Probability of grayscale."""
    blur: Chances = (0.5,)
    """Probability of blur, for each view."""
    solarize: Chances = (0.0,)
    """Probability of solarize, for each view."""


class RandAugment(Section):
    """timm's RandAugment: rand-m7-n2-mstd0.5-inc1 is magnitude 7, ops 2, std 0.5, increasing true."""

    kind: Literal["randaugment"] = "randaugment"
    magnitude: NotNegative = 9.0
    """Strength on timm's scale, whose maximum is 10."""
    ops: Annotated[int, Field(ge=1, le=100)] = 2
    """Operations per image, drawn with replacement from 15."""
    std: NotNegative = 0.5
    """Standard deviation of the magnitude, drawn per operation."""
    increasing: bool = True
    """Uses the operations whose strength always grows with magnitude; false: timm's original set."""
    chance: Chance = 0.5
    """Probability that a drawn operation is applied; big_vision's (2, 10) is 1."""
    limit: Positive = 10.0
    """Upper limit of a drawn magnitude (timm's mmax)."""
    fill: Color = (124, 116, 104)
    """Color of uncovered areas; the default is ImageNet's mean, as in timm."""

    @model_validator(mode="after")
    def _magnitude_is_reachable(self) -> Self:
        if self.magnitude > self.limit:
            raise ValueError(f"magnitude {self.magnitude} is above its limit {self.limit}, which would cut every draw")
        return self


class TorchvisionRandAugment(Section):
    """torchvision's RandAugment: 14 operations, always applied, with one strength."""

    kind: Literal["randaugment_torchvision"] = "randaugment_torchvision"
    magnitude: Annotated[int, Field(ge=0)] = 9
    """Strength, from 0 to bins - 1."""
    ops: Annotated[int, Field(ge=1, le=100)] = 2
    """Operations per image, drawn with replacement."""
    bins: Annotated[int, Field(ge=2, le=MOST_COUNT)] = 31
    """Number of strengths."""
    fill: Color = (0, 0, 0)
    """Color of uncovered areas."""

    @model_validator(mode="after")
    def _magnitude_is_on_the_scale(self) -> Self:
        if self.magnitude >= self.bins:
            raise ValueError(f"magnitude {self.magnitude} is off the scale of {self.bins} bins, 0 to {self.bins - 1}")
        return self


Crop = RandomResizedCrop | SimpleRandomCrop | CenterCrop
Policy = NoPolicy | ThreeAugment | DinoColors | RandAugment | TorchvisionRandAugment


class Augment(Section):
    """Augmentation of each training image, applied in this order."""

    crop: Annotated[Crop, Field(discriminator="kind"), one_of("random_resized")] = RandomResizedCrop()
    """Crop and resize."""
    flip: Chance = 0.5
    """Probability of a horizontal flip."""
    policy: Annotated[Policy, Field(discriminator="kind"), one_of("none")] = NoPolicy()
    """Augmentation policy. Its geometric operations use the crop's interpolation."""
    jitter: NotNegative = 0.0
    """Color jitter: brightness, contrast and saturation, in random order, are scaled by factors from 1 - jitter (at
    least 0) to 1 + jitter."""
    erase: Chance = 0.0
    """Probability that a rectangle (2 to 33 % of the area) becomes noise, after normalization, on the device."""
    decode: Literal["full", "scaled"] = "full"
    """full: decode all pixels. scaled: decode a JPEG at 1/2, 1/4 or 1/8 of its resolution where the crop still has at
    least the pixels of the view. The random draws are the same, the pixels are not. It saves time on photographs above
    a megapixel; few crops of smaller ones allow it."""
    on: Literal["tasks", "device", "auto"] = "tasks"
    """Where flip, policy and jitter run. tasks: in the tasks that decode images; device: on the workers' device; auto:
    on the device of GPU workers, in the tasks of CPU workers. The pixels are the same."""

    def resolved(self, has_gpu: bool) -> Self:
        """Return these settings with `on` as tasks or device."""
        auto = "device" if has_gpu else "tasks"
        return self.model_copy(update={"on": auto}) if self.on == "auto" else self


class Mix(Section):
    """Mixing of pairs of training images on the device, by timm's rules."""

    mixup: NotNegative = 0.0
    """Alpha of mixup's Beta distribution; 0: off."""
    cutmix: NotNegative = 0.0
    """Alpha of CutMix's Beta distribution; 0: off."""
    switch: Chance = 0.5
    """Probability of CutMix instead of mixup, if both are on."""
    chance: Chance = 1.0
    """Probability that a draw mixes."""
    per: EvenCount | Literal["pair", "batch"] = 256
    """Number of images of the global batch that share one draw (mixup or CutMix, mixing ratio, box): an even number,
    `pair` or `batch`. timm and DeiT draw once for each device's batch."""

    @property
    def is_mixing(self) -> bool:
        """Whether images may be mixed."""
        return self.chance > 0 and (self.mixup > 0 or self.cutmix > 0)

    def draws(self, batch: int) -> int:
        """Return the number of draws for a global batch."""
        images = {"pair": 2, "batch": batch}[self.per] if isinstance(self.per, str) else self.per
        return -(-batch // images)


class Normalize(Section):
    """Colors in 0 to 1, minus mean, divided by std. With mean and std 0.5 they lie in -1 to 1."""

    mean: Annotated[tuple[float, float, float], Field(strict=False)] = (0.485, 0.456, 0.406)
    """Red, green, blue; the default is ImageNet's."""
    std: Annotated[tuple[Positive, Positive, Positive], Field(strict=False)] = (0.229, 0.224, 0.225)
    """Red, green, blue; the default is ImageNet's."""
