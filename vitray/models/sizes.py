"""Parameters and multiply-adds of a network, computed from its settings alone: in microseconds, without torch.

D width, N tokens, d channels of a head. A test compares the numbers with measurements of the network itself.
"""

import math
from typing import NamedTuple

from vitray.config import Model
from vitray.config.finetuning import Part
from vitray.config.model_names import RESNETS, Name


class Sizes(NamedTuple):
    """The size of a network and the work for one image."""

    parts: dict[Part, int]
    """Parameters of each part; `norms` includes the final norm."""
    gflops: float
    """Billions of multiply-adds of a forward pass, counted as in the papers: matrix products, and 5 per normalized
    element."""

    @property
    def params(self) -> int:
        """The number of all parameters."""
        return sum(self.parts.values())


# The local-transformer stem (`local_stem`).
CELL, LOCAL_DEPTH, LOCAL_HEADS = 4, 4, 4


# The channels of a ResNet's root, and the stride of its output; each later stage halves the sides.
ROOT, ROOT_STRIDE = 64, 4


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
        case "local":  # the cells of a patch, then their merging; the blocks lie between
            merges = (patch // CELL).bit_length() - 1
            sizes, channels = [CELL] + [2] * merges, [width // 8] * merges + [width]
            return [Convolution(size, size, 0, channel) for size, channel in zip(sizes, channels, strict=True)]
        case other:
            raise AssertionError(f"stem {other} is in model_names.STEMS and not here")


def resnet_layers(name: Name) -> tuple[int, ...]:
    """Return the units of each stage of a hybrid's ResNet.

    At patch size 16, stage 3 has the units of stage 4 too, so that the feature map keeps stride 16 (ViT paper, 4.1).
    """
    layers = RESNETS[name.stem]
    return (*layers[:2], sum(layers[2:])) if layers and name.patch == 16 else layers


def stage_width(number: int) -> int:
    """Return the channels of a stage of a ResNet, counted from 0."""
    return 256 * 2**number


def feature_map(name: Name) -> tuple[int, int]:
    """Return the channels of a hybrid's feature map, and the pixels of a cell's side."""
    stages = len(resnet_layers(name))
    return (stage_width(stages - 1), ROOT_STRIDE * 2 ** (stages - 1)) if stages else (ROOT, ROOT_STRIDE)


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
    adapters = model.adapters or 0
    offsets = (2 * patches - 1) * (model.positions.kind == "relative")
    hidden = (model.head.hidden or D) if model.head.kind == "mlp" else 0
    # A query's products with keys and values: of all tokens, or of a row in one level and of a column in the next.
    attended = sum(model.grid) if model.attention == "axial" else 2 * N
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
        "adapters": pairs * (2 * D * adapters + (adapters + D) * bias) * (adapters > 0),
        "head": head_matrices + heads * (hidden + classes),
    }
    products = pairs * N * D * (4 * D + up + inner + 2 * adapters + attended + offsets) + head_matrices
    normalized = pairs * (2 + 2 * model.qk_norm) * N * D + D * (
        patches if model.pool == "mean" else model.num_classifiers
    )
    return Sizes(parts, (stem_work + products + 5 * normalized) / 1e9)


def _positions(model: Model, patches: int) -> int:
    """Parameters of one trained embedding of all patches."""
    halves = sum(model.grid) if model.positions.kind == "learned2d" else 2 * patches
    return halves * model.shape.size // 2


def _stem(model: Model) -> tuple[int, int]:
    """Parameters and multiply-adds of the stem."""
    if model.shape.is_hybrid:
        return _hybrid(model)
    params, work = _local_blocks(model) if model.shape.stem == "local" else (0, 0)
    before, (height, width) = 3, model.image_shape
    for kernel, stride, _, channels in convolutions(model.shape):
        height, width = height // stride, width // stride
        weights = kernel * kernel * before * channels
        norm = model.shape.stem_norm is not None
        params += weights + channels + 2 * channels * norm
        work += (weights + 5 * channels * norm) * height * width
        before = channels
    return params, work


def _local_blocks(model: Model) -> tuple[int, int]:
    """Parameters and multiply-adds of a local stem, besides its convolutions."""
    shape, C, n = model.shape, model.shape.size // 8, (model.shape.patch // CELL) ** 2
    block, norms = 12 * C * C, (2 * LOCAL_DEPTH + 1) * C
    linear = 3 * shape.patch**2 * shape.size
    params = LOCAL_DEPTH * (block + 9 * C) + 2 * norms + n * C + linear + shape.size
    return params, math.prod(model.grid) * (n * (LOCAL_DEPTH * (block + 2 * n * C) + 5 * norms) + linear)


def _hybrid(model: Model) -> tuple[int, int]:
    """Parameters and multiply-adds of a ResNet and of the projection of its feature map."""
    shape, pixels = model.shape, math.prod(model.image_shape)
    params = work = 0

    def add(kernel: int, before: int, after: int, stride: int) -> None:
        """Add a convolution and its group norm; `stride` is that of the output to the image."""
        nonlocal params, work
        params += kernel * kernel * before * after + 2 * after
        work += (kernel * kernel * before + 5) * after * pixels // stride**2

    add(7, 3, ROOT, ROOT_STRIDE // 2)
    before = ROOT
    for number, depth in enumerate(resnet_layers(shape)):
        after, stride = stage_width(number), ROOT_STRIDE * 2**number
        inner, earlier = after // 4, stride if number == 0 else stride // 2
        for unit in range(depth):
            add(1, before, inner, earlier if unit == 0 else stride)
            add(3, inner, inner, stride)
            add(1, inner, after, stride)
            if unit == 0:
                add(1, before, after, stride)
            before = after
    channels, cell = feature_map(shape)
    projection = (shape.patch // cell) ** 2 * channels * shape.size
    return params + projection + shape.size, work + projection * math.prod(model.grid)
