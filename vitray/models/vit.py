"""The Vision Transformer: stem, positions, blocks, pool, head. B images, N patches, D width."""

import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from vitray.config import Model
from vitray.models.blocks import Block, Execution, Trace
from vitray.models.positions import Positions
from vitray.models.stems import Stem


class ViT(nn.Module):
    """The network that a `Model` describes."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        shape = model.shape
        self.model = model
        self.stem = Stem(shape)
        self.positions = Positions(model.positions, model.grid, shape.size)
        self.class_token = nn.Parameter(torch.zeros(shape.size)) if model.class_token else None
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = nn.ModuleList(
            Block(
                shape.size,
                shape.heads,
                shape.branches,
                layerscale=model.layerscale,
                drop_path=rate,
                dropout=model.dropout,
                activation=model.activation,
                norm_eps=model.norm_eps,
                execution=model.execution,
            )
            for rate in drop_path_rates(model)
        )
        self.norm = nn.LayerNorm(shape.size, eps=model.norm_eps)
        self.head = build_head(model)
        self._initialise()

    def forward(self, images_BCHW: Tensor, trace: Trace | None = None) -> Tensor:
        """Logits, or pooled features where there is no head; a `trace` receives each branch's attention weights."""
        return self.head(self.pooled(self.tokens(images_BCHW, trace)))

    def tokens(self, images_BCHW: Tensor, trace: Trace | None = None) -> Tensor:
        """What the last block returns, the class token first where there is one."""
        x_BND, grid = self.stem(images_BCHW)
        return self.encode(self.positions(x_BND, grid), trace)

    def encode(self, x_BND: Tensor, trace: Trace | None = None) -> Tensor:
        """What the last block returns of patches with their positions: of all of an image, or of some."""
        if self.class_token is not None:
            x_BND = torch.cat([self.class_token.to(x_BND.dtype).expand(len(x_BND), 1, -1), x_BND], dim=1)
        x_BND = self.dropout(x_BND)
        for level, block in enumerate(self.blocks):
            x_BND = block(x_BND, trace, f"block{level:02d}")
        return x_BND

    def pooled(self, x_BND: Tensor) -> Tensor:
        """One normalised vector an image, BD."""
        if self.model.pool == "token":
            return self.norm(x_BND[:, 0])
        patches_BND = x_BND if self.class_token is None else x_BND[:, 1:]
        if self.model.pool == "mean":
            return self.norm(patches_BND).mean(dim=1)
        return self.norm(patches_BND.mean(dim=1))

    @property
    def execution(self) -> Execution:
        """How parallel branches run; settable on a loaded model."""
        return self.blocks[0].execution  # type: ignore[return-value]

    @execution.setter
    def execution(self, execution: Execution) -> None:
        for block in self.blocks:
            block.execution = execution  # type: ignore[assignment]

    def _initialise(self) -> None:
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                initialise_linear(module)
        if self.class_token is not None:
            nn.init.trunc_normal_(self.class_token, std=0.02)


def build_head(model: Model) -> nn.Module:
    """From the pooled vector to the logits; the identity for a model without classes."""
    if model.num_classes is None:
        return nn.Identity()
    width = model.shape.size
    match model.head.kind:
        case "linear":
            head = nn.Linear(width, model.num_classes)
            initialise_linear(head)
            if model.head.init == "zeros":
                nn.init.zeros_(head.weight)
            return head
        case "mlp":
            hidden = model.head.hidden or width
            head = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, model.num_classes))
            head.apply(initialise_linear)
            return head


def drop_path_rates(model: Model) -> list[float]:
    """Each level's drop-path rate."""
    depth = model.shape.depth
    if model.drop_path_over_depth == "constant":
        return [model.drop_path] * depth
    return [model.drop_path * level / max(depth - 1, 1) for level in range(depth)]


def regroup(vit: ViT, branches: int) -> ViT:
    """The same blocks with another number of them side by side: 36x1 -> 18x2 -> 36x1, every weight kept.

    The function changes as far as seed 000's r'(x + r(x)) = r'(x) does not hold; the parameters do not.
    """
    old = vit.model.shape
    pairs = old.depth * old.branches
    if branches < 1 or pairs % branches:
        raise ValueError(f"{old} has {pairs} pairs of layers, which do not divide into {branches} branches")
    name = replace(old, depth=pairs // branches, branches=branches)
    new = ViT(Model.model_validate({**vit.model.model_dump(), "name": str(name)}))
    weights = {}
    for key, tensor in vit.state_dict().items():
        if block := re.fullmatch(r"blocks\.(\d+)\.(attn|ffn)(\d+)\.(.+)", key):
            pair = int(block[1]) * old.branches + int(block[3]) - 1
            key = f"blocks.{pair // branches}.{block[2]}{pair % branches + 1}.{block[4]}"
        weights[key] = tensor
    new.load_state_dict(weights)
    return new.to(vit.norm.weight).train(vit.training)


def initialise_linear(module: nn.Module) -> None:
    """Small random weights and no bias, if it is a linear layer."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
