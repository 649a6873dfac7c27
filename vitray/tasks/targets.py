"""Targets of masked prediction: colors, pixels or codes of the predicted patches, with their losses.

Shapes: B images, C colors, H x W pixels, N patches (row by row), M predicted patches, K pixels of a patch (row,
column, color), S cells of a patch, P predicted numbers of a patch.
"""

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from vitray.config import Run
from vitray.config.augmentation import Normalize
from vitray.config.pretraining import Beit, Mae, Masked, MeanColor, PixelsL1, PixelsL2, SmallPatch
from vitray.models.patches import gather_patches, patchify
from vitray.models.tokenizer import VisualTokenizer
from vitray.weights.pretrained import check_tokenizer


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
            check_tokenizer(run, tokenizer.run, task.objective.tokenizer)
            return Codes(tokenizer)
        case _:
            assert_never(task.objective)
