"""The transformer block with any number of parallel branches, run one by one or fused into joint matrix products.

One level is seed 000's eq. (2):  y = x + sum_p attn_p(x),  z = y + sum_p ffn_p(y).
Shapes: B images, N tokens, D width, H heads, P parallel branches, K channels inside a branch.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Execution = Literal["loop", "fused", "auto"]
Trace = dict[str, Tensor]


class Attention(nn.Module):
    """The parameters of one attention branch, and what the branch adds to its input."""

    def __init__(self, width: int, heads: int, layerscale: float | None, norm_eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.scale = None if layerscale is None else nn.Parameter(torch.full((width,), layerscale))

    @property
    def products(self) -> tuple[nn.Linear, nn.Linear]:
        """The product that reads the normalised input, and the one that writes the output."""
        return self.qkv, self.out

    def forward(self, x_BND: Tensor, dropout: float, trace: Trace | None = None, key: str = "") -> Tensor:
        h_BND = attend(self.qkv(self.norm(x_BND)), self.heads, trace, key)
        h_BND = F.dropout(self.out(h_BND), dropout, self.training)
        return h_BND if self.scale is None else h_BND * self.scale


class FeedForward(nn.Module):
    """The parameters of one feed-forward branch, and what the branch adds to its input."""

    def __init__(self, width: int, layerscale: float | None, norm_eps: float, activation: str) -> None:
        super().__init__()
        self.approximate = "tanh" if activation == "gelu_tanh" else "none"
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.scale = None if layerscale is None else nn.Parameter(torch.full((width,), layerscale))

    @property
    def products(self) -> tuple[nn.Linear, nn.Linear]:
        """The product that reads the normalised input, and the one that writes the output."""
        return self.up, self.down

    def forward(self, x_BND: Tensor, dropout: float) -> Tensor:
        h_BNK = F.gelu(self.up(self.norm(x_BND)), approximate=self.approximate)
        h_BND = F.dropout(self.down(F.dropout(h_BNK, dropout, self.training)), dropout, self.training)
        return h_BND if self.scale is None else h_BND * self.scale


Branches = tuple[Attention, ...] | tuple[FeedForward, ...]


def attend(qkv_BNK: Tensor, heads: int, trace: Trace | None = None, key: str = "") -> Tensor:
    """Self-attention of joint query, key and value vectors; its weights are kept (BHNN) when there is a trace."""
    batch, tokens, channels = qkv_BNK.shape
    q, k, v = qkv_BNK.view(batch, tokens, 3, heads, channels // (3 * heads)).permute(2, 0, 3, 1, 4)
    if trace is None:
        h_BHNd = F.scaled_dot_product_attention(q, k, v)
    else:
        trace[key] = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)
        h_BHNd = trace[key] @ v
    return h_BHNd.transpose(1, 2).reshape(batch, tokens, channels // 3)


class Block(nn.Module):
    """One level of the network: `branches` attentions side by side, then as many feed-forwards.

    One branch is the ordinary block. Drop path is drawn per branch and per sample, after LayerScale.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        branches: int = 1,
        *,
        layerscale: float | None = None,
        drop_path: float = 0.0,
        dropout: float = 0.0,
        activation: str = "gelu",
        norm_eps: float = 1e-6,
        execution: Execution = "auto",
    ) -> None:
        super().__init__()
        self.width, self.heads, self.branches = width, heads, branches
        self.drop_path, self.dropout, self.norm_eps, self.execution = drop_path, dropout, norm_eps, execution
        self.attentions = tuple(Attention(width, heads, layerscale, norm_eps) for _ in range(branches))
        self.feedforwards = tuple(FeedForward(width, layerscale, norm_eps, activation) for _ in range(branches))
        # Named attn1, attn2, ... and ffn1, ffn2, ..., as in `trace["block07.attn1"]`.
        for index in range(branches):
            self.add_module(f"attn{index + 1}", self.attentions[index])
        for index in range(branches):
            self.add_module(f"ffn{index + 1}", self.feedforwards[index])
        self._joint: dict[type, tuple[Any, Joint]] = {}

    def forward(self, x_BND: Tensor, trace: Trace | None = None, key: str = "block") -> Tensor:
        # Looking at attention is not the hot path: a trace runs branch by branch.
        if trace is None and self._is_fused(x_BND):
            return self.feed(self._attend_fused(x_BND), fused=True)
        return self.feed(self._attend_loop(x_BND, trace, key), fused=False)

    def feed(self, x_BND: Tensor, fused: bool) -> Tensor:
        """The level's second half: the feed-forwards' outputs added."""
        return self._feed_fused(x_BND) if fused else self._feed_loop(x_BND)

    def _is_fused(self, x_BND: Tensor) -> bool:
        dropping = self.training and self.dropout > 0
        if self.execution == "fused" and dropping and self.branches > 1:
            raise ValueError("execution fused is not exact while dropout is active; set execution to loop or auto")
        if self.branches == 1 or dropping or self.execution == "loop":
            return False
        return self.execution == "fused" or fusing_pays(self.branches * x_BND.numel(), x_BND.device.type)

    # ---- one by one --------------------------------------------------------------------------------------------------

    def _attend_loop(self, x_BND: Tensor, trace: Trace | None, key: str) -> Tensor:
        named = enumerate(self.attentions, start=1)
        return self._sum(x_BND, (branch(x_BND, self.dropout, trace, f"{key}.attn{index}") for index, branch in named))

    def _feed_loop(self, x_BND: Tensor) -> Tensor:
        return self._sum(x_BND, (branch(x_BND, self.dropout) for branch in self.feedforwards))

    def _sum(self, x_BND: Tensor, outputs: Iterator[Tensor]) -> Tensor:
        keep = self._keep(x_BND)
        for index, h_BND in enumerate(outputs):
            x_BND = x_BND + (h_BND if keep is None else h_BND * keep[:, index, None, None])
        return x_BND

    def _keep(self, x_BND: Tensor) -> Tensor | None:
        """Drop path's factor per sample and branch (BP): 0 for a branch left out, else 1 / (1 - rate)."""
        if not (self.training and self.drop_path):
            return None
        chance = torch.full((x_BND.shape[0], self.branches), 1 - self.drop_path, device=x_BND.device)
        return (torch.bernoulli(chance) / (1 - self.drop_path)).to(x_BND.dtype)

    # ---- fused -------------------------------------------------------------------------------------------------------

    def _attend_fused(self, x_BND: Tensor) -> Tensor:
        joint = self._joined(self.attentions, x_BND)
        qkv_BNK = F.linear(self._normalised(x_BND), joint.weight_in, joint.bias_in)
        return self._leave(x_BND, attend(qkv_BNK, self.heads * self.branches), joint)

    def _feed_fused(self, x_BND: Tensor) -> Tensor:
        joint = self._joined(self.feedforwards, x_BND)
        h_BNK = F.linear(self._normalised(x_BND), joint.weight_in, joint.bias_in)
        return self._leave(x_BND, F.gelu(h_BNK, approximate=self.feedforwards[0].approximate), joint)

    def _normalised(self, x_BND: Tensor) -> Tensor:
        """LayerNorm without weight and bias, which the product that follows holds: the same for every branch."""
        return F.layer_norm(x_BND, (self.width,), eps=self.norm_eps)

    def _leave(self, x_BND: Tensor, h_BNK: Tensor, joint: "Joint") -> Tensor:
        """Add all branches' outputs at once."""
        keep = self._keep(x_BND)
        if keep is None:
            return x_BND + F.linear(h_BNK, joint.weight_out, joint.bias_out.sum(0))
        # A branch left out takes its inner channels and its bias with it.
        h_BNK = (h_BNK.unflatten(-1, (self.branches, -1)) * keep[:, None, :, None]).flatten(-2)
        return x_BND + F.linear(h_BNK, joint.weight_out) + (keep @ joint.bias_out.to(keep))[:, None, :]

    def _joined(self, branches: Branches, x_BND: Tensor) -> "Joint":
        """The joint weights: made anew where gradients must flow through them, else kept until a parameter changes."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return join(branches)
        kind = x_BND.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BND.dtype
        # `_parameters` is read directly: this runs twice a block in the regime where each microsecond counts.
        tables = [module._parameters for branch in branches for module in branch.modules()]
        state = dtype, [(p.data_ptr(), p._version) for table in tables for p in table.values() if p is not None]
        known = self._joint.get(type(branches[0]))
        if known is None or known[0] != state:
            joint = Joint(*(tensor.to(dtype) for tensor in join(branches)))
            self._joint[type(branches[0])] = known = state, joint
        return known[1]

    def train(self, mode: bool = True) -> Self:
        """As torch's; joint weights are forgotten, because a write through `.data` is a change they cannot see."""
        self._joint.clear()
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        # What can be computed again is neither copied nor pickled.
        return {**super().__getstate__(), "_joint": {}}


class Joint(NamedTuple):
    """The weights of all branches as one product in and one product out, norms and LayerScale folded in."""

    weight_in: Tensor
    bias_in: Tensor
    weight_out: Tensor
    bias_out: Tensor  # PD: a branch left out takes its own row with it


def join(branches: Branches) -> Joint:
    """Fold and concatenate, exactly.

    With u the input normalised without weight and bias, W (g u + c) + b = (W diag g) u + (W c + b), so that branches
    share u and stack row-wise; and sum_p s_p (O_p h_p + o_p) = [diag(s_1) O_1 ...] [h_1; ...] + sum_p s_p o_p.
    """
    weights_in, biases_in, weights_out, biases_out = [], [], [], []
    for branch in branches:
        first, last = branch.products
        # Query, key and value must each hold every branch side by side.
        groups = 3 if isinstance(branch, Attention) else 1
        weights_in.append((first.weight * branch.norm.weight).unflatten(0, (groups, -1)))
        biases_in.append((first.weight @ branch.norm.bias + first.bias).unflatten(0, (groups, -1)))
        weights_out.append(last.weight if branch.scale is None else branch.scale[:, None] * last.weight)
        biases_out.append(last.bias if branch.scale is None else branch.scale * last.bias)
    return Joint(
        torch.cat(weights_in, dim=1).flatten(0, 1),
        torch.cat(biases_in, dim=1).flatten(0, 1),
        torch.cat(weights_out, dim=1),
        torch.stack(biases_out),
    )


# Largest branches * rows * width at which joint products win: there, starting an operation costs more than its work.
# cpu: measured here (LOG, 2026-11-21): above it the joint activations fall out of a core's cache and lose up to 20 %.
# cuda: seed 000, Table 4 (V100, 2 branches) gains up to 1.2 M for S and B and loses from 2.4 M; not measured by us.
FUSING_PAYS_UP_TO = {"cpu": 50_000, "cuda": 1_250_000}


def fusing_pays(elements: int, device: str) -> bool:
    """The rule of `auto`, for branches * rows * width elements.

    Not where gradients are asked for: joint weights would be made anew for every step, which costs more than they save
    (LOG). Not where the model is compiled: it starts few operations as it is.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return elements <= FUSING_PAYS_UP_TO.get(device, 0)
