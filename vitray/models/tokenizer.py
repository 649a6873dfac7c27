"""A visual tokenizer: a code for each patch, from which the image can be drawn again.

Each token becomes a few numbers, each number is rounded to one of its levels, and the levels are the code (finite
scalar quantisation). No code is a vector that is learned, so none can die, and no running statistics depend on how a
batch is split over workers and passes: the one loss is the error of what is drawn.

Shapes: B images, C colours, H x W pixels, N patches (row by row), L numbers of a code, V codes.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config import Run
from vitray.config.pretraining import Tokenizer
from vitray.models.patches import Decoder, patchify, unpatchify
from vitray.models.vit import ViT


class VisualTokenizer(nn.Module):
    """An autoencoder through codes: the network of a run, a bottleneck, and a decoder."""

    levels: Tensor
    strides: Tensor

    def __init__(self, run: Run) -> None:
        super().__init__()
        task, model = run.task, run.model
        assert isinstance(task, Tokenizer)
        self.run, self.codes = run, task.codes
        self.patch, self.grid = model.shape.patch, model.grid
        self.vit = ViT(model)
        self.squeeze = nn.Linear(model.shape.size, len(task.levels))
        # Of a normalised token a logistic variable: at the start all levels of a number are about as likely.
        nn.init.normal_(self.squeeze.weight, std=math.pi / math.sqrt(3 * model.shape.size))
        nn.init.zeros_(self.squeeze.bias)
        self.decoder = Decoder(
            len(task.levels),
            task.decoder_width,
            task.decoder_depth,
            task.decoder_heads,
            3 * self.patch**2,
            self.grid,
            model.norm_eps,
        )
        levels_L = torch.tensor(task.levels)
        self.register_buffer("levels", levels_L, persistent=False)
        self.register_buffer("strides", levels_L.cumprod(0) // levels_L, persistent=False)
        # No buffer: DDP would give every worker the first one's.
        self._used_V = torch.zeros(self.codes, dtype=torch.int64)

    def forward(self, images_BCHW: Tensor, _targets: Tensor | None = None) -> Tensor:
        """The mean squared error of the pixels drawn; there are no other targets."""
        shares_BNL = self._shares(images_BCHW)
        level_BNL = self._rounded(shares_BNL)
        self._count(level_BNL)
        # Rounding has no slope, so the gradient goes past it.
        shares_BNL = shares_BNL + (self._middles(level_BNL) - shares_BNL).detach()
        return F.mse_loss(self._drawn(shares_BNL).float(), patchify(images_BCHW, self.patch).float())

    # ---- as a vocabulary ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, images_BCHW: Tensor) -> Tensor:
        """The code of each patch (BN), in float32 also where a training computes in bfloat16."""
        with torch.autocast(images_BCHW.device.type, enabled=False):
            return self._code(self._rounded(self._shares(images_BCHW.float())))

    @torch.no_grad()
    def decode(self, codes_BN: Tensor) -> Tensor:
        """The images (BCHW, normalised) that codes stand for."""
        level_BNL = codes_BN[..., None] // self.strides % self.levels
        return unpatchify(self._drawn(self._middles(level_BNL)), self.grid, self.patch)

    def reconstruct(self, images_BCHW: Tensor, _targets: Tensor | None = None) -> Tensor:
        """The images as they are drawn from their codes."""
        return self.decode(self.encode(images_BCHW))

    def pictures(self, images_BCHW: Tensor, _targets: Tensor) -> Tensor:
        """What one looks at: the images, and what is drawn from their codes (RBCHW)."""
        return torch.stack([images_BCHW, self.reconstruct(images_BCHW)])

    def read_perplexity(self) -> float:
        """How many codes, equally frequent, would be as much as was used since the last reading, by all workers."""
        used_V = self._used_V.clone()
        self._used_V.zero_()
        if dist.is_initialized():
            dist.all_reduce(used_V)
        share_V = used_V.double() / used_V.sum()
        return float(torch.special.entr(share_V).sum().exp())

    # ---- the bottleneck ----------------------------------------------------------------------------------------------

    def _shares(self, images_BCHW: Tensor) -> Tensor:
        """Each patch as numbers from 0 to 1, in float32."""
        tokens_BND = self.vit.tokens(images_BCHW)[:, -math.prod(self.grid) :]
        return self.squeeze(self.vit.norm(tokens_BND)).float().sigmoid()

    def _rounded(self, shares_BNL: Tensor) -> Tensor:
        level_BNL = (shares_BNL.detach() * self.levels).long()
        return level_BNL.minimum(self.levels - 1)  # a share may be 1 to the last bit

    def _middles(self, level_BNL: Tensor) -> Tensor:
        return (level_BNL + 0.5) / self.levels

    def _code(self, level_BNL: Tensor) -> Tensor:
        return (level_BNL * self.strides).sum(dim=-1)

    def _count(self, level_BNL: Tensor) -> None:
        codes = self._code(level_BNL).flatten()
        self._used_V = self._used_V.to(codes.device)
        self._used_V.scatter_add_(0, codes, torch.ones_like(codes))  # bincount would wait for the device

    def _drawn(self, shares_BNL: Tensor) -> Tensor:
        """The patches' pixels, BNK."""
        decoder = self.decoder
        return decoder.head(decoder(decoder.embed(2 * shares_BNL - 1)))
