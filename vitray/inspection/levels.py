"""A network level by level: the input and output of each, and the explicit attention of those that are inspected.

The network computes with its own kernels throughout. Attention weights are computed beside it from a level's input, so
that its outputs stay the same bits, and only one level's weights exist at a time.

Shapes: B images, C colors, H x W pixels, N tokens (class token, distillation token and registers, if any, then the
patches row by row), D width; of attention weights (BHNN), H heads.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from vitray.errors import ConfigError
from vitray.models.blocks import Block
from vitray.models.network import AnyNetwork
from vitray.models.positions import AttentionPositions, VisiblePatches
from vitray.models.vit import ViT

# The largest explicit attention of one branch in bytes, where a single image allows it. Reductions need a few copies.
MAX_ATTENTION_BYTES = 2**28


class Level(NamedTuple):
    """One level while a batch passes through it; its input and output are BND."""

    number: int
    block: Block
    input: Tensor
    output: Tensor
    positions: AttentionPositions

    def attention(self) -> Iterator[Tensor]:
        """Yield the attention weights of one branch after another, BHNN."""
        for branch in self.block.attentions:
            yield branch.weights(self.input, self.positions)


def run_levels(vit: ViT, images_BCHW: Tensor) -> Iterator[Level]:
    """Yield each level with its input and output. `vit.head(vit.pooled(last.output))` are the logits."""
    check_network(vit)
    x_BND, grid = vit.stem(images_BCHW)
    output_BND, places = vit.first_input(vit.positions(x_BND, grid)), VisiblePatches(grid)
    positions = vit.attention_positions(places)
    for index, block in enumerate(blocks(vit)):
        x_BND = vit.level_input(index, output_BND, places)
        output_BND = block(x_BND, None, "", positions)
        yield Level(index, block, x_BND, output_BND, positions)


def blocks(vit: ViT) -> list[Block]:
    """Return the levels of a network."""
    return list(vit.blocks)  # pyright: ignore[reportReturnType]


def check_network(vit: AnyNetwork) -> None:
    """Refuse a network in training mode, whose dropout would be inspected too."""
    if vit.training:
        raise ValueError("the network is in training mode, expected evaluation mode: call .eval() first")


def check_levels(vit: ViT, chosen: Sequence[int]) -> Sequence[int]:
    """Return the chosen levels, counted from 0, or refuse those that the network does not have."""
    depth = len(vit.blocks)
    if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= depth:
        wanted = f"some of 0 to {depth - 1} in ascending order, as {vit.model.name} has {depth} levels"
        raise ConfigError(f"levels: got {', '.join(map(str, chosen)) or 'none'}; expected {wanted}")
    return chosen


def grid_of(vit: ViT, images_BCHW: Tensor) -> tuple[int, int]:
    """Return the rows and columns of patches of images."""
    height, width = images_BCHW.shape[-2:]
    return height // vit.stem.patch, width // vit.stem.patch


def images_at_once(vit: ViT, images_BCHW: Tensor) -> int:
    """Return the number of images whose attention weights are computed together."""
    rows, columns = grid_of(vit, images_BCHW)
    tokens = rows * columns + vit.num_prefix
    return max(1, MAX_ATTENTION_BYTES // (blocks(vit)[0].heads * tokens**2 * images_BCHW.element_size()))
