"""The settings of a run, one section per concern and a sum type per `kind`.

A setting is listed here only when some code reads it.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from vitray.config.model_names import Name, parse_name


class Section(BaseModel):
    """Some settings of one concern: frozen, strict, and closed to words it does not know."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def one_of(default: str) -> BeforeValidator:
    """Lets `head: mlp` stand for `head: {kind: mlp}`, and `head: {init: zeros}` for the default kind."""

    def spell_out(value: Any) -> Any:
        if isinstance(value, str):
            return {"kind": value}
        return {"kind": default, **value} if isinstance(value, dict) else value

    return BeforeValidator(spell_out)


Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Size = Annotated[int, Field(ge=1)]


class Learned(Section):
    """A trained vector per patch position."""

    kind: Literal["learned"] = "learned"
    resample: Literal["google", "deit", "timm", "torchvision"] = "deit"
    """How the table is resized to another grid: a property of the weights, as each family was evaluated with its own.
    google: bilinear, corners aligned; deit: bicubic; timm: bicubic, antialiased; torchvision: bicubic, aligned."""


class SinCos2d(Section):
    """Fixed sines and cosines of the row and the column."""

    kind: Literal["sincos2d"] = "sincos2d"
    frequencies: Literal["big_vision", "mae"] = "mae"
    """Two published spacings of the frequencies, which are not interchangeable."""


class NoPositions(Section):
    """Patches carry no position."""

    kind: Literal["none"] = "none"


class LinearHead(Section):
    """One linear layer on the pooled token."""

    kind: Literal["linear"] = "linear"
    init: Literal["normal", "zeros"] = "normal"
    """zeros is what a transfer to new classes starts from (seed 002, B.1.1)."""


class MlpHead(Section):
    """The pre-training head of seed 002: a tanh layer, then a linear one."""

    kind: Literal["mlp"] = "mlp"
    hidden: Size | None = None
    """Width of the tanh layer; None is the width of the model."""


class Model(Section):
    """The network."""

    # Stored canonically, so that two spellings of one model are one value.
    name: Annotated[str, AfterValidator(lambda text: str(parse_name(text)))] = "vit_ti12x1_16"
    """vit_<width><depth>x<branches>_<patch>[_<stem>], or the papers' spelling of it."""
    image_size: Size | Annotated[tuple[Size, Size], Field(strict=False)] = 224
    """Pixels a side, or [height, width]; both multiples of the patch."""
    num_classes: Size | None = 1000
    """None leaves the head out: the network returns pooled features."""
    class_token: bool = True
    """A learned token before the patches."""
    pool: Literal["token", "mean", "mean_then_norm"] = "token"
    """The class token; the mean of the normalised patches; or the normalised mean of the patches (MAE, timm `avg`)."""
    positions: Annotated[Learned | SinCos2d | NoPositions, Field(discriminator="kind"), one_of("learned")] = Learned()
    head: Annotated[LinearHead | MlpHead, Field(discriminator="kind"), one_of("linear")] = LinearHead()
    layerscale: Positive | None = None
    """Initial value of LayerScale; None builds the blocks without it."""
    drop_path: Fraction = 0.0
    """Chance that a branch is left out for a sample, drawn per branch."""
    drop_path_over_depth: Literal["constant", "linear"] = "constant"
    """constant is seed 000's rule; linear ramps from 0 at the first block to drop_path at the last."""
    dropout: Fraction = 0.0
    """After every dense layer but query, key and value, and after adding positions (seed 002, B.1)."""
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    """gelu_tanh is the approximation that Google's weights were trained with."""
    norm_eps: Positive = 1e-6
    execution: Literal["loop", "fused", "auto"] = "auto"
    """How parallel branches run: one by one, as joint matrix products, or whichever is faster for the shape."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        patch = self.shape.patch
        if self.grid == (0, 0) or any(side % patch for side in self.image_shape):
            raise ValueError(f"image_size {self.image_size} is not a multiple of the patch of {self.name}, {patch}")
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool token needs class_token: true; without one, pool is mean or mean_then_norm")
        if self.positions.kind == "sincos2d" and self.shape.size % 4:
            raise ValueError(f"sincos2d positions need a width divisible by 4, {self.name} has {self.shape.size}")
        if self.execution == "fused" and self.dropout:
            raise ValueError(
                f"execution fused is not exact with dropout {self.dropout}, which acts between the products that fusing"
                " joins; use loop, or auto"
            )
        return self

    @property
    def shape(self) -> Name:
        """What the name says."""
        return parse_name(self.name)

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = self.image_shape
        return height // self.shape.patch, width // self.shape.patch
