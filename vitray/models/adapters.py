"""Small trained additions to a frozen network: LoRA beside its matrices, and adapters after its feed-forwards.

Either adds zero at first, so that a fine-tuning starts from the network as it is.
Shapes: B images, N tokens, D width, K outputs, R rank.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config.classification import Matrix
from vitray.errors import ConfigError
from vitray.models.products import Products

# Each matrix's linear layer, the chunk of the layer's outputs that it computes, and the number of chunks.
LAYERS: dict[Matrix, tuple[str, int, int]] = {
    "q": ("qkv", 0, 3),
    "k": ("qkv", 1, 3),
    "v": ("qkv", 2, 3),
    "out": ("out", 0, 1),
    "up": ("up", 0, 1),
    "down": ("down", 0, 1),
}
_LAYER = re.compile(r"blocks\.\d+\.(?:attn|ffn)\d+\.(qkv|out|up|down)")
_FACTOR = re.compile(r"(.+)\.lora\.(\w+)\.a\.weight")
_OF_LORA = re.compile(r"\.lora\.|\.lora_scale$")


class Adapter(nn.Module):
    """A residual bottleneck: h + up(gelu(down(h))). The second product starts from zeros."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.down = nn.Linear(width, inner, bias=bias)
        self.up = nn.Linear(inner, width, bias=bias)

    def forward(self, h_BND: Tensor) -> Tensor:
        return h_BND + self.up(F.gelu(self.down(h_BND)))

    def count(self, products: Products, tokens: int) -> None:
        """Count the products for an image's tokens, beside the residual connection."""
        products.layer(self.down, tokens)
        products.layer(self.up, tokens)

    def start_from_zero(self) -> None:
        """Make the adapter the identity."""
        for parameter in self.up.parameters():
            nn.init.zeros_(parameter)


class LoraLinear(nn.Linear):
    """A linear layer with LoRA beside some of its matrices: W x + (alpha / rank) b a x.

    It keeps the names and the parameters of the layer that it replaces.
    """

    lora_scale: Tensor

    def __init__(self, layer: nn.Linear, matrices: Sequence[Matrix], rank: int, alpha: float) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.lora = nn.ModuleDict()
        self._blocks = LAYERS[matrices[0]][2]
        like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        for name in matrices:
            a = nn.Linear(layer.in_features, rank, bias=False, **like)
            b = nn.Linear(rank, layer.out_features // LAYERS[name][2], bias=False, **like)
            nn.init.zeros_(b.weight)
            self.lora[name] = nn.Sequential(OrderedDict(a=a, b=b))
        # In the state, so that factors can be merged without the settings of their run.
        self.register_buffer("lora_scale", torch.tensor(alpha / rank, **like))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Return the layer's output and the products of its factors, which are never merged here."""
        blocks = list(super().forward(input).chunk(self._blocks, dim=-1))
        for block, a_RD, b_KR in self._factors():
            blocks[block] = blocks[block] + F.linear(F.linear(input, a_RD), b_KR)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)

    def count(self, products: Products, tokens: int) -> None:
        """Count the layer's product and those of its factors."""

        def count_factors(factors: nn.Module) -> None:
            products.layer(factors.get_submodule("a"), tokens)
            products.layer(factors.get_submodule("b"), tokens)

        layer = partial(products.layer, self, tokens)
        products.branches(layer, *(partial(count_factors, factors) for factors in self.lora.values()))

    def merged_weight(self) -> Tensor:
        """Return the matrix that computes the same output."""
        blocks = list(self.weight.chunk(self._blocks))
        for block, a_RD, b_KR in self._factors():
            blocks[block] = blocks[block] + b_KR @ a_RD
        return torch.cat(blocks)

    def _factors(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The block of outputs of each matrix, and its factors, the second one scaled."""
        for name, factors in self.lora.items():
            a, b = factors.get_submodule("a"), factors.get_submodule("b")
            yield LAYERS[name][1], a.get_parameter("weight"), b.get_parameter("weight") * self.lora_scale  # pyright: ignore[reportArgumentType]


def weight_of(layer: nn.Linear) -> Tensor:
    """Return the matrix of a linear layer, with its LoRA products."""
    return layer.merged_weight() if isinstance(layer, LoraLinear) else layer.weight


def count_linear(products: Products, layer: nn.Linear, tokens: int) -> None:
    """Count the products of a linear layer, with those of LoRA."""
    if isinstance(layer, LoraLinear):
        layer.count(products, tokens)
    else:
        products.layer(layer, tokens)


def add_lora(vit: nn.Module, matrices: Sequence[Matrix], rank: int, alpha: float) -> None:
    """Add products to these matrices of every branch of every level."""
    for name, layer in list(vit.named_modules()):
        if match := _LAYER.fullmatch(name):
            chosen: list[Matrix] = [matrix for matrix in matrices if LAYERS[matrix][0] == match[1]]
            if chosen:
                assert type(layer) is nn.Linear, f"{name} has products already"
                vit.set_submodule(name, LoraLinear(layer, chosen, rank, alpha))


def merge_lora(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a network's tensors with LoRA merged into the weights, and without its factors.

    Every machine gets the same bits: the hash by which a delta recognizes its base is the same everywhere.
    """
    merged = {key: tensor for key, tensor in state.items() if not _OF_LORA.search(key)}
    unused = {key: None for key in state if key not in merged}
    for key in list(unused):
        if match := _FACTOR.fullmatch(key):
            layer, name = match.groups()
            weight, scale = merged.get(f"{layer}.weight"), state.get(f"{layer}.lora_scale")
            a_RD, b_KR = state[key], state.get(f"{layer}.lora.{name}.b.weight")
            place = LAYERS.get(name)  # pyright: ignore[reportArgumentType]
            if place is None or weight is None or scale is None or b_KR is None or scale.numel() != 1:
                raise ConfigError(f"{key}: its matrix, its scale or its other factor is missing")
            _, block, blocks = place
            if (
                weight.ndim != 2
                or b_KR.shape != (len(weight) // blocks, len(a_RD))
                or a_RD.shape[1:] != weight.shape[1:]
            ):
                shapes = f"{tuple(b_KR.shape)} and {tuple(a_RD.shape)}"
                raise ConfigError(f"{key}: got factors of {shapes}, which do not fit a matrix of {tuple(weight.shape)}")
            rows = slice(block * len(b_KR), (block + 1) * len(b_KR))
            changed = weight.detach().cpu().clone()
            changed[rows] = _sum(changed[rows], b_KR, a_RD, scale.item())
            merged[f"{layer}.weight"] = changed
            for used in (key, f"{layer}.lora.{name}.b.weight", f"{layer}.lora_scale"):
                unused.pop(used, None)
    if unused:
        raise ConfigError(f"{next(iter(unused))}: the factor that belongs to it is missing")
    return merged


def _sum(weight_KD: Tensor, b_KR: Tensor, a_RD: Tensor, scale: float) -> Tensor:
    """The weight plus scale * b @ a, summed in float64 in the order of the ranks: products of float32 are exact there,
    so that no kernel, no thread and no fused multiply-add changes a bit."""
    a, sums = a_RD.detach().cpu().double(), []
    for weight, b in zip(weight_KD.split(64), b_KR.detach().cpu().double().split(64), strict=True):  # in the cache
        product = torch.zeros(weight.shape, dtype=torch.float64)
        for rank in range(len(a)):
            product.addcmul_(b[:, rank, None], a[rank])
        sums.append(product.mul_(scale).add_(weight))
    return torch.cat(sums).to(weight_KD.dtype)
