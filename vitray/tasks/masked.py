"""Masked prediction: hidden patches of an image, predicted from the visible ones, and the targets with their losses.

The ViT is unchanged, so that a fine-tuning can continue with it; decoder or head belong to the task.
Shapes: B images, C colors, H x W pixels, N patches (row by row), M selected patches, K pixels of a patch (row,
column, color), S cells of a patch, P predicted numbers of a patch, D width.
"""

import math
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config import Run
from vitray.config.augmentation import Normalize
from vitray.config.pretraining import (
    Beit,
    Mae,
    Masked,
    MeanColor,
    PixelsL1,
    PixelsL2,
    SmallPatch,
    predicted_patches,
)
from vitray.data.augment.masks import HIDDEN, VISIBLE
from vitray.models.branches import BlockSpec
from vitray.models.patches import Decoder, gather_patches, patchify, scatter_patches, unpatchify
from vitray.models.positions import VisiblePatches
from vitray.models.products import Products
from vitray.models.tokenizer import VisualTokenizer
from vitray.models.vit import ViT, initialize_linear


class MaskedPrediction(nn.Module):
    """A ViT that predicts hidden patches from visible ones.

    A mask token replaces each hidden patch after the stem. Objective mae drops hidden patches instead and inserts the
    mask token in the decoder.
    """

    def __init__(self, run: Run, tokenizer: VisualTokenizer | None = None) -> None:
        super().__init__()
        task, model = run.task, run.model
        assert isinstance(task, Masked)
        self.patch, self.grid = model.shape.patch, model.grid
        self.drops_hidden = isinstance(task.objective, Mae)
        self.predicted = predicted_patches(task.mask, math.prod(model.grid))
        self.vit = ViT(model)
        self.targets = build_targets(run, tokenizer)
        width = model.shape.size
        if isinstance(mae := task.objective, Mae):
            block = BlockSpec(mae.decoder_width, mae.decoder_heads, norm_eps=model.norm_eps)
            self.decoder = Decoder(width, self.targets.width, block, mae.decoder_depth, model.grid)
            self.mask_token = _token(mae.decoder_width)
        else:
            self.head = nn.Linear(width, self.targets.width)
            initialize_linear(self.head)
            self.mask_token = _token(width)
        if isinstance(task.objective, Beit):
            scale_branches(self.vit)

    def forward(self, images_BCHW: Tensor, mask_BN: Tensor) -> Tensor:
        """Return the mean loss over the predicted patches.

        `mask_BN` holds VISIBLE, HIDDEN, or the number of the patch shown in this place (see `draw_sources`).
        """
        index_BM, prediction_BMP = self.predict(images_BCHW, mask_BN)
        return self.targets.loss(prediction_BMP, images_BCHW.float(), index_BM)

    @torch.no_grad()
    def reconstruct(self, images_BCHW: Tensor, mask_BN: Tensor) -> Tensor:
        """Return the images with the predicted patches in place of the true ones."""
        index_BM, prediction_BMP = self.predict(images_BCHW, mask_BN)
        rendered_BMK = self.targets.render(prediction_BMP, images_BCHW.float(), index_BM)
        patches_BNK = scatter_patches(patchify(images_BCHW, self.patch), index_BM, rendered_BMK)
        return unpatchify(patches_BNK, self.grid, self.patch)

    def pictures(self, images_BCHW: Tensor, mask_BN: Tensor) -> Tensor:
        """Return rows of images for the log: originals, masked inputs and reconstructions (RBCHW)."""
        masked_BCHW = mask_pixels(images_BCHW, mask_BN, self.patch)
        return torch.stack([images_BCHW, masked_BCHW, self.reconstruct(images_BCHW, mask_BN).to(images_BCHW)])

    def before_step(self, step: int, epoch: int, total: int) -> None:
        """Follow no schedule."""

    def after_backward(self) -> None:
        """Keep all gradients."""

    def after_step(self) -> None:
        """Change nothing but what the optimizer has."""

    def read_metrics(self, *, training: bool) -> dict[str, float]:
        """Return further numbers since the last call, in one mode: none."""
        del training
        return {}

    def predict(self, images_BCHW: Tensor, mask_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the predicted patches (BM) and their predictions (BMP) in float32."""
        # Every image has the same number of predicted patches, so no device synchronization is needed.
        order_BN = (mask_BN == VISIBLE).byte().argsort(dim=1, stable=True)
        index_BM, visible_BM = order_BN[:, : self.predicted], order_BN[:, self.predicted :]
        x_BND, grid = self.vit.stem(images_BCHW)
        if self.drops_hidden:
            visible_BMD = gather_patches(self.vit.positions(x_BND, grid), visible_BM)
            x_BND = self.vit.encode(visible_BMD, VisiblePatches(grid, visible_BM))
            return index_BM, self._decode(x_BND, index_BM, visible_BM).float()
        x_BND = self.vit.positions(mask_patches(x_BND, mask_BN, self.mask_token), grid)
        x_BND = self.vit.encode(x_BND, VisiblePatches(grid))[:, -mask_BN.shape[1] :]
        return index_BM, self.head(self.vit.norm(gather_patches(x_BND, index_BM))).float()

    def count(self, products: Products) -> None:
        """Count the products of a training step for an image, with those of the tokenizer that gives its targets."""
        visible = math.prod(self.grid) - self.predicted
        if self.drops_hidden:
            self.vit.count_tokens(products, dropped=self.predicted)
            products.train(self.vit.norm)
            prefix = self.vit.num_prefix
            self.decoder.count(products, visible + prefix, prefix, self.predicted)
        else:
            self.vit.count_tokens(products)
            products.train(self.vit.norm)
            products.layer(self.head, self.predicted)
        if isinstance(self.targets, Codes):
            products.frozen(self.targets.tokenizer.count_codes)

    def _decode(self, x_BND: Tensor, index_BM: Tensor, visible_BM: Tensor) -> Tensor:
        """Predict the hidden patches from the tokens of the visible ones and those before them."""
        x_BND = self.decoder.embed(self.vit.norm(x_BND))
        first = x_BND.shape[1] - visible_BM.shape[1]
        masks_BND = self.mask_token.to(x_BND.dtype).expand(len(x_BND), visible_BM.shape[1] + index_BM.shape[1], -1)
        patches_BND = self.decoder(scatter_patches(masks_BND, visible_BM, x_BND[:, first:]), x_BND[:, :first])
        return self.decoder.head(gather_patches(patches_BND, index_BM))


def mask_patches(x_BND: Tensor, mask_BN: Tensor, token_D: Tensor) -> Tensor:
    """Return patches, or their tokens, as the network sees them: kept, exchanged or masked by `token_D`."""
    own_N = torch.arange(mask_BN.shape[1], device=mask_BN.device)
    x_BND = gather_patches(x_BND, torch.where(mask_BN < 0, own_N, mask_BN))
    return torch.where((mask_BN == HIDDEN)[..., None], token_D.to(x_BND.dtype), x_BND)


def mask_pixels(images_BCHW: Tensor, mask_BN: Tensor, patch: int) -> Tensor:
    """Return images as the network sees them, with the mean color of the dataset as mask."""
    patches_BNK = patchify(images_BCHW, patch)
    grid = images_BCHW.shape[2] // patch, images_BCHW.shape[3] // patch
    return unpatchify(mask_patches(patches_BNK, mask_BN, patches_BNK.new_zeros(())), grid, patch)


@torch.no_grad()
def scale_branches(vit: ViT) -> None:
    """Divide the initial output weights of the branches of level l by sqrt(2 l), as in BeiT."""
    for level, block in enumerate(vit.blocks, start=1):
        for name, weight in block.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                weight.div_(math.sqrt(2 * level))


def _token(width: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(width), std=0.02))


# ---- targets: colors, pixels or codes of the predicted patches -------------------------------------------------------


class Colors:
    """The mean color of each cell of a patch, as one of 512: three bits each for red, green and blue."""

    def __init__(self, patch: int, cells: int, normalize: Normalize) -> None:
        self.patch, self.cell, self.normalize = patch, patch // cells, normalize
        self.width = cells**2 * 512

    def loss(self, prediction_BMP: Tensor, images_BCHW: Tensor, index_BM: Tensor) -> Tensor:
        """Return the mean cross-entropy over the predicted cells."""
        target_BMS = gather_patches(self.classes(images_BCHW), index_BM)
        return F.cross_entropy(prediction_BMP.reshape(-1, 512), target_BMS.flatten())

    def classes(self, images_BCHW: Tensor) -> Tensor:
        """Return the color class of each cell of each patch, BNS."""
        means_BChw = F.avg_pool2d(images_BCHW, self.cell)
        bits_Bhw = torch.zeros_like(means_BChw[:, :1], dtype=torch.int64)
        for color, (mean, std) in enumerate(zip(self.normalize.mean, self.normalize.std, strict=True)):
            level = (8 * (means_BChw[:, color : color + 1] * std + mean)).long().clamp(0, 7)
            bits_Bhw = 8 * bits_Bhw + level
        return patchify(bits_Bhw, self.patch // self.cell)

    def render(self, prediction_BMP: Tensor, _images_BCHW: Tensor, _index_BM: Tensor) -> Tensor:
        """Return the predicted patches in their likeliest colors, at the center of each level, BMK."""
        likeliest_BMS = prediction_BMP.unflatten(-1, (-1, 512)).argmax(dim=-1)
        colors = [(likeliest_BMS // step % 8 + 0.5) / 8 for step in (64, 8, 1)]
        means_stds = zip(self.normalize.mean, self.normalize.std, strict=True)
        normalized = [(color - mean) / std for color, (mean, std) in zip(colors, means_stds, strict=True)]
        side = self.patch // self.cell
        cells_BMssC = torch.stack(normalized, dim=-1).unflatten(2, (side, side))
        return cells_BMssC.repeat_interleave(self.cell, 2).repeat_interleave(self.cell, 3).flatten(2)


class Pixels:
    """The pixels of a patch."""

    def __init__(self, patch: int, error: str, normalized: bool) -> None:
        self.patch, self.error, self.normalized = patch, error, normalized
        self.width = 3 * patch**2

    def loss(self, prediction_BMP: Tensor, images_BCHW: Tensor, index_BM: Tensor) -> Tensor:
        """Return the mean squared or absolute error."""
        target_BMK = gather_patches(patchify(images_BCHW, self.patch), index_BM)
        if self.normalized:
            mean, std = _mean_std(target_BMK)
            target_BMK = (target_BMK - mean) / std
        if self.error == "l2":
            return F.mse_loss(prediction_BMP, target_BMK)
        # As in Hugging Face's masked image modeling, to the last digit.
        return (prediction_BMP - target_BMK).abs().sum() / (target_BMK.numel() / 3 + 1e-5) / 3

    def render(self, prediction_BMP: Tensor, images_BCHW: Tensor, index_BM: Tensor) -> Tensor:
        """Return the predicted patches, BMK; normalized ones get the mean and variance of the true patches."""
        if not self.normalized:
            return prediction_BMP
        mean, std = _mean_std(gather_patches(patchify(images_BCHW, self.patch), index_BM))
        return prediction_BMP * std + mean


def _mean_std(patches_BMK: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased, positive standard deviation of each patch, as in MAE's code."""
    return patches_BMK.mean(dim=-1, keepdim=True), (patches_BMK.var(dim=-1, keepdim=True) + 1e-6).sqrt()


class Codes:
    """The code of a patch."""

    def __init__(self, tokenizer: VisualTokenizer) -> None:
        # This class is not a module, so the task neither trains nor saves the tokenizer.
        self.tokenizer = tokenizer.eval().requires_grad_(False)
        self.width = tokenizer.codes

    def loss(self, prediction_BMP: Tensor, images_BCHW: Tensor, index_BM: Tensor) -> Tensor:
        """Return the mean cross-entropy over the predicted patches."""
        target_BM = self.tokenizer.encode(images_BCHW).gather(1, index_BM)
        return F.cross_entropy(prediction_BMP.flatten(0, 1), target_BM.flatten())

    def render(self, prediction_BMP: Tensor, images_BCHW: Tensor, index_BM: Tensor) -> Tensor:
        """Return the decoded patches of the likeliest codes among the true codes of the others, BMK."""
        codes_BN = self.tokenizer.encode(images_BCHW).scatter(1, index_BM, prediction_BMP.argmax(dim=-1))
        return gather_patches(patchify(self.tokenizer.decode(codes_BN), self.tokenizer.patch), index_BM)


def build_targets(run: Run, tokenizer: VisualTokenizer | None) -> Colors | Pixels | Codes:
    """Return the targets of a run's objective; objective beit needs its tokenizer."""
    task, patch = run.task, run.model.shape.patch
    assert isinstance(task, Masked)
    match task.objective:
        case MeanColor():
            return Colors(patch, 1, run.data.normalize)
        case SmallPatch():
            return Colors(patch, 4, run.data.normalize)
        case PixelsL2():
            return Pixels(patch, "l2", False)
        case PixelsL1():
            return Pixels(patch, "l1", False)
        case Mae(normalized=normalized):
            return Pixels(patch, "l2", normalized)
        case Beit():
            assert tokenizer is not None, "objective beit needs its tokenizer"
            return Codes(tokenizer)
        case _:
            assert_never(task.objective)
