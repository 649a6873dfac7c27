"""Parameters and multiply-adds of a network, computed from its settings alone: in microseconds, without torch.

D width, N tokens, d channels of a head. A test compares the numbers with measurements of the network itself.
"""

import math
from typing import NamedTuple

from vitray.config import Model
from vitray.config.classification import Part
from vitray.config.stems import stem_cost


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


def inner_width(model: Model) -> int:
    """Return the channels of a feed-forward between its products."""
    width = model.shape.size
    if model.ffn_ratio is None:
        return 8 * math.ceil(width / 3) if model.activation == "swiglu" else 4 * width
    return max(1, round(model.ffn_ratio * width))


def sizes_of(model: Model) -> Sizes:
    """Return the sizes of a model."""
    shape, classes = model.shape, model.num_classes or 0
    D, patches = shape.size, model.grid[0] * model.grid[1]
    N, pairs, d = patches + model.num_prefix, shape.depth * shape.branches, model.head_size
    inner = inner_width(model)
    up = inner * (2 if model.activation == "swiglu" else 1)
    bias, shift = model.bias, model.bias and model.norm == "layernorm"
    adapters = model.adapters or 0
    offsets = (2 * patches - 1) * (model.positions.kind == "relative")
    hidden = (model.head.hidden or D) if model.head.kind == "mlp" else 0
    # A query's products with keys and values: of all tokens, or of a row in one level and of a column in the next.
    attended = sum(model.grid) if model.attention == "axial" else 2 * N
    stem, stem_work = stem_cost(shape.traits, D, shape.patch)
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
    return Sizes(parts, (stem_work * patches + products + 5 * normalized) / 1e9)


def _positions(model: Model, patches: int) -> int:
    """Parameters of one trained embedding of all patches."""
    halves = sum(model.grid) if model.positions.kind == "learned2d" else 2 * patches
    return halves * model.shape.size // 2
