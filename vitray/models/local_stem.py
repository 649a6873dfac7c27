"""The local-transformer stem: attention among the cells of each patch, added to a linear projection of the patch.

The inner transformer of TNT, before the first block only. Of its design "Three things" prints the cost alone: 19.12
GFLOPs for ViT-B (Table 7). Width, depth and merging are chosen here to meet it.

Shapes: B images, h x w patches, s x s cells of a patch, n = s * s, C channels of a cell, D width.
"""

from functools import partial

import torch
from torch import Tensor, nn

from vitray.config.model_names import Name
from vitray.config.stems import CELL, LOCAL_DEPTH, LOCAL_HEADS
from vitray.models.blocks import Block
from vitray.models.branches import BlockSpec
from vitray.models.products import Products, count_convolutions


class LocalTransformer(nn.Module):
    """A transformer over the cells of each patch; its cells are merged as in the hMLP stem."""

    rows_are_patches = True
    """Its layers see a row for each patch, not for each image."""

    def __init__(self, name: Name) -> None:
        super().__init__()
        cells, *merges = name.convolutions
        self.cells_per_side = name.patch // CELL
        self.linear = nn.Conv2d(3, name.size, name.patch, name.patch)
        self.cells = nn.Conv2d(3, cells.channels, cells.kernel, cells.stride)
        self.positions = nn.Parameter(torch.empty(self.cells_per_side**2, cells.channels))
        nn.init.trunc_normal_(self.positions, std=0.02)
        spec = BlockSpec(cells.channels, LOCAL_HEADS)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(LOCAL_DEPTH))
        self.norm = nn.LayerNorm(cells.channels, eps=1e-6)
        layers: list[nn.Module] = []
        for merge in merges:
            layers += [nn.Conv2d(cells.channels, merge.channels, merge.kernel, merge.stride), nn.GELU()]
        self.merge = nn.Sequential(*layers[:-1])

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return the tokens as an image, BDhw."""
        side = self.cells_per_side
        patches_BDhw = self.linear(images_BCHW)
        cells_BChsws = self.cells(images_BCHW).unflatten(3, (-1, side)).unflatten(2, (-1, side))
        # Each patch is a sequence of its own.
        x_BnC = cells_BChsws.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(0, 2) + self.positions
        for block in self.blocks:
            x_BnC = block(x_BnC)
        merged_BD11 = self.merge(self.norm(x_BnC).mT.unflatten(2, (side, side)))
        grid = patches_BDhw.shape[-2:]
        return patches_BDhw + merged_BD11.flatten(1).unflatten(0, (-1, grid.numel())).mT.unflatten(2, grid)

    def describe(self) -> str:
        """Return it as a line of a network's diagram."""
        return f"linear + {len(self.blocks)} levels on {len(self.positions)} cells of {self.norm.weight.numel()}"

    def count(self, products: Products, pixels: int) -> int:
        """Count the products for an image, and return the number of its patches."""
        cells = pixels // CELL**2
        patches = cells // self.cells_per_side**2

        def count_cells() -> None:
            products.layer(self.cells, cells)
            products.train(self.positions)
            for block in self.blocks:
                block.count(products, cells, cells // patches)  # pyright: ignore[reportCallIssue]
            products.train(self.norm)
            count_convolutions(self.merge, products, cells)

        products.branches(partial(products.layer, self.linear, patches), count_cells)
        return patches
