"""Settings of several views of each image: global ones of most of it, and small local ones of its parts."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, create_model

from vitray.config.augmentation import (
    Ascending,
    Chance,
    DinoColors,
    NoPolicy,
    PositiveFraction,
)
from vitray.config.model import Model
from vitray.config.sections import Section, Size

# Of the side of a global view; DINO: 96 of 224 pixels.
LOCAL_SIDE = 3 / 7
# Each view is a forward pass of its own.
MOST_VIEWS = 64

Count = Annotated[int, Field(ge=1, le=MOST_VIEWS, description="Views of each image.")]
Scale = Annotated[
    tuple[PositiveFraction, PositiveFraction],
    Field(strict=False, description="Smallest and largest fraction of the image's area in a view."),
    Ascending,
]
Flip = Annotated[Chance, Field(description="Probability of a horizontal flip.")]


def _completed(own: DinoColors) -> BeforeValidator:
    """Return a validator that fills in what a policy dino of one kind of views omits."""

    def complete(value: Any) -> Any:
        if isinstance(value, str):
            value = {"kind": value}
        is_dino = isinstance(value, dict) and value.get("kind", "dino") == "dino"
        return {**own.model_dump(), **value} if is_dino else value

    return BeforeValidator(complete)


Colors = Annotated[NoPolicy | DinoColors, Field(discriminator="kind")]
# As in DINO.
LARGE = DinoColors(blur=(1.0, 0.1), solarize=(0.0, 0.2))
SMALL = DinoColors(blur=(0.5,), solarize=(0.0,))


class GlobalViews(Section):
    """Views of most of an image."""

    count: Count = 2
    size: Size | None = None
    """Side in pixels, a multiple of the patch size; null: model.image_size."""
    scale: Scale = (0.32, 1.0)
    flip: Flip = 0.5
    policy: Annotated[Colors, _completed(LARGE)] = LARGE
    """Augmentation policy; here dino has blur [1, 0.1] and solarize [0, 0.2] by default: the first view is always
    blurred, further ones are rarely, and only they are solarized."""


class LocalViews(Section):
    """Small views of parts of an image, which cost little."""

    count: Count = 8
    size: Size | None = None
    """Side in pixels, a multiple of the patch size; null: the multiple nearest to 3/7 of a global view's side."""
    scale: Scale = (0.05, 0.32)
    flip: Flip = 0.5
    policy: Annotated[Colors, _completed(SMALL)] = SMALL
    """Augmentation policy."""


class ViewsBase(Section):
    """Several views of each image, for tasks that compare them; each view has its own draws."""

    @property
    def large(self) -> GlobalViews:
        """The global views."""
        return getattr(self, "global")

    @property
    def small(self) -> LocalViews | None:
        """The local views."""
        return getattr(self, "local")  # noqa: B009 (this class does not declare it)

    def check(self, model: Model) -> None:
        """Refuse sizes that are no whole number of patches, and local views that are larger than the global ones."""
        shape, patch = model.image_shape, model.shape.patch
        large, small = self.large_size(shape), self.small_size(shape, patch)
        for name, (height, width) in {"global": large, "local": small}.items():
            if height % patch or width % patch:
                raise ValueError(
                    f"data.views.{name}.size: got {height}, expected a multiple of the patch of {model.name}, {patch}"
                )
        if max(small) > min(large):
            raise ValueError(
                f"data.views.local.size: got {small[0]}, expected at most {min(large)}, the side of a global view"
            )

    def large_size(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the global views, for images of a shape."""
        return shape if self.large.size is None else (self.large.size, self.large.size)

    def small_size(self, shape: tuple[int, int], patch: int) -> tuple[int, int]:
        """Return height and width of the local views; (0, 0) without any."""
        if self.small is None:
            return (0, 0)
        side = self.small.size or patch * max(1, round(LOCAL_SIDE * min(self.large_size(shape)) / patch))
        return (side, side)


if TYPE_CHECKING:
    Views = ViewsBase
else:
    # `global` is a word of Python, which a class cannot spell as the name of a setting.
    Views = create_model(
        "Views",
        __base__=ViewsBase,
        __doc__=ViewsBase.__doc__,
        **{"global": (GlobalViews, GlobalViews()), "local": (LocalViews | None, LocalViews())},
    )
