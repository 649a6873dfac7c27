"""Images as patches, and a light transformer from tokens back to patches.

Shapes: B images, C colours, H x W pixels, N patches (row by row), M of them, F tokens before them, K pixels of a patch
(row, column, colour), D width.
"""

import torch
from torch import Tensor, nn

from vitray.config import SinCos2d
from vitray.models.blocks import Block
from vitray.models.positions import Grid, Positions
from vitray.models.vit import initialise_linear


def patchify(images_BCHW: Tensor, patch: int) -> Tensor:
    """Images as their patches, BNK."""
    x_BChpwp = images_BCHW.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
    return x_BChpwp.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches_BNK: Tensor, grid: Grid, patch: int) -> Tensor:
    """Patches as the images that they are of, BCHW."""
    x_BhwppC = patches_BNK.unflatten(2, (patch, patch, -1)).unflatten(1, grid)
    return x_BhwppC.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def picked(x_BND: Tensor, index_BM: Tensor) -> Tensor:
    """Of each image some patches, BMD."""
    return x_BND.gather(1, index_BM[..., None].expand(-1, -1, x_BND.shape[2]))


def replaced(x_BND: Tensor, index_BM: Tensor, new_BMD: Tensor) -> Tensor:
    """The patches of each image, some of them others, BND."""
    return x_BND.scatter(1, index_BM[..., None].expand_as(new_BMD), new_BMD.to(x_BND.dtype))


class Decoder(nn.Module):
    """From tokens to numbers of patches: narrower and less deep than the network that it trains."""

    def __init__(
        self, before: int, width: int, depth: int, heads: int, after: int, grid: Grid, norm_eps: float
    ) -> None:
        super().__init__()
        self.grid = grid
        self.embed = nn.Linear(before, width)
        self.positions = Positions(SinCos2d(), grid, width)
        self.blocks = nn.ModuleList(Block(width, heads, norm_eps=norm_eps) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width, eps=norm_eps), nn.Linear(width, after))
        self.apply(initialise_linear)
        # What comes in goes on with the spread that it has, beside positions of a spread of 0.7.
        nn.init.normal_(self.embed.weight, std=before**-0.5)

    def forward(self, x_BND: Tensor, first_BFD: Tensor | None = None) -> Tensor:
        """What the last block returns of patches, BND; tokens without a position may go before them."""
        x_BND = self.positions(x_BND, self.grid)
        if first_BFD is not None:
            x_BND = torch.cat([first_BFD, x_BND], dim=1)
        for block in self.blocks:
            x_BND = block(x_BND)
        return x_BND if first_BFD is None else x_BND[:, first_BFD.shape[1] :]
