"""A network as one graph from pixels to logits: normalized inside, branches folded, optionally with int8 weights.

Shapes: B images, C colors, H x W pixels, N tokens, D width, K classes.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config import Model
from vitray.config.augmentation import Normalize
from vitray.models.blocks import Block, fuse_weights
from vitray.models.branches import activate, join_heads, split_heads
from vitray.models.network import AnyNetwork
from vitray.models.positions import Grid, VisiblePatches, axial_rotation, sincos2d
from vitray.models.vit import ViT


class PixelNetwork(nn.Module):
    """A network that takes uint8 pixels and normalizes them itself."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, normalize: Normalize) -> None:
        super().__init__()
        self.network = network
        for name, values in (("mean", normalize.mean), ("std", normalize.std)):
            self.register_buffer(name, torch.tensor(values).mul(255).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (BK) of uint8 images (BCHW)."""
        return self.network((images.float() - self.mean) / self.std)


class FoldedBlock(nn.Module):
    """One level of a network in evaluation mode, with its branches, norms and LayerScale folded into four products."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        attention, feedforward = fuse_weights(block.attentions), fuse_weights(block.feedforwards)
        norm = block.attentions[0].norm
        assert isinstance(norm, nn.LayerNorm), "other norms are not folded"
        self.width, self.norm_eps = block.width, norm.eps
        self.heads = block.heads * block.branches
        self.activation = block.feedforwards[0].activation
        self.qkv = _linear(attention.weight_in, attention.bias_in)
        self.out = _linear(attention.weight_out, _sum(attention.bias_out))
        self.up = _linear(feedforward.weight_in, feedforward.bias_in)
        self.down = _linear(feedforward.weight_out, _sum(feedforward.bias_out))

    def forward(self, x_BND: Tensor, *_: Any) -> Tensor:
        """Return the output of the level; a trace and its key, which `Block` takes, are ignored."""
        q, k, v = split_heads(self.qkv(self._normalized(x_BND)), self.heads)
        x_BND = x_BND + self.out(join_heads(F.scaled_dot_product_attention(q, k, v)))
        return x_BND + self.down(activate(self.up(self._normalized(x_BND)), self.activation))

    def _normalized(self, x_BND: Tensor) -> Tensor:
        return F.layer_norm(x_BND, (self.width,), eps=self.norm_eps)


class AnyGridSinCos(nn.Module):
    """Fixed sin-cos positions, computed for the grid of the images."""

    def __init__(self, width: int, frequencies: str) -> None:
        super().__init__()
        self.width, self.frequencies = width, frequencies

    def forward(self, x_BND: Tensor, grid: Grid) -> Tensor:
        return x_BND + sincos2d(grid, self.width, self.frequencies).to(x_BND)


class AnyGridRope(nn.Module):
    """Axial rotary positions, computed for the grid of the images."""

    def __init__(self, head_size: int, base: float) -> None:
        super().__init__()
        self.head_size, self.base = head_size, base

    def forward(self, places: VisiblePatches, num_prefix: int) -> Tensor:
        rotation = axial_rotation(places.grid, self.head_size, self.base)
        before = (0, 0, num_prefix, 0)  # the prefix does not turn: cosine 1, sine 0
        turned = torch.cat([F.pad(rotation[:1], before, value=1.0), F.pad(rotation[1:], before)])
        return turned[:, None, None]


class Int8Linear(nn.Module):
    """A linear layer whose weights are 8-bit integers times one number per output; it computes in floats."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        largest = linear.weight.abs().amax(dim=1, keepdim=True)
        scale = torch.where(largest > 0, largest / 127, 1.0)
        self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def fold(vit: AnyNetwork, normalize: Normalize, *, any_size: bool, int8_weights: bool) -> PixelNetwork:
    """Return the network from uint8 pixels to logits, as a copy in evaluation mode."""
    folded: Any = copy.deepcopy(vit).cpu().float().eval().requires_grad_(False)
    if not isinstance(vit, ViT):
        pass
    elif _is_foldable(vit.model):
        folded.blocks = nn.ModuleList(FoldedBlock(block) for block in folded.blocks)
    else:
        blocks: Any = folded.blocks
        for block in blocks:
            block.execution = "loop"
    if any_size and isinstance(vit, ViT) and vit.model.positions.kind == "sincos2d":
        folded.positions = AnyGridSinCos(vit.model.shape.size, vit.model.positions.frequencies)
    if any_size and vit.model.positions.kind == "rope":
        folded.rope = AnyGridRope(vit.model.head_size, vit.model.positions.base)
    if int8_weights:
        _quantize(folded)
    return PixelNetwork(folded, normalize).eval().requires_grad_(False)


def _is_foldable(model: Model) -> bool:
    """Whether the levels are LayerNorms, products with biases, GELU and attention without positions, and no more."""
    is_plain = model.norm == "layernorm" and model.bias and not model.qk_norm and model.activation != "swiglu"
    is_plain = is_plain and model.adapters is None and model.attention == "global"
    return is_plain and model.positions.kind not in ("relative", "rope")


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    assert bias is not None, "networks without biases are not folded"
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)
    return layer


def _sum(bias_PD: Tensor | None) -> Tensor | None:
    return None if bias_PD is None else bias_PD.sum(0)


def _quantize(network: nn.Module) -> None:
    """Replace every linear layer by one with int8 weights."""
    for parent in list(network.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear):
                setattr(parent, name, Int8Linear(layer))
