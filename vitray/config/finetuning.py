"""Settings of fine-tuning modes: the parts of a network, those that each mode trains, and LoRA."""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from vitray.config.sections import Positive, Section, Size

Part = Literal[
    "stem", "class_token", "distillation_token", "registers", "positions", "norms", "attn", "ffn", "layerscale",
    "adapters", "lora", "head",
    "body", "stage1", "stage2", "stage3", "stage4",
]  # fmt: skip
"""Of a network of torchvision: norms, head, numbered stages where it has them, and body, which is the rest."""
Mode = Literal["full", "attn", "attn_norm", "ffn", "last", "norm", "bias", "lora", "adapter", "head"]

# The code of "Three things" trains the positions with the attention, because a finer grid has new ones.
TRAINED: dict[Mode, tuple[Part, ...]] = {
    "full": get_args(Part),
    "attn": ("attn", "positions", "head"),
    "attn_norm": ("attn", "norms", "positions", "head"),
    "ffn": ("ffn", "positions", "head"),
    "last": ("head",),  # and levels
    "norm": ("norms", "head"),
    "bias": ("head",),  # and vectors of other parts
    "lora": ("lora", "head"),
    "adapter": ("adapters", "head"),
    "head": ("head",),
}
Matrix = Literal["q", "k", "v", "out", "up", "down"]


class Lora(Section):
    """LoRA (Hu et al., 2021): W + alpha / rank * B A in place of a frozen matrix W. A and B are trained; B starts from
    zeros, so that training starts from the network as it is."""

    rank: Size = 8
    """Columns of B and rows of A; at most the width of the network."""
    alpha: Positive = 16.0
    """Scale: the product B A is multiplied by alpha / rank."""
    matrices: Annotated[tuple[Matrix, ...], Field(strict=False, min_length=1)] = ("q", "v")
    """Matrices that get a product, in every branch of every level. q, k, v, out: queries, keys, values and output of
    attention; up, down: the two of the feed-forward."""

    @model_validator(mode="after")
    def _matrices_differ(self) -> Self:
        if repeated := sorted({name for name in self.matrices if self.matrices.count(name) > 1}):
            raise ValueError(f"matrices: got {', '.join(repeated)} more than once, expected each matrix once")
        return self

    @property
    def changed(self) -> list[str]:
        """The settings that differ from their defaults."""
        return [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
