"""The transformer block with any number of parallel branches, run one by one or fused into larger matrix products.

One level is eq. (2) of "Three things":  y = x + sum_p attn_p(x),  z = y + sum_p ffn_p(y).
Shapes: B images, N tokens, D width, H heads, P parallel branches, K channels inside a branch.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.models.adapters import weight_of
from vitray.models.branches import (
    Attention,
    BlockSpec,
    Branches,
    FeedForward,
    Trace,
    activate,
    apply_positions,
    attend,
    bias_of,
    join_heads,
    normalize,
    normalize_heads,
    split_heads,
)
from vitray.models.drop_path import ALL, Draw, Kept, draw_factors, draw_kept
from vitray.models.positions import NO_POSITIONS, AttentionPositions
from vitray.models.products import Products


class Block(nn.Module):
    """One level of the network: parallel attention branches, then parallel feed-forward branches.

    One branch is the ordinary block. Drop path is drawn per branch and per sample, after LayerScale; a branch that is
    run by itself computes only the samples that it keeps.
    """

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.width, self.heads, self.branches = spec.width, spec.heads, spec.branches
        self.drop_path = spec.drop_path
        self.drop_path_draw: Draw = spec.drop_path_draw
        self.dropout, self.execution = spec.dropout, spec.execution
        self.attentions = tuple(Attention(spec) for _ in range(spec.branches))
        self.feedforwards = tuple(FeedForward(spec) for _ in range(spec.branches))
        # Named attn1, attn2, ... and ffn1, ffn2, ..., as in `trace["block07.attn1"]`.
        for name, branches in (("attn", self.attentions), ("ffn", self.feedforwards)):
            for index, branch in enumerate(branches, start=1):
                self.add_module(f"{name}{index}", branch)
        self._fused: dict[type, tuple[Any, FusedWeights]] = {}

    def forward(
        self,
        x_BND: Tensor,
        trace: Trace | None = None,
        key: str = "block",
        positions: AttentionPositions = NO_POSITIONS,
    ) -> Tensor:
        """Return the output of the level; a `trace` receives each branch's attention weights."""
        if trace is None:
            return self.level(x_BND, positions)
        # A trace needs the attention weights of each branch, so it excludes fusing.
        return self.feed(self._attend_loop(x_BND, trace, key, positions), False)

    def level(self, x_BND: Tensor, positions: AttentionPositions) -> Tensor:
        """Return the output of the level; what a deep network compiles, once for all its levels."""
        if self._is_fused(x_BND):
            return self.feed(self._attend_fused(x_BND, positions), True)
        return self.feed(self._attend_loop(x_BND, None, "", positions), False)

    def feed(self, x_BND: Tensor, fused: bool) -> Tensor:
        """Return the second half of the level: the input plus all feed-forward outputs."""
        return self._feed_fused(x_BND) if fused else self._feed_loop(x_BND)

    def count(self, products: Products, tokens: int, attended: int) -> None:
        """Count the products for an image's tokens, each of which attends to some; execution fused has the same.

        Of a branch that is left out for a share of the images, only those that keep it count.
        """
        share, products.share = products.share, products.share * (1 - self.drop_path * self.training)
        products.branches(*(functools.partial(each.count, products, tokens, attended) for each in self.attentions))
        products.branches(*(functools.partial(each.count, products, tokens) for each in self.feedforwards))
        products.share = share

    def _is_fused(self, x_BND: Tensor) -> bool:
        has_dropout = self.training and self.dropout > 0
        if self.execution == "fused" and has_dropout and self.branches > 1:
            raise ValueError("execution fused is not exact while dropout is active; set execution to loop or auto")
        if self.branches == 1 or has_dropout or self.execution == "loop":
            return False
        return self.execution == "fused" or is_fusing_faster(self.branches * x_BND.numel(), x_BND.device.type)

    # ---- one by one --------------------------------------------------------------------------------------------------

    def _attend_loop(
        self, x_BND: Tensor, trace: Trace | None, key: str, positions: AttentionPositions = NO_POSITIONS
    ) -> Tensor:
        sum_BND, kept = x_BND, self._draw_kept(x_BND, computes_all=trace is not None)
        for index, (branch, some) in enumerate(zip(self.attentions, kept, strict=True), start=1):
            h_KND = branch(some.of(x_BND), self.dropout, positions.of(some.rows), trace, f"{key}.attn{index}")
            sum_BND = some.add(sum_BND, h_KND)
        return sum_BND

    def _feed_loop(self, x_BND: Tensor) -> Tensor:
        sum_BND = x_BND
        for branch, some in zip(self.feedforwards, self._draw_kept(x_BND), strict=True):
            sum_BND = some.add(sum_BND, branch(some.of(x_BND), self.dropout))
        return sum_BND

    def _draw_kept(self, x_BND: Tensor, computes_all: bool = False) -> list[Kept]:
        """The samples that each branch computes and keeps."""
        if not (self.training and self.drop_path):
            return [ALL] * self.branches
        return draw_kept(x_BND, self.branches, self.drop_path, self.drop_path_draw, computes_all)

    # ---- fused -------------------------------------------------------------------------------------------------------

    def _attend_fused(self, x_BND: Tensor, positions: AttentionPositions) -> Tensor:
        weights = self._fused_weights(self.attentions, x_BND)
        qkv_BNK = F.linear(normalize(x_BND, self.attentions[0].norm), weights.weight_in, weights.bias_in)
        q, k, v = split_heads(qkv_BNK, self.heads * self.branches)
        if q_norms := [branch.q_norm for branch in self.attentions if branch.q_norm is not None]:
            k_norms = [branch.k_norm for branch in self.attentions if branch.k_norm is not None]
            q, k = normalize_heads(q, q_norms).type_as(v), normalize_heads(k, k_norms).type_as(v)
        tables: list[Tensor] = [branch.relative for branch in self.attentions if branch.relative is not None]
        q, k, bias = apply_positions(q, k, positions, torch.stack(tables) if tables else None)
        h_BNK = join_heads(attend(q, k, v, bias, self.attentions[0].axis, positions.grid))
        return self._add_fused(x_BND, h_BNK, weights)

    def _feed_fused(self, x_BND: Tensor) -> Tensor:
        weights, first = self._fused_weights(self.feedforwards, x_BND), self.feedforwards[0]
        h_BNK = F.linear(normalize(x_BND, first.norm), weights.weight_in, weights.bias_in)
        h_BNK = activate(h_BNK, first.activation)
        if first.adapter is None:
            return self._add_fused(x_BND, h_BNK, weights)
        # An adapter acts on the output of its branch alone, so the second products are not joined.
        kept = self._draw_kept(x_BND, computes_all=True)
        for each, h_BNI, some in zip(self.feedforwards, h_BNK.chunk(self.branches, dim=-1), kept, strict=True):
            x_BND = some.add(x_BND, each.output(h_BNI, 0.0))
        return x_BND

    def _add_fused(self, x_BND: Tensor, h_BNK: Tensor, weights: "FusedWeights") -> Tensor:
        bias_PD = weights.bias_out
        if not (self.training and self.drop_path):
            return x_BND + F.linear(h_BNK, weights.weight_out, None if bias_PD is None else bias_PD.sum(0))
        # Dropping a branch removes its inner channels and its bias.
        factors = draw_factors(x_BND, self.branches, self.drop_path, self.drop_path_draw)
        h_BNK = (h_BNK.unflatten(-1, (self.branches, -1)) * factors[:, None, :, None]).flatten(-2)
        x_BND = x_BND + F.linear(h_BNK, weights.weight_out)
        return x_BND if bias_PD is None else x_BND + (factors @ bias_PD.to(factors))[:, None, :]

    def _fused_weights(self, branches: Branches, x_BND: Tensor) -> "FusedWeights":
        """The fused weights: computed anew under autograd, otherwise cached until a parameter changes."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return fuse_weights(branches)
        kind = x_BND.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BND.dtype
        version = dtype, [(p.data_ptr(), p._version) for branch in branches for p in branch.parameters()]
        cached = self._fused.get(type(branches[0]))
        if cached is None or cached[0] != version:
            tensors = (None if tensor is None else tensor.to(dtype) for tensor in fuse_weights(branches))
            cached = version, FusedWeights(*tensors)  # pyright: ignore[reportArgumentType]
            self._fused[type(branches[0])] = cached
        return cached[1]

    def train(self, mode: bool = True) -> Self:
        """Switch the mode, and clear the cached weights: a write through `.data` leaves no trace in a version."""
        self._fused.clear()
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        # Neither the cache nor compiled code, which is of these weights, is copied or pickled.
        state = {name: value for name, value in super().__getstate__().items() if name != "level"}
        return {**state, "_fused": {}}


class FusedWeights(NamedTuple):
    """The weights of all branches as one input and one output product, with norms and LayerScale folded in."""

    weight_in: Tensor
    bias_in: Tensor | None
    weight_out: Tensor
    bias_out: Tensor | None  # PD: one row per branch, for drop path


def fuse_weights(branches: Branches) -> FusedWeights:
    """Return the folded and concatenated weights of parallel branches; the result is exact.

    With u the input normalized without weight and bias, W (g u + c) + b = (W diag g) u + (W c + b), so that branches
    share u and stack row-wise; and sum_p s_p (O_p h_p + o_p) = [diag(s_1) O_1 ...] [h_1; ...] + sum_p s_p o_p.
    """
    weights_in, biases_in, weights_out, biases_out = [], [], [], []
    for branch in branches:
        # Rows of the fused matrix: q of all branches, then k, then v; likewise all gates, then all values.
        if isinstance(branch, Attention):
            first, last, groups = branch.qkv, branch.out, 3
        else:
            first, last, groups = branch.up, branch.down, 2 if branch.activation == "swiglu" else 1
        weight_in, weight_out = weight_of(first), weight_of(last)
        weights_in.append((weight_in * branch.norm.weight).unflatten(0, (groups, -1)))
        weights_out.append(weight_out if branch.scale is None else branch.scale[:, None] * weight_out)
        if first.bias is not None:
            shift = bias_of(branch.norm)
            bias = first.bias if shift is None else weight_in @ shift + first.bias
            biases_in.append(bias.unflatten(0, (groups, -1)))
            biases_out.append(last.bias if branch.scale is None else branch.scale * last.bias)
    return FusedWeights(
        torch.cat(weights_in, dim=1).flatten(0, 1),
        torch.cat(biases_in, dim=1).flatten(0, 1) if biases_in else None,
        torch.cat(weights_out, dim=1),
        torch.stack(biases_out) if biases_out else None,
    )


@functools.cache
def most_fused(device: str) -> int:
    """Return the largest branches * rows * width at which fusing wins on a kind of device; 0 without an entry.

    Below it, kernel launches dominate; above it, the activations leave a CPU core's cache. auto_thresholds.json has the
    numbers with their hardware, in the format that `vitray bench branches` writes. An entry for this GPU takes
    precedence over the first entry of its device type.
    """
    measured = json.loads((Path(__file__).parent / "auto_thresholds.json").read_text())
    hardware = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else None
    own_first = sorted(measured, key=lambda each: each["hardware"] != hardware)
    return next((each["fused_elements"] for each in own_first if each["device"] == device), 0)


def is_fusing_faster(elements: int, device: str) -> bool:
    """Return whether execution `auto` fuses branches * rows * width elements.

    Fusing loses under autograd, where the weights are fused anew in every step (LOG). A compiled model launches few
    kernels anyway.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return elements <= most_fused(device)
