"""Parameters and multiply-adds of a network, computed from its settings alone: in microseconds, without torch.

D width, N tokens, d channels of a head. `counts` measures the same on the network itself, and a test compares the two.
"""

import math
from typing import Literal, NamedTuple

from vitray.config import Model
from vitray.config.model_names import Name
from vitray.config.training import Part


class Sizes(NamedTuple):
    """The size of a network and the work for one image."""

    parts: dict[Part, int]
    """Parameters of each part; `norms` includes the final norm."""
    gflops: float
    """Billions of multiply-adds of a forward pass, counted as in the papers: matrix products, and 5 per normalised
    element."""

    @property
    def params(self) -> int:
        """The number of all parameters."""
        return sum(self.parts.values())


class Convolution(NamedTuple):
    """One convolution of a stem."""

    kernel: int
    stride: int
    padding: int
    channels: int


def convolutions(name: Name) -> list[Convolution]:
    """Return the convolutions of a model's stem, in order."""
    width, patch = name.size, name.patch
    match name.stem.partition("_")[0]:
        case "linear":
            return [Convolution(patch, patch, 0, width)]
        case "hmlp":
            # "Three things", Algorithm 1: patches of 4 pixels, then doubled, at a quarter of the width until the last
            # step. (The text of the paper starts at 2 x 2, both of its listings at 4 x 4.)
            doublings = (patch // 4).bit_length() - 1
            sizes, channels = [4] + [2] * doublings, [width // 4] * doublings + [width]
            return [Convolution(size, size, 0, channel) for size, channel in zip(sizes, channels, strict=True)]
        case "conv":  # LeViT
            return [Convolution(3, 2, 1, width // divisor) for divisor in (8, 4, 2, 1)]
        case other:
            raise AssertionError(f"stem {other} is in model_names.STEMS and not here")


def stem_norm(name: Name) -> Literal["ln", "bn"] | None:
    """Return the kind of norm after each convolution of a model's stem."""
    kind, *extras = name.stem.split("_")
    return "ln" if "ln" in extras else "bn" if "bn" in extras or kind == "conv" else None


def inner_width(width: int, activation: str) -> int:
    """Return the channels of a feed-forward between its products."""
    return 8 * math.ceil(width / 3) if activation == "swiglu" else 4 * width


def up_width(width: int, activation: str) -> int:
    """Return the channels that a feed-forward's first product computes; swiglu has as many gates."""
    return inner_width(width, activation) * (2 if activation == "swiglu" else 1)


def sizes_of(model: Model) -> Sizes:
    """Return the sizes of a model."""
    shape, classes = model.shape, model.num_classes or 0
    D, patches = shape.size, model.grid[0] * model.grid[1]
    N, pairs, d = patches + model.num_prefix, shape.depth * shape.branches, model.head_size
    inner, up = inner_width(D, model.activation), up_width(D, model.activation)
    bias, shift = model.bias, model.bias and model.norm == "layernorm"
    offsets = (2 * patches - 1) * (model.positions.kind == "relative")
    hidden = (model.head.hidden or D) if model.head.kind == "mlp" else 0
    stem, stem_work = _stem(model)
    heads = model.num_classifiers if classes else 0
    head_matrices = heads * (D * hidden + hidden * classes if hidden else D * classes)
    parts: dict[Part, int] = {
        "stem": stem,
        "class_token": D * model.class_token,
        "distillation_token": D * model.distillation_token,
        "registers": D * model.registers,
        "positions": model.num_tables * _positions(model, patches),
        "norms": (2 * pairs + 1) * D * (1 + shift),
        "attn": pairs * (4 * D * D + 4 * D * bias + 2 * d * (1 + shift) * model.qk_norm + offsets * d),
        "ffn": pairs * ((up + inner) * D + (up + D) * bias),
        "layerscale": pairs * 2 * D * (model.layerscale is not None),
        "head": head_matrices + heads * (hidden + classes),
    }
    products = pairs * N * D * (4 * D + up + inner + 2 * N + offsets) + head_matrices
    normalised = pairs * (2 + 2 * model.qk_norm) * N * D + D * (
        patches if model.pool == "mean" else model.num_classifiers
    )
    return Sizes(parts, (stem_work + products + 5 * normalised) / 1e9)


def training_gflops(model: Model) -> float:
    """Return the gflops of one image's forward pass in training: the mean over the patch sizes that are drawn."""
    models = [model.at_patch(patch) for patch in model.patches] or [model]
    return sum(sizes_of(each).gflops for each in models) / len(models)


def _positions(model: Model, patches: int) -> int:
    """Parameters of one trained embedding of all patches."""
    halves = sum(model.grid) if model.positions.kind == "learned2d" else 2 * patches
    return halves * model.shape.size // 2


def _stem(model: Model) -> tuple[int, int]:
    """Parameters and multiply-adds of the stem."""
    params = work = 0
    before, (height, width) = 3, model.image_shape
    for kernel, stride, _, channels in convolutions(model.shape):
        height, width = height // stride, width // stride
        weights = kernel * kernel * before * channels
        norm = stem_norm(model.shape) is not None
        params += weights + channels + 2 * channels * norm
        work += (weights + 5 * channels * norm) * height * width
        before = channels
    return params, work
