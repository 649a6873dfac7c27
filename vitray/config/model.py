"""The `model` section: the network, its positions and its head."""

import json
import math
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vitray.config.model_names import OWN, Name, canonical_name, check_size, is_vit, parse_name
from vitray.config.sections import MOST_NUMBER, MOST_PARAMETERS, Fraction, Positive, Section, Side, Size, one_of
from vitray.errors import ConfigError

Resample = Annotated[
    Literal["google", "deit", "timm", "torchvision"],
    Field(
        description="Resizing of the tables to another grid, as the source of the weights does it. google: bilinear,"
        " corners aligned; deit: bicubic; timm: bicubic, antialiased; torchvision: bicubic, corners aligned."
    ),
]
Where = Annotated[
    Literal["stem", "levels", "shared"],
    Field(
        description="Where the embedding is added. stem: after the stem; levels: before every level, each with its own;"
        " shared: before every level, the same."
    ),
]


class Learned(Section):
    """A trained vector per patch position."""

    kind: Literal["learned"] = "learned"
    where: Where = "stem"
    resample: Resample = "deit"


class Learned2d(Section):
    """A trained vector per column and one per row, half the width each, joined (ViT paper, D.4)."""

    kind: Literal["learned2d"] = "learned2d"
    where: Where = "stem"
    resample: Resample = "deit"


class SinCos2d(Section):
    """Fixed sines and cosines of row and column."""

    kind: Literal["sincos2d"] = "sincos2d"
    where: Literal["stem", "shared"] = "stem"
    """Where the embedding is added: after the stem, or before every level."""
    frequencies: Literal["big_vision", "mae"] = "mae"
    """Spacing of the frequencies. The two published spacings are not interchangeable. With both, another image size
    computes the table anew, as big_vision does; MAE's code resizes its table bicubically."""


class Relative(Section):
    """A trained vector per offset of two patches in raster order, in every attention: its product with the query is
    added to the logit (ViT paper, D.4). Needs images of one size, and no class token or registers."""

    kind: Literal["relative"] = "relative"


class Rope(Section):
    """Axial rotary positions: attention turns half the channels of queries and keys by the column, half by the row."""

    kind: Literal["rope"] = "rope"
    base: Annotated[float, Field(gt=1, le=MOST_NUMBER)] = 100.0
    """The frequencies are base^-(4k / channels of a head), k = 0, 1, ...; 100 is that of RoPE-ViT."""


class NoPositions(Section):
    """No position embedding."""

    kind: Literal["none"] = "none"


Positions = Learned | Learned2d | SinCos2d | Relative | Rope | NoPositions


# The largest image of a patch of 16 is 16,384 x 16,384 pixels.
MOST_PATCHES = 2**20
MOST_REGISTERS = 1024
MOST_ADAPTER = 2**16
MOST_FFN_RATIO = 64


class LinearHead(Section):
    """One linear layer on the pooled token."""

    kind: Literal["linear"] = "linear"
    init: Literal["normal", "zeros"] = "normal"
    """Initial weights. Transfers to new classes start from zeros (ViT paper, B.1.1)."""


class MlpHead(Section):
    """A tanh layer, then a linear layer: the pre-training head of the ViT paper."""

    kind: Literal["mlp"] = "mlp"
    hidden: Size | None = None
    """Width of the tanh layer; null: the width of the model."""


class Model(Section):
    """The network."""

    # Stored canonically, so that two spellings of one model are one value.
    name: Annotated[str, AfterValidator(canonical_name)] = "vit_ti12x1_16"
    """`vit_<width><depth>x<branches>_<patch>[_<stem>]`, or a paper's spelling such as ViT-B/16. Or another network: one
    of torchvision, as in torchvision/resnet50, axial_resnet50_s, _m or _l (ViT paper, D.6), or own/<name> of your own
    code. Of these you can set only image_size and num_classes."""
    image_size: Side = 224
    """Side in pixels, or [height, width]; multiples of the patch size."""
    patches: Annotated[tuple[Size, ...], Field(strict=False)] = ()
    """Patch sizes for training: each step draws one, and resizes stem and positions to it (FlexiViT). Evaluation uses
    the size in the name. Empty: training does too."""
    num_classes: Size | None = 1000
    """Number of classes; in a run, those of the dataset if it is left out; null: no head, the network returns pooled
    features."""
    class_token: bool = True
    """Adds a learned token before the patches."""
    distillation_token: bool = False
    """Adds a second learned token after the class token, with a head of its own; the logits are the mean of both heads
    (DeiT)."""
    pool: Literal["token", "mean", "mean_then_norm"] = "token"
    """Input of the head: the class token, the mean of the normalized patches, or the normalized mean of the patches
    (MAE; `avg` in timm)."""
    # true: the four registers of Darcet et al., "Vision Transformers Need Registers".
    registers: Annotated[
        int,
        Field(ge=0, le=MOST_REGISTERS),
        BeforeValidator(lambda value: 4 * value if isinstance(value, bool) else value),
    ] = 0
    """Learned tokens between the class token and the patches, which no pool reads; true: 4."""
    positions: Annotated[Positions, Field(discriminator="kind"), one_of("learned")] = Learned()
    """Positions of the patches."""
    attention: Literal["global", "axial"] = "global"
    """axial: levels alternate between attention along rows and along columns, each with a feed-forward (ViT paper,
    D.6). Needs an even depth (Axial-ViT-B/32 is vit_b24x1_32), and no class token or registers."""
    head: Annotated[LinearHead | MlpHead, Field(discriminator="kind"), one_of("linear")] = LinearHead()
    """Classification head."""
    layerscale: Positive | None = None
    """Initial value of LayerScale; null: no LayerScale."""
    drop_path: Fraction = 0.0
    """Probability that a branch is skipped for a sample (stochastic depth), drawn per branch."""
    drop_path_draw: Literal["sample", "share"] = "sample"
    """sample: for each sample by itself, as in the papers; share: for a fixed share of each micro-batch, so that
    compiled code leaves out its computation, too (DINOv2)."""
    drop_path_schedule: Literal["constant", "linear"] = "constant"
    """constant: the same rate in every block ("Three things"); linear: from 0 in the first block to drop_path in the
    last."""
    dropout: Fraction = 0.0
    """Dropout after position embeddings and every dense layer except query, key and value (ViT paper, B.1)."""
    heads: Size | None = None
    """Attention heads of each branch; null: those of the name, 64 channels each but for u (32) and h (80)."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """gelu_tanh is the tanh approximation, which Google's weights use. swiglu multiplies SiLU by a second product."""
    ffn_ratio: Annotated[float, Field(gt=0, le=MOST_FFN_RATIO)] | None = None
    """Hidden width of the feed-forwards, as a multiple of the width; null: 4, and for swiglu 8/3 rounded up to a
    multiple of 8 channels."""
    qk_norm: bool = False
    """Normalizes the queries and keys of each head, by a norm of the kind of `norm`."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalization before every branch and before the head. rmsnorm neither centers nor shifts."""
    bias: bool = True
    """false: linear layers and norms of the blocks, and the last norm, have no biases; stem and head keep theirs."""
    adapters: Annotated[int, Field(ge=1, le=MOST_ADAPTER)] | None = None
    """Width of an adapter after each feed-forward, for fine-tuning: h + B gelu(A h), with B zero at first (Houlsby et
    al., 2019); null: none."""
    norm_eps: Positive = 1e-6
    """Epsilon of the normalization layers."""
    resnet_eps: Literal["vit", "bit", "timm"] = "vit"
    """Epsilons of a hybrid's ResNet, in standardized kernels and in group norms. vit, the ViT paper's code: 1e-5 added
    to the standard deviation, and 1e-6; bit, big_vision's BiT: 1e-10 added to the variance, and 1e-5; timm: 1e-8 added
    to the variance, and 1e-5."""
    stem_norm_eps: Positive | None = None
    """Epsilon of a stem's norms; null: torch's of batch norms, 1e-5, and 1e-6 of layer norms."""
    batch_momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of a batch in the running statistics of a stem's batch norms; a paper's decay of 0.99 is 0.01."""
    execution: Literal["loop", "fused", "auto"] = "auto"
    """Execution of parallel branches. loop: one by one; fused: joint matrix products; auto: the faster of the two."""
    residual: Literal["fp32", "bf16"] = "fp32"
    """Precision of the sum that every branch adds to, where a network computes in bf16. bf16: the blocks move fewer
    bytes, and the sum keeps three digits."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if not self.is_vit:
            self._check_other()
            return self
        patch = self.shape.patch
        if self.grid == (0, 0) or any(side % patch for side in self.image_shape):
            raise ValueError(f"image_size {self.image_size} is not a multiple of the patch of {self.name}, {patch}")
        if math.prod(self.grid) > MOST_PATCHES:
            patches = " x ".join(map(str, self.grid))
            raise ValueError(f"image_size {self.image_size} has {patches} patches, expected at most {MOST_PATCHES:,}")
        if (parameters := self._matrix_parameters) > MOST_PARAMETERS:
            raise ValueError(
                f"{self.name} with {self.num_classes} classes at {self.image_size} px has {parameters:.2g} parameters,"
                f" expected at most {MOST_PARAMETERS:.2g}"
            )
        if self.resnet_eps != "vit" and not self.shape.is_hybrid:
            raise ValueError(f"resnet_eps {self.resnet_eps} is about hybrids, and {self.name} has no ResNet")
        if self.stem_norm_eps is not None and self.shape.traits.norm is None:
            raise ValueError(
                f"stem_norm_eps does not apply: the stem of {self.name} has no norms after its convolutions"
            )
        if self.batch_momentum != 0.1 and self.shape.traits.norm != "bn":
            raise ValueError(f"batch_momentum does not apply: the stem of {self.name} has no batch norms")
        height, width = self.image_shape
        if repeated := [patch for patch in self.patches if self.patches.count(patch) > 1]:
            raise ValueError(f"patches: got {repeated[0]} more than once, expected each size once")
        if wrong := [patch for patch in self.patches if height % patch or width % patch]:
            raise ValueError(f"patches: got {wrong[0]}, expected sizes that divide the image, {height} x {width}")
        if self.patches and not self.shape.traits.is_resizable:
            raise ValueError(f"patches needs a linear stem, whose kernel can be resized; {self.name} has none")
        if self.patches and self.positions.kind == "relative":
            raise ValueError("patches and relative positions cannot be combined: these are those of one grid")
        without_prefix = (
            f"got class_token {json.dumps(self.class_token)} and registers {self.registers}, expected false and 0, with"
            " pool mean or mean_then_norm"
        )
        if self.attention == "axial" and self.shape.depth % 2:
            raise ValueError(
                f"attention axial alternates rows and columns: got {self.name} of depth {self.shape.depth}, expected an"
                f" even depth, as in {replace(self.shape, depth=self.shape.depth + 1)}"
            )
        if self.attention == "axial" and self.num_prefix:
            raise ValueError(f"attention axial is along rows and columns of patches: {without_prefix}")
        if self.attention == "axial" and self.positions.kind == "relative":
            raise ValueError(
                "positions relative and attention axial cannot be combined: these are offsets in raster order, that is"
                " along rows and columns"
            )
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool token needs class_token: true; without one, pool is mean or mean_then_norm")
        if self.distillation_token and self.pool != "token":
            raise ValueError(
                f"distillation_token true needs pool token: each of its two heads reads a token; got {self.pool}"
            )
        if self.positions.kind == "sincos2d" and self.shape.size % 4:
            raise ValueError(f"sincos2d positions need a width divisible by 4, {self.name} has {self.shape.size}")
        if self.shape.size % self.num_heads:
            raise ValueError(f"heads {self.heads} do not divide the width of {self.name}, {self.shape.size}")
        if self.positions.kind == "rope" and self.head_size % 4:
            raise ValueError(
                "rope positions turn pairs of channels, half by column, half by row: they need a head size divisible by"
                f" 4, {self.name} with {self.num_heads} heads has {self.head_size}"
            )
        if self.positions.kind == "relative" and self.num_prefix:
            raise ValueError(f"relative positions are offsets between patches: {without_prefix}")
        if self.execution == "fused" and self.dropout:
            raise ValueError(
                f"execution fused is not exact with dropout {self.dropout}, which acts between the products that fusing"
                " joins; use loop, or auto"
            )
        return self

    def _check_other(self) -> None:
        own = {"name", "image_size", "num_classes"}
        other = [
            f"{name} {json.dumps(value)}"
            for name, value in self.model_dump(mode="json", exclude=own, exclude_defaults=True).items()
        ]
        if other:
            raise ValueError(
                f"{self.name} has no {', '.join(other)}: of such a network only image_size and num_classes can be set"
            )
        check_size(self.name, *self.image_shape)

    @property
    def is_vit(self) -> bool:
        """Whether the network is a Vision Transformer of vitray; if not, it is one of `other_networks`."""
        return is_vit(self.name)

    @property
    def is_own(self) -> bool:
        """Whether the network is one of the user's code."""
        return self.name.startswith(OWN)

    def require_vit(self, what: str) -> None:
        """Refuse another network for something that only Vision Transformers have."""
        if not self.is_vit:
            raise ConfigError(f"{what} needs a Vision Transformer: got {self.name}, expected a name as in vit_s12x1_16")

    def at_patch(self, patch: int) -> "Model":
        """Return the settings of the network with patches of this size only."""
        name = str(replace(self.shape, patch=patch))
        return Model.model_validate({**self.model_dump(), "name": name, "patches": ()})

    def at_size(self, size: int | tuple[int, int]) -> "Model":
        """Return the settings of the network for images of another size."""
        return Model.model_validate({**self.model_dump(), "image_size": size})

    @property
    def shape(self) -> Name:
        """Width, depth, branches, patch and stem, parsed from the name."""
        self.require_vit("this")
        return parse_name(self.name)

    @property
    def num_heads(self) -> int:
        """Attention heads of each branch."""
        return self.heads or self.shape.heads

    @property
    def head_size(self) -> int:
        """Channels of each head."""
        return self.shape.size // self.num_heads

    @property
    def num_prefix(self) -> int:
        """Tokens before the patches."""
        return self.class_token + self.distillation_token + self.registers

    @property
    def num_classifiers(self) -> int:
        """Classification heads, one for each token that is read."""
        return 1 + self.distillation_token

    @property
    def num_tables(self) -> int:
        """How many trained embeddings of all patches are added, at the stem and at later levels."""
        if not isinstance(self.positions, Learned | Learned2d):
            return 0
        return self.shape.depth if self.positions.where == "levels" else 1

    @property
    def _matrix_parameters(self) -> int:
        """Parameters of blocks, stem, positions and head without their vectors: the bulk of any network."""
        shape, classes = self.shape, self.num_classes or 0
        hidden = (self.head.hidden or shape.size) if isinstance(self.head, MlpHead) else 0
        head = self.num_classifiers * (hidden * (shape.size + classes) if hidden else shape.size * classes)
        ffn = 8 if self.ffn_ratio is None else self.ffn_ratio * (3 if self.activation == "swiglu" else 2)
        block = round((4 + ffn) * shape.size) + 2 * (self.adapters or 0)
        blocks = block * shape.depth * shape.branches * shape.size
        positions = math.prod(self.grid) * shape.size * self.num_tables
        if self.positions.kind == "relative":
            positions = shape.depth * shape.branches * (2 * math.prod(self.grid) - 1) * self.head_size
        return blocks + 3 * shape.patch**2 * shape.size + positions + (head if classes else 0)

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = self.image_shape
        return height // self.shape.patch, width // self.shape.patch
