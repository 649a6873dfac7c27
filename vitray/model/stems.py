"""From pixels to tokens: the stems of seed 000, Table 7. B images, N patches (row by row), D width."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitray.model.names import Name


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image, at each position."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class Convolution(NamedTuple):
    """One convolution of a stem."""

    kernel: int
    stride: int
    padding: int
    channels: int


def convolutions(name: Name) -> list[Convolution]:
    """The convolutions of a model's stem, in order."""
    width, patch = name.size, name.patch
    match name.stem.partition("_")[0]:
        case "linear":
            return [Convolution(patch, patch, 0, width)]
        case "hmlp":
            # Seed 000, Algorithm 1: patches of 4 pixels, then doubled, a quarter of the width until the last step. (The
            # paper's text starts at 2 x 2, both of its listings at 4 x 4.)
            doublings = (patch // 4).bit_length() - 1
            sizes, channels = [4] + [2] * doublings, [width // 4] * doublings + [width]
            return [Convolution(size, size, 0, channel) for size, channel in zip(sizes, channels, strict=True)]
        case "conv":  # LeViT
            return [Convolution(3, 2, 1, width // divisor) for divisor in (8, 4, 2, 1)]
        case other:
            raise AssertionError(f"stem {other} is in names.STEMS and not here")


class Stem(nn.Module):
    """A stack of convolutions whose output positions are the tokens; every stem but `conv` sees one patch at a time."""

    def __init__(self, name: Name) -> None:
        super().__init__()
        kind, *extras = name.stem.split("_")
        norm = "ln" if "ln" in extras else "bn" if "bn" in extras or kind == "conv" else None
        layers: list[nn.Module] = []
        before = 3
        for kernel, stride, padding, channels in convolutions(name):
            layers.append(nn.Conv2d(before, channels, kernel, stride, padding))
            if norm:
                layers.append(nn.BatchNorm2d(channels) if norm == "bn" else ChannelNorm(channels, eps=1e-6))
            layers.append(nn.GELU())
            before = channels
        # Between convolutions there is always a GELU; after the last one only where the name says so.
        self.proj = nn.Sequential(*layers) if "gelu" in extras else nn.Sequential(*layers[:-1])
        self.patch = name.patch

    def forward(self, images_BCHW: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The patches' tokens (BND) and their grid."""
        height, width = images_BCHW.shape[-2:]
        if height % self.patch or width % self.patch:
            raise ValueError(f"images of {height} x {width} pixels do not divide into patches of {self.patch}")
        x_BND = self.proj(images_BCHW).flatten(2).transpose(1, 2)
        return x_BND, (height // self.patch, width // self.patch)


def synchronise_norms(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with batch norms that share statistics over all GPU workers; on a CPU, the model as it is.

    SyncBatchNorm refuses CPU tensors as soon as a process group exists, even of one worker, so there each worker
    normalises by its own share of the batch.
    """
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if device.type == "cuda" else model
