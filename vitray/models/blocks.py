"""The transformer block with any number of parallel branches, run one by one or fused into larger matrix products.

One level is eq. (2) of "Three things":  y = x + sum_p attn_p(x),  z = y + sum_p ffn_p(y).
Shapes: B images, N tokens, D width, H heads, P parallel branches, K channels inside a branch.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Execution = Literal["loop", "fused", "auto"]
Trace = dict[str, Tensor]


class BlockSpec(NamedTuple):
    """The settings of a block."""

    width: int
    heads: int
    branches: int = 1
    layerscale: float | None = None
    drop_path: float = 0.0
    dropout: float = 0.0
    activation: str = "gelu"
    norm_eps: float = 1e-6
    execution: Execution = "auto"


class Attention(nn.Module):
    """One attention branch, without the residual connection."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.norm = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.qkv = nn.Linear(spec.width, 3 * spec.width)
        self.out = nn.Linear(spec.width, spec.width)
        self.scale = _layerscale(spec)

    def forward(self, x_BND: Tensor, dropout: float, trace: Trace | None = None, key: str = "") -> Tensor:
        h_BND = attend(self.qkv(self.norm(x_BND)), self.heads, trace, key)
        h_BND = F.dropout(self.out(h_BND), dropout, self.training)
        return h_BND if self.scale is None else h_BND * self.scale

    def weights(self, x_BND: Tensor) -> Tensor:
        """Return the attention weights (BHNN) for an input of the level; its output is not computed."""
        q_BHNd, k_BHNd, _ = split_heads(self.qkv(self.norm(x_BND)), self.heads)
        return attention_weights(q_BHNd, k_BHNd)


class FeedForward(nn.Module):
    """One feed-forward branch, without the residual connection."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.approximate = "tanh" if spec.activation == "gelu_tanh" else "none"
        self.norm = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.up = nn.Linear(spec.width, 4 * spec.width)
        self.down = nn.Linear(4 * spec.width, spec.width)
        self.scale = _layerscale(spec)

    def forward(self, x_BND: Tensor, dropout: float) -> Tensor:
        h_BNK = F.gelu(self.up(self.norm(x_BND)), approximate=self.approximate)
        h_BND = F.dropout(self.down(F.dropout(h_BNK, dropout, self.training)), dropout, self.training)
        return h_BND if self.scale is None else h_BND * self.scale


Branches = tuple[Attention, ...] | tuple[FeedForward, ...]


def _layerscale(spec: BlockSpec) -> nn.Parameter | None:
    return None if spec.layerscale is None else nn.Parameter(torch.full((spec.width,), spec.layerscale))


def attend(qkv_BNK: Tensor, heads: int, trace: Trace | None = None, key: str = "") -> Tensor:
    """Return self-attention of concatenated queries, keys and values; a trace receives the weights (BHNN)."""
    q, k, v = split_heads(qkv_BNK, heads)
    if trace is None:
        h_BHNd = F.scaled_dot_product_attention(q, k, v)
    else:
        trace[key] = attention_weights(q, k)
        h_BHNd = trace[key] @ v
    return h_BHNd.transpose(1, 2).flatten(2)


def split_heads(qkv_BNK: Tensor, heads: int) -> Tensor:
    """Return queries, keys and values as one tensor, 3BHNd."""
    return qkv_BNK.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)


def attention_weights(q_BHNd: Tensor, k_BHNd: Tensor) -> Tensor:
    """Return the explicit attention weights, BHNN: each query's row sums to one."""
    return (q_BHNd @ k_BHNd.transpose(-2, -1) * q_BHNd.shape[-1] ** -0.5).softmax(dim=-1)


class Block(nn.Module):
    """One level of the network: parallel attention branches, then parallel feed-forward branches.

    One branch is the ordinary block. Drop path is drawn per branch and per sample, after LayerScale.
    """

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.width, self.heads, self.branches = spec.width, spec.heads, spec.branches
        self.drop_path, self.dropout = spec.drop_path, spec.dropout
        self.norm_eps, self.execution = spec.norm_eps, spec.execution
        self.attentions = tuple(Attention(spec) for _ in range(spec.branches))
        self.feedforwards = tuple(FeedForward(spec) for _ in range(spec.branches))
        # Named attn1, attn2, ... and ffn1, ffn2, ..., as in `trace["block07.attn1"]`.
        for name, branches in (("attn", self.attentions), ("ffn", self.feedforwards)):
            for index, branch in enumerate(branches, start=1):
                self.add_module(f"{name}{index}", branch)
        self._fused: dict[type, tuple[Any, FusedWeights]] = {}

    def forward(self, x_BND: Tensor, trace: Trace | None = None, key: str = "block") -> Tensor:
        # A trace needs the attention weights of each branch, so it excludes fusing.
        if trace is None and self._is_fused(x_BND):
            return self.feed(self._attend_fused(x_BND), True)
        return self.feed(self._attend_loop(x_BND, trace, key), False)

    def feed(self, x_BND: Tensor, fused: bool) -> Tensor:
        """Return the second half of the level: the input plus all feed-forward outputs."""
        return self._feed_fused(x_BND) if fused else self._feed_loop(x_BND)

    def _is_fused(self, x_BND: Tensor) -> bool:
        has_dropout = self.training and self.dropout > 0
        if self.execution == "fused" and has_dropout and self.branches > 1:
            raise ValueError("execution fused is not exact while dropout is active; set execution to loop or auto")
        if self.branches == 1 or has_dropout or self.execution == "loop":
            return False
        return self.execution == "fused" or is_fusing_faster(self.branches * x_BND.numel(), x_BND.device.type)

    def _drop_path_factors(self, x_BND: Tensor) -> Tensor | None:
        """The factor of each sample and branch (BP): 0 for a dropped branch, else 1 / (1 - rate)."""
        if not (self.training and self.drop_path):
            return None
        chance = torch.full((x_BND.shape[0], self.branches), 1 - self.drop_path, device=x_BND.device)
        return (torch.bernoulli(chance) / (1 - self.drop_path)).to(x_BND.dtype)

    # ---- one by one --------------------------------------------------------------------------------------------------

    def _attend_loop(self, x_BND: Tensor, trace: Trace | None, key: str) -> Tensor:
        numbered = enumerate(self.attentions, start=1)
        outputs = (branch(x_BND, self.dropout, trace, f"{key}.attn{index}") for index, branch in numbered)
        return self._add_loop(x_BND, outputs)

    def _feed_loop(self, x_BND: Tensor) -> Tensor:
        return self._add_loop(x_BND, (branch(x_BND, self.dropout) for branch in self.feedforwards))

    def _add_loop(self, x_BND: Tensor, outputs: Iterator[Tensor]) -> Tensor:
        factors = self._drop_path_factors(x_BND)
        for index, h_BND in enumerate(outputs):
            x_BND = x_BND + (h_BND if factors is None else h_BND * factors[:, index, None, None])
        return x_BND

    # ---- fused -------------------------------------------------------------------------------------------------------

    def _attend_fused(self, x_BND: Tensor) -> Tensor:
        weights = self._fused_weights(self.attentions, x_BND)
        qkv_BNK = F.linear(self._normalised(x_BND), weights.weight_in, weights.bias_in)
        return self._add_fused(x_BND, attend(qkv_BNK, self.heads * self.branches), weights)

    def _feed_fused(self, x_BND: Tensor) -> Tensor:
        weights = self._fused_weights(self.feedforwards, x_BND)
        h_BNK = F.linear(self._normalised(x_BND), weights.weight_in, weights.bias_in)
        return self._add_fused(x_BND, F.gelu(h_BNK, approximate=self.feedforwards[0].approximate), weights)

    def _normalised(self, x_BND: Tensor) -> Tensor:
        """LayerNorm without weight and bias: those are folded into the fused weights."""
        return F.layer_norm(x_BND, (self.width,), eps=self.norm_eps)

    def _add_fused(self, x_BND: Tensor, h_BNK: Tensor, weights: "FusedWeights") -> Tensor:
        factors = self._drop_path_factors(x_BND)
        if factors is None:
            return x_BND + F.linear(h_BNK, weights.weight_out, weights.bias_out.sum(0))
        # Dropping a branch removes its inner channels and its bias.
        h_BNK = (h_BNK.unflatten(-1, (self.branches, -1)) * factors[:, None, :, None]).flatten(-2)
        return x_BND + F.linear(h_BNK, weights.weight_out) + (factors @ weights.bias_out.to(factors))[:, None, :]

    def _fused_weights(self, branches: Branches, x_BND: Tensor) -> "FusedWeights":
        """The fused weights: computed anew under autograd, otherwise cached until a parameter changes."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return fuse_weights(branches)
        kind = x_BND.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BND.dtype
        version = dtype, [(p.data_ptr(), p._version) for branch in branches for p in branch.parameters()]
        cached = self._fused.get(type(branches[0]))
        if cached is None or cached[0] != version:
            cached = version, FusedWeights(*(tensor.to(dtype) for tensor in fuse_weights(branches)))
            self._fused[type(branches[0])] = cached
        return cached[1]

    def train(self, mode: bool = True) -> Self:
        """Switch the mode, and clear the cached weights: a write through `.data` leaves no trace in a version."""
        self._fused.clear()
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        # The cache is neither copied nor pickled.
        return {**super().__getstate__(), "_fused": {}}


class FusedWeights(NamedTuple):
    """The weights of all branches as one input and one output product, with norms and LayerScale folded in."""

    weight_in: Tensor
    bias_in: Tensor
    weight_out: Tensor
    bias_out: Tensor  # PD: one row per branch, for drop path


def fuse_weights(branches: Branches) -> FusedWeights:
    """Return the folded and concatenated weights of parallel branches; the result is exact.

    With u the input normalised without weight and bias, W (g u + c) + b = (W diag g) u + (W c + b), so that branches
    share u and stack row-wise; and sum_p s_p (O_p h_p + o_p) = [diag(s_1) O_1 ...] [h_1; ...] + sum_p s_p o_p.
    """
    weights_in, biases_in, weights_out, biases_out = [], [], [], []
    for branch in branches:
        if isinstance(branch, Attention):
            first, last, groups = branch.qkv, branch.out, 3  # query, key and value each hold all branches in a row
        else:
            first, last, groups = branch.up, branch.down, 1
        weights_in.append((first.weight * branch.norm.weight).unflatten(0, (groups, -1)))
        biases_in.append((first.weight @ branch.norm.bias + first.bias).unflatten(0, (groups, -1)))
        weights_out.append(last.weight if branch.scale is None else branch.scale[:, None] * last.weight)
        biases_out.append(last.bias if branch.scale is None else branch.scale * last.bias)
    return FusedWeights(
        torch.cat(weights_in, dim=1).flatten(0, 1),
        torch.cat(biases_in, dim=1).flatten(0, 1),
        torch.cat(weights_out, dim=1),
        torch.stack(biases_out),
    )


# The largest branches * rows * width at which fusing wins; below it, kernel launches dominate.
# cpu: measured here (LOG, 2026-11-21); above it the activations leave a core's cache, up to 20 % slower.
# cuda: "Three things", Table 4 (V100, 2 branches): gains up to 1.2 M for S and B, losses from 2.4 M; not measured here.
MAX_FUSED_ELEMENTS = {"cpu": 50_000, "cuda": 1_250_000}


def is_fusing_faster(elements: int, device: str) -> bool:
    """Return the choice of execution `auto` for branches * rows * width elements.

    Fusing loses under autograd, where the weights are fused anew in every step (LOG). A compiled model launches few
    kernels anyway.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return elements <= MAX_FUSED_ELEMENTS.get(device, 0)
