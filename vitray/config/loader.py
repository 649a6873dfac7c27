"""Settings of `vitray.Loader`: those of a recipe that decide which images come, in which order, and how they look."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from vitray.config.augmentation import Augment, CenterCrop, Mix, Normalize
from vitray.config.sections import Fraction, Section, Seed, Size, Text


def _named_policy(augment: Any) -> Any:
    return {"policy": augment} if isinstance(augment, str) else augment


class LoaderSettings(Section):
    """All that a loader's batches depend on, beside the dataset and the share of a worker."""

    split: Text = "train"
    batch: Size = 256
    size: Size | Annotated[tuple[Size, Size], Field(strict=False)] = 224
    augment: Annotated[Augment | None, BeforeValidator(_named_policy)] = Augment()
    mix: Mix = Mix()
    normalize: Normalize = Normalize()
    eval_crop: CenterCrop = CenterCrop()
    repeats: Size = 1
    seed: Seed = 0
    max_corrupt: Fraction = 0.001

    @model_validator(mode="after")
    def _training_is_augmented(self) -> Self:
        if self.augment is None and (self.mix.is_mixing or self.repeats > 1):
            wrong = "mix" if self.mix.is_mixing else "repeats"
            raise ValueError(f"{wrong} is for training, and augment=None gives each image once, for an evaluation")
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size
