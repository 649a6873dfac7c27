"""The branches of a block: an attention and a feed-forward, each with its norm and LayerScale, without the residual.

Shapes: B images, N tokens, D width, H heads, P branches whose heads are one after another, K channels inside a branch,
d channels of a head. Of axial attention, R rows, C columns, S lines of L patches, X = B * S, N = R * C row by row.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.models.adapters import Adapter, count_linear
from vitray.models.drop_path import Draw
from vitray.models.positions import NO_POSITIONS, AttentionPositions, Grid, num_offsets, relative_bias, rotate
from vitray.models.products import Products

Execution = Literal["loop", "fused", "auto"]
Trace = dict[str, Tensor]
Norm = nn.LayerNorm | nn.RMSNorm
Axis = Literal["rows", "columns"]
AXES: tuple[Axis, Axis] = ("rows", "columns")
"""The axes of a network's levels with axial attention, in turn."""
# Tokens whose attention weights may be stored for the backward pass: beside the activations of a level with heads of 64
# channels, those of 128 tokens take a third more.
MOST_STORED = 128


class BlockSpec(NamedTuple):
    """The settings of a block."""

    width: int
    heads: int
    branches: int = 1
    layerscale: float | None = None
    drop_path: float = 0.0
    drop_path_draw: Draw = "sample"
    dropout: float = 0.0
    inner: int | None = None
    """Channels of a feed-forward between its products; None for 4 times the width."""
    activation: str = "gelu"
    norm_eps: float = 1e-6
    execution: Execution = "auto"
    norm: str = "layernorm"
    bias: bool = True
    qk_norm: bool = False
    relative_patches: int | None = None
    """Patches of an image whose offsets attention learns; None without relative positions."""
    adapters: int | None = None
    """Width of the adapter after a feed-forward; None without one."""
    axis: Axis | None = None
    """Axis along which patches attend; None for attention between all tokens."""


class Attention(nn.Module):
    """One attention branch, without the residual connection."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.heads, head_size = spec.heads, spec.width // spec.heads
        self.axis: Axis | None = spec.axis
        self.norm = build_norm(spec.norm, spec.width, spec.norm_eps, spec.bias)
        self.qkv = nn.Linear(spec.width, 3 * spec.width, bias=spec.bias)
        self.out = nn.Linear(spec.width, spec.width, bias=spec.bias)
        self.scale = _layerscale(spec)
        norms = [build_norm(spec.norm, head_size, spec.norm_eps, spec.bias) for _ in range(2 * spec.qk_norm)]
        self.q_norm, self.k_norm = norms or (None, None)
        self.relative = None
        if spec.relative_patches:
            table_Kd = torch.empty(num_offsets(spec.relative_patches), head_size)
            self.relative = nn.Parameter(nn.init.trunc_normal_(table_Kd, std=0.02))

    def forward(
        self,
        x_BND: Tensor,
        dropout: float,
        positions: AttentionPositions = NO_POSITIONS,
        trace: Trace | None = None,
        key: str = "",
    ) -> Tensor:
        """Return the output; a trace receives the attention weights (BHNN)."""
        q, k, v, bias = self._heads(x_BND, positions)
        if trace is None:
            h_BHNd = attend(q, k, v, bias, self.axis, positions.grid)
        else:
            trace[key] = attention_weights(q, k, bias, self.axis, positions.grid)
            h_BHNd = trace[key] @ v
        return F.dropout(scaled_output(self.out, self.scale, join_heads(h_BHNd)), dropout, self.training)

    def count(self, products: Products, tokens: int, attended: int) -> None:
        """Count the products for an image's tokens, each of which attends to some."""
        products.train(self.norm)
        count_linear(products, self.qkv, tokens)
        products.train(self.q_norm, self.k_norm)
        if self.relative is not None:
            products.weight(self.relative, tokens * self.heads)
        products.pair(2 * tokens * attended * self.qkv.in_features)
        count_linear(products, self.out, tokens)
        products.train(self.scale)

    def weights(self, x_BND: Tensor, positions: AttentionPositions = NO_POSITIONS) -> Tensor:
        """Return the attention weights (BHNN) for an input of the level; its output is not computed."""
        q, k, _, bias = self._heads(x_BND, positions)
        return attention_weights(q, k, bias, self.axis, positions.grid)

    def _heads(self, x_BND: Tensor, positions: AttentionPositions) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values (BHNd), and the bias of the logits (BHNN)."""
        q, k, v = split_heads(self.qkv(self.norm(x_BND)), self.heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).type_as(v), self.k_norm(k).type_as(v)
        q, k, bias = apply_positions(q, k, positions, None if self.relative is None else self.relative.unsqueeze(-3))
        return q, k, v, bias


class FeedForward(nn.Module):
    """One feed-forward branch, without the residual connection."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        inner = spec.inner or 4 * spec.width
        self.activation = spec.activation
        self.norm = build_norm(spec.norm, spec.width, spec.norm_eps, spec.bias)
        self.up = nn.Linear(spec.width, inner * (2 if spec.activation == "swiglu" else 1), bias=spec.bias)
        self.down = nn.Linear(inner, spec.width, bias=spec.bias)
        self.scale = _layerscale(spec)
        self.adapter = Adapter(spec.width, spec.adapters, spec.bias) if spec.adapters else None

    def forward(self, x_BND: Tensor, dropout: float) -> Tensor:
        return self.output(activate(self.up(self.norm(x_BND)), self.activation), dropout)

    def output(self, h_BNK: Tensor, dropout: float) -> Tensor:
        """Return the output, from the activations between the two products."""
        h_BNK = F.dropout(h_BNK, dropout, self.training)
        if self.adapter is None:
            return F.dropout(scaled_output(self.down, self.scale, h_BNK), dropout, self.training)
        h_BND = self.adapter(F.dropout(self.down(h_BNK), dropout, self.training))
        return h_BND if self.scale is None else h_BND * self.scale

    def count(self, products: Products, tokens: int) -> None:
        """Count the products for an image's tokens."""
        products.train(self.norm)
        count_linear(products, self.up, tokens)
        count_linear(products, self.down, tokens)
        if self.adapter is not None:
            products.branches(partial(self.adapter.count, products, tokens))
        products.train(self.scale)


Branches = tuple[Attention, ...] | tuple[FeedForward, ...]


def _layerscale(spec: BlockSpec) -> nn.Parameter | None:
    return None if spec.layerscale is None else nn.Parameter(torch.full((spec.width,), spec.layerscale))


def scaled_output(layer: nn.Linear, scale_D: Tensor | None, h_BNK: Tensor) -> Tensor:
    """Return the output of a branch's last layer times LayerScale.

    In training the weight is scaled where it is smaller than the output, which is then neither read nor stored once
    more. Compiled code scales on the way.
    """
    if scale_D is None:
        return layer(h_BNK)
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or type(layer) is not nn.Linear:
        return layer(h_BNK) * scale_D
    # Where one is frozen, the scaled weight would be stored in place of nothing.
    is_trained = layer.weight.requires_grad and scale_D.requires_grad
    if not is_trained or layer.in_features >= h_BNK.shape[0] * h_BNK.shape[1]:
        return layer(h_BNK) * scale_D
    return F.linear(h_BNK, scale_D[:, None] * layer.weight, None if layer.bias is None else scale_D * layer.bias)


def split_heads(qkv_BNK: Tensor, heads: int) -> list[Tensor]:
    """Return queries, keys and values, BHNd.

    Chunks, because the gradients of three views of one permuted tensor would be copied twice: stacked, then reordered.
    """
    return [part_BND.unflatten(2, (heads, -1)).transpose(1, 2) for part_BND in qkv_BNK.chunk(3, dim=2)]


def join_heads(h_BHNd: Tensor) -> Tensor:
    """Return the channels of all heads of each token, BNK."""
    return h_BHNd.transpose(1, 2).flatten(2)


def apply_positions(
    q_BHNd: Tensor, k_BHNd: Tensor, positions: AttentionPositions, tables_PKd: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return queries and keys at their positions, and the bias of their logits (BHNN) if they have one."""
    if positions.rotation is not None:
        q_BHNd, k_BHNd = rotate(q_BHNd, positions.rotation), rotate(k_BHNd, positions.rotation)
    if tables_PKd is None:
        return q_BHNd, k_BHNd, None
    assert positions.offset is not None, "relative attention needs the offsets of its patches"
    return q_BHNd, k_BHNd, relative_bias(q_BHNd, tables_PKd, positions.offset)


def attend(
    q_BHNd: Tensor,
    k_BHNd: Tensor,
    v_BHNd: Tensor,
    bias_BHNN: Tensor | None,
    axis: Axis | None = None,
    grid: Grid | None = None,
) -> Tensor:
    """Return the values weighted by attention, BHNd: between all tokens, or along one axis of a grid of patches."""
    if axis is None:
        if bias_BHNN is None and _trains_in_bfloat16_on_cpu(q_BHNd):
            return _attend_by_products(q_BHNd, k_BHNd, v_BHNd)
        return F.scaled_dot_product_attention(q_BHNd, k_BHNd, v_BHNd, attn_mask=bias_BHNN)
    assert grid is not None, "axial attention needs the grid of its patches"
    q, k, v = (split_lines(each, axis, grid) for each in (q_BHNd, k_BHNd, v_BHNd))
    return join_lines(F.scaled_dot_product_attention(q, k, v), axis, grid)


def _trains_in_bfloat16_on_cpu(q_BHNd: Tensor) -> bool:
    """Whether torch's fused attention is slow here: its backward pass takes three times that of float32."""
    is_short = q_BHNd.device.type == "cpu" and q_BHNd.shape[2] <= MOST_STORED
    return is_short and q_BHNd.dtype == torch.bfloat16 and torch.is_grad_enabled() and q_BHNd.requires_grad


def _attend_by_products(q_BHNd: Tensor, k_BHNd: Tensor, v_BHNd: Tensor) -> Tensor:
    """Return attention with its weights stored, and their softmax in float32."""
    logits_BHNN = (q_BHNd * q_BHNd.shape[3] ** -0.5) @ k_BHNd.mT
    return logits_BHNN.softmax(dim=3, dtype=torch.float32).to(v_BHNd.dtype) @ v_BHNd


def attention_weights(
    q_BHNd: Tensor,
    k_BHNd: Tensor,
    bias_BHNN: Tensor | None = None,
    axis: Axis | None = None,
    grid: Grid | None = None,
) -> Tensor:
    """Return the explicit attention weights, BHNN: each query's row sums to one."""
    if axis is not None:
        assert grid is not None, "axial attention needs the grid of its patches"
        q_XHLd, k_XHLd = split_lines(q_BHNd, axis, grid), split_lines(k_BHNd, axis, grid)
        return spread_weights(attention_weights(q_XHLd, k_XHLd), axis, grid)
    logits_BHNN = q_BHNd @ k_BHNd.transpose(-2, -1) * q_BHNd.shape[-1] ** -0.5
    return (logits_BHNN if bias_BHNN is None else logits_BHNN + bias_BHNN).softmax(dim=-1)


def activate(h_BNK: Tensor, activation: str) -> Tensor:
    """Return the activations of a feed-forward; swiglu gates the second half of the channels by the first."""
    match activation:
        case "swiglu":
            gate_BNK, value_BNK = h_BNK.chunk(2, dim=-1)
            return F.silu(gate_BNK) * value_BNK
        case "gelu_tanh":
            return F.gelu(h_BNK, approximate="tanh")
        case _:
            return F.gelu(h_BNK)


# ---- axial attention (ViT paper, D.6) --------------------------------------------------------------------------------

# Patches attend along one axis, within their line: a row or a column, which is a sequence of its own.


def split_lines(x_BHNd: Tensor, axis: Axis, grid: Grid) -> Tensor:
    """Return the patches of each line as a sequence, (B S)HLd."""
    x_BHRCd = x_BHNd.unflatten(2, grid)
    return (x_BHRCd.transpose(1, 2) if axis == "rows" else x_BHRCd.permute(0, 3, 1, 2, 4)).flatten(0, 1)


def join_lines(x_XHLd: Tensor, axis: Axis, grid: Grid) -> Tensor:
    """Return the patches of all lines row by row, BHNd."""
    x_BSHLd = x_XHLd.unflatten(0, (-1, grid[0] if axis == "rows" else grid[1]))
    return (x_BSHLd.transpose(1, 2) if axis == "rows" else x_BSHLd.permute(0, 2, 3, 1, 4)).flatten(2, 3)


def spread_weights(weights_XHLL: Tensor, axis: Axis, grid: Grid) -> Tensor:
    """Return the attention weights between all patches, BHNN: zero between lines."""
    lines = grid[0] if axis == "rows" else grid[1]
    own = torch.eye(lines, dtype=weights_XHLL.dtype, device=weights_XHLL.device)
    order = "bshlm,st->bhsltm" if axis == "rows" else "bshlm,st->bhlsmt"
    return torch.einsum(order, weights_XHLL.unflatten(0, (-1, lines)), own).flatten(4, 5).flatten(2, 3)


# ---- norms -----------------------------------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    """RMSNorm that computes at least in the type of its weight.

    Under autocast the queries and keys that qk_norm normalizes are bfloat16. torch has no fused kernel for an input and
    a weight of different types: it would warn, and round to bfloat16 before the weight.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input."""
        return super().forward(x.to(torch.promote_types(x.dtype, self.weight.dtype)))


def build_norm(kind: str, width: int, eps: float, bias: bool) -> Norm:
    """Return a norm over `width` channels; an rmsnorm has no bias."""
    return RMSNorm(width, eps=eps) if kind == "rmsnorm" else nn.LayerNorm(width, eps=eps, bias=bias)


def bias_of(norm: Norm) -> Tensor | None:
    """Return the bias of a norm, if it has one."""
    return norm.bias if isinstance(norm, nn.LayerNorm) else None


def normalize(x_BND: Tensor, norm: Norm) -> Tensor:
    """Return the output of a norm without its weight and bias."""
    if isinstance(norm, nn.RMSNorm):
        x_BND = x_BND.to(torch.promote_types(x_BND.dtype, norm.weight.dtype))
        return F.rms_norm(x_BND, norm.normalized_shape, eps=norm.eps)
    return F.layer_norm(x_BND, norm.normalized_shape, eps=norm.eps)


def normalize_heads(x_BHNd: Tensor, norms: Sequence[Norm]) -> Tensor:
    """Return the normalized heads of several branches, each by the weight and bias of its own branch."""
    x_BPHNd = normalize(x_BHNd, norms[0]).unflatten(1, (len(norms), -1))
    x_BPHNd = x_BPHNd * torch.stack([norm.weight for norm in norms])[:, None, None]
    biases = [bias for norm in norms if (bias := bias_of(norm)) is not None]
    if biases:
        x_BPHNd = x_BPHNd + torch.stack(biases)[:, None, None]
    return x_BPHNd.flatten(1, 2)
