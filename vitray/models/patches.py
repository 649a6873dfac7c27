"""Images as patches, and a light transformer decoder from tokens to patches.

Shapes: B images, C colors, H x W pixels, N patches (row by row), M selected patches, F prefix tokens, K pixels of a
patch (row, column, color), D width.
"""

import torch
from torch import Tensor, nn

from vitray.config import SinCos2d
from vitray.models.blocks import Block
from vitray.models.branches import BlockSpec
from vitray.models.positions import Grid, Positions
from vitray.models.products import Products
from vitray.models.vit import initialize_linear


def patchify(images_BCHW: Tensor, patch: int) -> Tensor:
    """Return the patches of images, BNK."""
    x_BChpwp = images_BCHW.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
    return x_BChpwp.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches_BNK: Tensor, grid: Grid, patch: int) -> Tensor:
    """Return the images of patches, BCHW."""
    x_BhwppC = patches_BNK.unflatten(2, (patch, patch, -1)).unflatten(1, grid)
    return x_BhwppC.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def gather_patches(x_BND: Tensor, index_BM: Tensor) -> Tensor:
    """Return the selected patches of each image, BMD."""
    return x_BND.gather(1, index_BM[..., None].expand(-1, -1, x_BND.shape[2]))


def scatter_patches(x_BND: Tensor, index_BM: Tensor, new_BMD: Tensor) -> Tensor:
    """Return all patches of each image, with the selected ones replaced by new ones, BND."""
    return x_BND.scatter(1, index_BM[..., None].expand_as(new_BMD), new_BMD.to(x_BND.dtype))


class Decoder(nn.Module):
    """A small transformer with an input projection from `before` and an output head to `after` channels."""

    def __init__(self, before: int, after: int, block: BlockSpec, depth: int, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.embed = nn.Linear(before, block.width)
        self.positions = Positions(SinCos2d(), grid, block.width)
        self.blocks = nn.ModuleList(Block(block) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(block.width, eps=block.norm_eps), nn.Linear(block.width, after))
        self.apply(initialize_linear)
        # Preserves the input's variance, beside positions with a standard deviation of 0.7.
        nn.init.normal_(self.embed.weight, std=before**-0.5)

    def forward(self, x_BND: Tensor, prefix_BFD: Tensor | None = None) -> Tensor:
        """Return the last block's output for the patches, BND; prefix tokens take part without positions."""
        x_BND = self.positions(x_BND, self.grid)
        if prefix_BFD is not None:
            x_BND = torch.cat([prefix_BFD, x_BND], dim=1)
        for block in self.blocks:
            x_BND = block(x_BND)
        return x_BND if prefix_BFD is None else x_BND[:, prefix_BFD.shape[1] :]

    def count(self, products: Products, embedded: int, prefix: int, predicted: int) -> None:
        """Count the products for an image: of the tokens that `embed` gets, of all, and of those that `head` gets."""
        products.layer(self.embed, embedded)
        tokens = self.grid[0] * self.grid[1] + prefix
        for block in self.blocks:
            block.count(products, tokens, tokens)  # pyright: ignore[reportCallIssue]
        norm, head = self.head
        products.train(norm)
        products.layer(head, predicted)
