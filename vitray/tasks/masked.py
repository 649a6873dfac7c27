"""Some patches of an image, learned from the others: hidden after the stem, predicted from what a ViT makes of these.

The network that is trained is an unchanged ViT, which a fine-tuning goes on with; what predicts is beside it.
Shapes: B images, C colours, H x W pixels, N patches (row by row), M of them predicted, K pixels of a patch (row,
column, colour), S cells of a patch, P predicted numbers of a patch, D width.
"""

import math
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config import Run
from vitray.config.augmentation import Normalise
from vitray.config.pretraining import Beit, Mae, Masked, MeanColour, PixelsL1, PixelsL2, SmallPatch, predicted_patches
from vitray.data.augment.masks import HIDDEN, VISIBLE
from vitray.errors import ConfigError
from vitray.models.patches import Decoder, patchify, picked, replaced, unpatchify
from vitray.models.tokenizer import VisualTokenizer
from vitray.models.vit import ViT, initialise_linear


class MaskedPrediction(nn.Module):
    """Patches of an image, predicted from the others.

    A mask token takes the place of a hidden patch after the stem. Objective mae leaves hidden patches out instead, and
    the token takes their place in the decoder.
    """

    def __init__(self, run: Run, tokenizer: VisualTokenizer | None = None) -> None:
        super().__init__()
        task, model = run.task, run.model
        assert isinstance(task, Masked)
        self.patch, self.grid = model.shape.patch, model.grid
        self.drops = isinstance(task.objective, Mae)
        self.predicted = predicted_patches(task.mask, math.prod(model.grid))
        self.vit = ViT(model)
        self.targets = build_targets(run, tokenizer)
        before, after = model.shape.size, self.targets.width
        if isinstance(mae := task.objective, Mae):
            size = mae.decoder_width, mae.decoder_depth, mae.decoder_heads
            self.decoder = Decoder(before, *size, after, model.grid, model.norm_eps)
            self.mask_token = _token(mae.decoder_width)
        else:
            self.head = nn.Linear(before, after)
            initialise_linear(self.head)
            self.mask_token = _token(before)
        if isinstance(task.objective, Beit):
            quieten(self.vit)

    def forward(self, images_BCHW: Tensor, source_BN: Tensor) -> Tensor:
        """The mean loss over the predicted patches of the batch; what a source says is in `augment.masks`."""
        index_BM, prediction_BMP = self.predict(images_BCHW, source_BN)
        return self.targets.loss(prediction_BMP, images_BCHW.float(), index_BM)

    @torch.no_grad()
    def reconstruct(self, images_BCHW: Tensor, source_BN: Tensor) -> Tensor:
        """The images with their predicted patches as they are predicted."""
        index_BM, prediction_BMP = self.predict(images_BCHW, source_BN)
        drawn_BMK = self.targets.drawn(prediction_BMP, images_BCHW.float(), index_BM)
        patches_BNK = replaced(patchify(images_BCHW, self.patch), index_BM, drawn_BMK)
        return unpatchify(patches_BNK, self.grid, self.patch)

    def pictures(self, images_BCHW: Tensor, source_BN: Tensor) -> Tensor:
        """What one looks at: the images, what is seen of them, and what is predicted (RBCHW)."""
        seen_BCHW = blanked(images_BCHW, source_BN, self.patch)
        return torch.stack([images_BCHW, seen_BCHW, self.reconstruct(images_BCHW, source_BN).to(images_BCHW)])

    def predict(self, images_BCHW: Tensor, source_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Which patches are predicted, and what of them, in float32."""
        # As many of each image, so that no device is asked how many.
        order_BN = (source_BN == VISIBLE).byte().argsort(dim=1, stable=True)
        index_BM, seen_BM = order_BN[:, : self.predicted], order_BN[:, self.predicted :]
        x_BND, grid = self.vit.stem(images_BCHW)
        if self.drops:
            x_BND = self.vit.encode(picked(self.vit.positions(x_BND, grid), seen_BM))
            return index_BM, self._decode(x_BND, index_BM, seen_BM).float()
        x_BND = self.vit.positions(corrupted(x_BND, source_BN, self.mask_token), grid)
        x_BND = self.vit.encode(x_BND)[:, -source_BN.shape[1] :]
        return index_BM, self.head(self.vit.norm(picked(x_BND, index_BM))).float()

    def _decode(self, x_BND: Tensor, index_BM: Tensor, seen_BM: Tensor) -> Tensor:
        """From the tokens of what was seen, and before them perhaps a class token, to predictions of the rest."""
        x_BND = self.decoder.embed(self.vit.norm(x_BND))
        first = x_BND.shape[1] - seen_BM.shape[1]
        hidden_BND = self.mask_token.to(x_BND.dtype).expand(len(x_BND), seen_BM.shape[1] + index_BM.shape[1], -1)
        patches_BND = self.decoder(replaced(hidden_BND, seen_BM, x_BND[:, first:]), x_BND[:, :first])
        return self.decoder.head(picked(patches_BND, index_BM))


def corrupted(x_BND: Tensor, source_BN: Tensor, token_D: Tensor) -> Tensor:
    """Patches, or their tokens, as the network sees them: themselves, others in their place, or a mask token."""
    own_N = torch.arange(source_BN.shape[1], device=source_BN.device)
    x_BND = picked(x_BND, torch.where(source_BN < 0, own_N, source_BN))
    return torch.where((source_BN == HIDDEN)[..., None], token_D.to(x_BND.dtype), x_BND)


def blanked(images_BCHW: Tensor, source_BN: Tensor, patch: int) -> Tensor:
    """Images as the network sees them, with the mean colour of all images in place of a mask token."""
    patches_BNK = patchify(images_BCHW, patch)
    grid = images_BCHW.shape[2] // patch, images_BCHW.shape[3] // patch
    return unpatchify(corrupted(patches_BNK, source_BN, patches_BNK.new_zeros(())), grid, patch)


@torch.no_grad()
def quieten(vit: ViT) -> None:
    """BeiT's start: what the branches of level l add is divided by the square root of 2 l."""
    for level, block in enumerate(vit.blocks, start=1):
        for name, weight in block.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                weight.div_(math.sqrt(2 * level))


def _token(width: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(width), std=0.02))


# ---- what is predicted -----------------------------------------------------------------------------------------------


class Colours:
    """The mean colours of a patch's cells, each of 512: three bits for each of red, green and blue."""

    def __init__(self, patch: int, cells: int, normalise: Normalise) -> None:
        self.patch, self.cell, self.normalise = patch, patch // cells, normalise
        self.width = cells**2 * 512

    def loss(self, prediction_BMP: Tensor, images_BCHW: Tensor, index_BM: Tensor) -> Tensor:
        """The mean cross-entropy of the predicted cells."""
        target_BMS = picked(self.classes(images_BCHW), index_BM)
        return F.cross_entropy(prediction_BMP.reshape(-1, 512), target_BMS.flatten())

    def classes(self, images_BCHW: Tensor) -> Tensor:
        """The colour of each cell of each patch as one of 512, BNS."""
        means_BChw = F.avg_pool2d(images_BCHW, self.cell)
        bits_Bhw = torch.zeros_like(means_BChw[:, :1], dtype=torch.int64)
        for colour, (mean, std) in enumerate(zip(self.normalise.mean, self.normalise.std, strict=True)):
            level = (8 * (means_BChw[:, colour : colour + 1] * std + mean)).long().clamp(0, 7)
            bits_Bhw = 8 * bits_Bhw + level
        return patchify(bits_Bhw, self.patch // self.cell)

    def drawn(self, prediction_BMP: Tensor, _images_BCHW: Tensor, _index_BM: Tensor) -> Tensor:
        """Patches of the likeliest colours, BMK: of a level of three bits, its middle."""
        likeliest_BMS = prediction_BMP.unflatten(-1, (-1, 512)).argmax(dim=-1)
        colours = [(likeliest_BMS // step % 8 + 0.5) / 8 for step in (64, 8, 1)]
        means_stds = zip(self.normalise.mean, self.normalise.std, strict=True)
        shifted = [(colour - mean) / std for colour, (mean, std) in zip(colours, means_stds, strict=True)]
        side = self.patch // self.cell
        cells_BMssC = torch.stack(shifted, dim=-1).unflatten(2, (side, side))
        return cells_BMssC.repeat_interleave(self.cell, 2).repeat_interleave(self.cell, 3).flatten(2)


class Pixels:
    """The pixels of a patch."""

    def __init__(self, patch: int, error: str, normalised: bool) -> None:
        self.patch, self.error, self.normalised = patch, error, normalised
        self.width = 3 * patch**2

    def loss(self, prediction_BMP: Tensor, images_BCHW: Tensor, index_BM: Tensor) -> Tensor:
        """The mean error, squared or absolute."""
        target_BMK = picked(patchify(images_BCHW, self.patch), index_BM)
        if self.normalised:
            mean, std = _spread(target_BMK)
            target_BMK = (target_BMK - mean) / std
        if self.error == "l2":
            return F.mse_loss(prediction_BMP, target_BMK)
        # Seed 001's, to the last digit.
        return (prediction_BMP - target_BMK).abs().sum() / (target_BMK.numel() / 3 + 1e-5) / 3

    def drawn(self, prediction_BMP: Tensor, images_BCHW: Tensor, index_BM: Tensor) -> Tensor:
        """Patches as they are predicted, BMK; normalised ones with the mean and the variance that they should have."""
        if not self.normalised:
            return prediction_BMP
        mean, std = _spread(picked(patchify(images_BCHW, self.patch), index_BM))
        return prediction_BMP * std + mean


def _spread(patches_BMK: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each patch, as MAE's code has them: unbiased, and no patch is without any."""
    return patches_BMK.mean(dim=-1, keepdim=True), (patches_BMK.var(dim=-1, keepdim=True) + 1e-6).sqrt()


class Codes:
    """The code of a patch."""

    def __init__(self, tokenizer: VisualTokenizer) -> None:
        # Held by what is no module: the task does not own it, so that it is neither trained nor saved with it.
        self.tokenizer = tokenizer.eval().requires_grad_(False)
        self.width = tokenizer.codes

    def loss(self, prediction_BMP: Tensor, images_BCHW: Tensor, index_BM: Tensor) -> Tensor:
        """The mean cross-entropy of the predicted patches' codes."""
        target_BM = self.tokenizer.encode(images_BCHW).gather(1, index_BM)
        return F.cross_entropy(prediction_BMP.flatten(0, 1), target_BM.flatten())

    def drawn(self, prediction_BMP: Tensor, images_BCHW: Tensor, index_BM: Tensor) -> Tensor:
        """Patches of the likeliest codes among the true codes of the others, BMK."""
        codes_BN = self.tokenizer.encode(images_BCHW).scatter(1, index_BM, prediction_BMP.argmax(dim=-1))
        return picked(patchify(self.tokenizer.decode(codes_BN), self.tokenizer.patch), index_BM)


def build_targets(run: Run, tokenizer: VisualTokenizer | None) -> Colours | Pixels | Codes:
    """What a run's objective predicts; of objective beit by the tokenizer that it names."""
    task, patch = run.task, run.model.shape.patch
    assert isinstance(task, Masked)
    match task.objective:
        case MeanColour():
            return Colours(patch, 1, run.data.normalise)
        case SmallPatch():
            return Colours(patch, 4, run.data.normalise)
        case PixelsL2():
            return Pixels(patch, "l2", False)
        case PixelsL1():
            return Pixels(patch, "l1", False)
        case Mae(normalised=normalised):
            return Pixels(patch, "l2", normalised)
        case Beit():
            assert tokenizer is not None, "objective beit is built with the tokenizer that it names"
            check_tokenizer(run, tokenizer.run, task.objective.tokenizer)
            return Codes(tokenizer)
        case _:
            assert_never(task.objective)


def check_tokenizer(run: Run, made: Run, url: str) -> None:
    """Refuse a tokenizer, made by another run, that cuts images into other patches or normalises them otherwise."""
    (rows, columns), patch = run.model.grid, run.model.shape.patch
    (own_rows, own_columns), own_patch = made.model.grid, made.model.shape.patch
    if (rows, columns, patch) != (own_rows, own_columns, own_patch):
        raise ConfigError(
            f"task.objective.tokenizer: got {url}, which has codes for {own_rows} x {own_columns} patches of"
            f" {own_patch} pixels, wanted {rows} x {columns} of {patch}, as {run.model.name} at {run.model.image_size}"
        )
    if made.data.normalise != run.data.normalise:
        raise ConfigError(
            f"data.normalise: got mean {list(run.data.normalise.mean)}, std {list(run.data.normalise.std)}, wanted"
            f" those of the tokenizer {url}, {list(made.data.normalise.mean)} and {list(made.data.normalise.std)}"
        )
