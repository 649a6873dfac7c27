"""The Vision Transformer: stem, positions, blocks, pool, head. B images, N patches, D width, C colors."""

import math
import re
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from vitray.config import Model, Relative, Rope
from vitray.models.adapters import Adapter
from vitray.models.blocks import Block
from vitray.models.branches import AXES, BlockSpec, Execution, Trace, build_norm
from vitray.models.positions import AttentionPositions, AxialRope, Grid, Positions, VisiblePatches, offset_index
from vitray.models.precision import is_autocast
from vitray.models.products import Products
from vitray.models.sizes import inner_width
from vitray.models.stems import Stem


class ViT(nn.Module):
    """A Vision Transformer, built from its `Model` settings."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        shape = model.shape
        self.model, self.grid = model, model.grid
        self.stem = Stem(shape, model.resnet_eps, model.stem_norm_eps, model.batch_momentum)
        self.positions = Positions(model.positions, model.grid, shape.size)
        self.positions_added_at = getattr(model.positions, "where", "stem")
        num_level_tables = shape.depth - 1 if self.positions_added_at == "levels" else 0
        self.level_positions = nn.ModuleList(
            Positions(model.positions, model.grid, shape.size) for _ in range(num_level_tables)
        )
        self.rope = None
        if isinstance(model.positions, Rope):
            self.rope = AxialRope(model.grid, model.head_size, model.positions.base)
        self.class_token = nn.Parameter(torch.zeros(shape.size)) if model.class_token else None
        self.distillation_token = nn.Parameter(torch.zeros(shape.size)) if model.distillation_token else None
        self.registers = nn.Parameter(torch.zeros(model.registers, shape.size)) if model.registers else None
        self.dropout = nn.Dropout(model.dropout)
        spec = BlockSpec(
            shape.size,
            model.num_heads,
            shape.branches,
            layerscale=model.layerscale,
            drop_path_draw=model.drop_path_draw,
            dropout=model.dropout,
            inner=inner_width(model),
            activation=model.activation,
            norm_eps=model.norm_eps,
            execution=model.execution,
            norm=model.norm,
            bias=model.bias,
            qk_norm=model.qk_norm,
            adapters=model.adapters,
            relative_patches=math.prod(model.grid) if isinstance(model.positions, Relative) else None,
        )
        axes = AXES if model.attention == "axial" else (None,)
        self.blocks = nn.ModuleList(
            Block(spec._replace(drop_path=rate, axis=axes[level % len(axes)]))
            for level, rate in enumerate(drop_path_rates(model))
        )
        self.norm = build_norm(model.norm, shape.size, model.norm_eps, model.bias)
        self.head = build_head(model)
        self.blocks.apply(initialize_linear)
        for module in self.blocks.modules():
            if isinstance(module, Adapter):
                module.start_from_zero()
        for token in (self.class_token, self.distillation_token, self.registers):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)

    def forward(self, images_BCHW: Tensor, trace: Trace | None = None) -> Tensor:
        """Return logits, or pooled features without a head; a `trace` receives each branch's attention weights."""
        return self.head(self.pooled(self.tokens(images_BCHW, trace)))

    def features_and_logits(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pooled features, BD, and the logits, BK; a network without a head returns the features twice."""
        features_BD = self.pooled(self.tokens(images_BCHW))
        return features_BD, self.head(features_BD)

    @property
    def width(self) -> int:
        """The width of the pooled features, which the head reads."""
        return self.model.num_classifiers * self.model.shape.size

    def tokens(self, images_BCHW: Tensor, trace: Trace | None = None) -> Tensor:
        """Return the last block's output: class token, distillation token and registers, if any, then the patches."""
        x_BND, grid = self.stem(images_BCHW)
        return self.encode(self.positions(x_BND, grid), VisiblePatches(grid), trace)

    def encode(self, x_BND: Tensor, places: VisiblePatches, trace: Trace | None = None) -> Tensor:
        """Return the last block's output for patches with positions added: all of an image, or a subset."""
        x_BND, positions = self.first_input(x_BND), self.attention_positions(places)
        for level, block in enumerate(self.blocks):
            key = "" if trace is None else f"block{level:02d}"  # compiled code is of one key
            x_BND = block(self.level_input(level, x_BND, places), trace, key, positions)
        return x_BND

    def first_input(self, x_BND: Tensor) -> Tensor:
        """Return the input of the first block: the learned tokens, if any, before the patches."""
        if self.model.residual == "bf16" and is_autocast(x_BND.device):
            x_BND = x_BND.to(torch.bfloat16)
        else:  # under autocast, too, and also where no table of positions is added
            x_BND = x_BND.to(torch.promote_types(x_BND.dtype, getattr(self.norm, "weight", x_BND).dtype))
        batch, dtype = x_BND.shape[0], x_BND.dtype  # shape[0], so that an exported batch stays of any size
        prefix: list[Tensor] = []
        if self.class_token is not None:
            prefix.append(self.class_token.to(dtype).expand(batch, 1, -1))
        if self.distillation_token is not None:
            prefix.append(self.distillation_token.to(dtype).expand(batch, 1, -1))
        if self.registers is not None:
            prefix.append(self.registers.to(dtype).expand(batch, -1, -1))
        if prefix:
            x_BND = torch.cat([*prefix, x_BND], dim=1)
        return self.dropout(x_BND)

    def level_input(self, level: int, x_BND: Tensor, places: VisiblePatches) -> Tensor:
        """Return the input of a level, from the output of the level before: positions may be added again."""
        if level == 0 or self.positions_added_at == "stem":
            return x_BND
        positions = self.positions if self.positions_added_at == "shared" else self.level_positions[level - 1]
        return positions(x_BND, places.grid, places.chosen, self.num_prefix).to(x_BND.dtype)

    def attention_positions(self, places: VisiblePatches) -> AttentionPositions:
        """Return the positions that act inside attention."""
        grid = None
        if self.model.attention == "axial":
            if places.chosen is not None:
                raise ValueError("axial attention needs whole rows and columns, not some of the patches")
            grid = places.grid
        match self.model.positions:
            case Rope():
                assert self.rope is not None
                return AttentionPositions(rotation=self.rope(places, self.num_prefix), grid=grid)
            case Relative():
                if places.grid != self.grid:  # `model.grid` parses the name, which torch.compile cannot trace
                    raise ValueError(f"relative positions of {self.grid} patches do not fit {places.grid}")
                return AttentionPositions(offset=offset_index(places, self.norm.weight.device))
            case _:
                return AttentionPositions(grid=grid)

    @property
    def num_prefix(self) -> int:
        """The number of tokens before the patches."""
        return self.model.num_prefix

    @torch.no_grad()
    def positions_at(self, grid: Grid) -> dict[str, Tensor]:
        """Return the learned tables of positions resized to a grid, by the names of their tensors."""
        return {
            f"{name}.{table}": tensor
            for name, module in self.named_modules()
            if isinstance(module, Positions)
            for table, tensor in module.resized(grid).items()
        }

    def pooled(self, x_BND: Tensor) -> Tensor:
        """Return one normalized vector per image, BD; of class and distillation token both, one after the other."""
        if self.distillation_token is not None:
            return self.norm(x_BND[:, :2]).flatten(1)
        if self.model.pool == "token":
            return self.norm(x_BND[:, 0])
        patches_BND = x_BND[:, self.num_prefix :]
        if self.model.pool == "mean":
            return self.norm(patches_BND).mean(dim=1)
        return self.norm(patches_BND.mean(dim=1))

    def count(self, products: Products) -> None:
        """Count the products for an image, from its pixels to the logits."""
        self.count_tokens(products)
        products.train(self.norm)
        heads = self.head.children() if isinstance(self.head, TwoHeads) else [self.head]
        products.branches(*(partial(_count_head, head, products) for head in heads))

    def count_tokens(self, products: Products, dropped: int = 0, size: tuple[int, int] | None = None) -> None:
        """Count the products of `tokens`; `dropped` is the number of patches that the blocks do not get.

        `size` is that of another image than the model's.
        """
        height, width = size or self.model.image_shape
        self.stem.count(products, height * width)
        products.train(self.positions, self.class_token, self.distillation_token, self.registers)
        patch = self.model.shape.patch
        rows, columns = height // patch, width // patch
        tokens = rows * columns - dropped + self.num_prefix
        attended = {None: tokens, "rows": columns, "columns": rows}
        for level, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            products.train(*self.level_positions[level - 1 : level])
            block.count(products, tokens, attended[block.attentions[0].axis])

    @property
    def execution(self) -> Execution:
        """The execution of parallel branches; settable on a loaded model."""
        return self.blocks[0].execution  # type: ignore[return-value]

    @execution.setter
    def execution(self, execution: Execution) -> None:
        for block in self.blocks:
            block.execution = execution  # type: ignore[assignment]


class TwoHeads(nn.Module):
    """The heads of class and distillation token, whose mean is the logits."""

    def __init__(self, class_token: nn.Module, distillation_token: nn.Module) -> None:
        super().__init__()
        self.class_token, self.distillation_token = class_token, distillation_token

    def forward(self, pooled_BD: Tensor) -> Tensor:
        first_BK, second_BK = self.both(pooled_BD)
        return (first_BK + second_BK) / 2

    def both(self, pooled_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of each head, BK."""
        first_BD, second_BD = pooled_BD.chunk(2, dim=1)
        return self.class_token(first_BD), self.distillation_token(second_BD)


def build_head(model: Model) -> nn.Module:
    """Return the head, from the pooled vector to the logits; the identity for a model without classes."""
    if model.num_classes is None:
        return nn.Identity()
    if model.distillation_token:
        return TwoHeads(_build_head(model, model.num_classes), _build_head(model, model.num_classes))
    return _build_head(model, model.num_classes)


def _build_head(model: Model, classes: int) -> nn.Module:
    width = model.shape.size
    match model.head.kind:
        case "linear":
            head = nn.Linear(width, classes)
            initialize_linear(head)
            if model.head.init == "zeros":
                nn.init.zeros_(head.weight)
            return head
        case "mlp":
            hidden = model.head.hidden or width
            head = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, classes))
            head.apply(initialize_linear)
            return head


def _count_head(head: nn.Module, products: Products) -> None:
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            products.layer(layer, 1)


def drop_path_rates(model: Model) -> list[float]:
    """Return the drop-path rate of each level."""
    depth = model.shape.depth
    if model.drop_path_schedule == "constant":
        return [model.drop_path] * depth
    return [model.drop_path * level / max(depth - 1, 1) for level in range(depth)]


def regroup(vit: ViT, branches: int) -> ViT:
    """Return the network with its blocks regrouped into another number of branches: 36x1 -> 18x2 -> 36x1.

    Every weight is kept. The function stays the same as far as r'(x + r(x)) = r'(x) holds ("Three things").
    """
    old = vit.model.shape
    pairs = old.depth * old.branches
    if branches < 1 or pairs % branches:
        raise ValueError(f"{old} has {pairs} pairs of layers, which do not divide into {branches} branches")
    if vit.positions_added_at == "levels" and branches != old.branches:
        raise ValueError(f"{old} cannot be regrouped: each level has its own positions, and their number would change")
    if vit.model.attention == "axial" and branches != old.branches:
        raise ValueError(f"{old} cannot be regrouped: its levels attend along rows and along columns in turn")
    name = replace(old, depth=pairs // branches, branches=branches)
    # Moved first: float64 weights loaded into float32 parameters would be rounded.
    new = ViT(Model.model_validate({**vit.model.model_dump(), "name": str(name)})).to(vit.norm.weight)
    weights = {}
    for key, tensor in vit.state_dict().items():
        if block := re.fullmatch(r"blocks\.(\d+)\.(attn|ffn)(\d+)\.(.+)", key):
            pair = int(block[1]) * old.branches + int(block[3]) - 1
            key = f"blocks.{pair // branches}.{block[2]}{pair % branches + 1}.{block[4]}"
        weights[key] = tensor
    new.load_state_dict(weights)
    return new.train(vit.training)


def initialize_linear(module: nn.Module) -> None:
    """Give a linear layer small random weights and a zero bias; leave other modules alone."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
