"""A visual tokenizer: an autoencoder with one discrete code per patch.

Each token becomes a few numbers, and each number is rounded to one of its levels (finite scalar quantization). No code
vector is learned, so no code can die. No running statistics depend on the split of a batch over workers and
micro-batches. The only loss is the reconstruction error.

Shapes: B images, C colors, H x W pixels, N patches (row by row), L numbers of a code, V codes.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config import Run
from vitray.config.pretraining import Tokenizer
from vitray.models.branches import BlockSpec
from vitray.models.patches import Decoder, patchify, unpatchify
from vitray.models.precision import without_autocast
from vitray.models.products import Products
from vitray.models.vit import ViT


class VisualTokenizer(nn.Module):
    """An autoencoder: the ViT of a run, a discrete bottleneck and a decoder."""

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
        # Turns a normalized token into a roughly logistic variable: initially all levels are about equally likely.
        nn.init.normal_(self.squeeze.weight, std=math.pi / math.sqrt(3 * model.shape.size))
        nn.init.zeros_(self.squeeze.bias)
        block = BlockSpec(task.decoder_width, task.decoder_heads, norm_eps=model.norm_eps)
        self.decoder = Decoder(len(task.levels), 3 * self.patch**2, block, task.decoder_depth, self.grid)
        levels_L = torch.tensor(task.levels)
        self.register_buffer("levels", levels_L, persistent=False)
        self.register_buffer("strides", levels_L.cumprod(0) // levels_L, persistent=False)
        # Not a buffer: DDP would overwrite it with the first worker's counts.
        self._count_2V = torch.zeros(2, self.codes, dtype=torch.int64)  # of evaluation, and of training

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return the mean squared error of the reconstructed pixels."""
        numbers_BNL = self._numbers(images_BCHW)
        level_BNL = self._round(numbers_BNL)
        self._count(level_BNL)
        # Straight-through estimator: the gradient bypasses the rounding.
        numbers_BNL = numbers_BNL + (self._centers(level_BNL) - numbers_BNL).detach()
        return F.mse_loss(self._decode_patches(numbers_BNL).float(), patchify(images_BCHW, self.patch).float())

    def count(self, products: Products) -> None:
        """Count the products for an image."""
        self.count_codes(products)
        patches = math.prod(self.grid)
        self.decoder.count(products, patches, 0, patches)

    def count_codes(self, products: Products) -> None:
        """Count the products from an image to its codes."""
        self.vit.count_tokens(products)
        products.train(self.vit.norm)
        products.layer(self.squeeze, math.prod(self.grid))

    # ---- codes -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, images_BCHW: Tensor) -> Tensor:
        """Return the code of each patch (BN), computed in float32 even under autocast."""
        with without_autocast(images_BCHW.device):
            return self._code(self._round(self._numbers(images_BCHW.float())))

    @torch.no_grad()
    def decode(self, codes_BN: Tensor) -> Tensor:
        """Return the images (BCHW, normalized) of codes."""
        level_BNL = codes_BN[..., None] // self.strides % self.levels
        return unpatchify(self._decode_patches(self._centers(level_BNL)), self.grid, self.patch)

    def reconstruct(self, images_BCHW: Tensor) -> Tensor:
        """Return the images decoded from their codes."""
        return self.decode(self.encode(images_BCHW))

    def pictures(self, images_BCHW: Tensor) -> Tensor:
        """Return rows of images for the log: originals and reconstructions (RBCHW)."""
        return torch.stack([images_BCHW, self.reconstruct(images_BCHW)])

    def before_step(self, step: int, epoch: int, total: int) -> None:
        """Follow no schedule."""

    def after_backward(self) -> None:
        """Keep all gradients."""

    def after_step(self) -> None:
        """Change nothing but what the optimizer has."""

    def read_metrics(self, *, training: bool) -> dict[str, float]:
        """Return the perplexity of all workers' codes since the last call, in one mode, and reset its counts.

        It is the number of equally frequent codes with the same entropy.
        """
        count_V = self._count_2V[int(training)].clone()
        self._count_2V[int(training)].zero_()
        if dist.is_initialized():
            dist.all_reduce(count_V)
        share_V = count_V.double() / count_V.sum()
        return {"perplexity": float(torch.special.entr(share_V).sum().exp())}

    # ---- the bottleneck ----------------------------------------------------------------------------------------------

    def _numbers(self, images_BCHW: Tensor) -> Tensor:
        """Each patch as numbers between 0 and 1, in float32."""
        tokens_BND = self.vit.tokens(images_BCHW)[:, -math.prod(self.grid) :]
        return self.squeeze(self.vit.norm(tokens_BND)).float().sigmoid()

    def _round(self, numbers_BNL: Tensor) -> Tensor:
        level_BNL = (numbers_BNL.detach() * self.levels).long()
        return level_BNL.minimum(self.levels - 1)  # a sigmoid may round to 1

    def _centers(self, level_BNL: Tensor) -> Tensor:
        return (level_BNL + 0.5) / self.levels

    def _code(self, level_BNL: Tensor) -> Tensor:
        return (level_BNL * self.strides).sum(dim=-1)

    def _count(self, level_BNL: Tensor) -> None:
        codes = self._code(level_BNL).flatten()
        self._count_2V = self._count_2V.to(codes.device)
        # bincount would wait for the device
        self._count_2V[int(self.training)].scatter_add_(0, codes, torch.ones_like(codes))

    def _decode_patches(self, numbers_BNL: Tensor) -> Tensor:
        """The pixels of patches, BNK."""
        decoder = self.decoder
        return decoder.head(decoder(decoder.embed(2 * numbers_BNL - 1)))
