"""From pixels to tokens: the stems of seed 000, Table 7. B images, N patches (row by row), D width."""

from typing import Self

import torch
from torch import Tensor, nn

from vitray.config.model_names import Name
from vitray.models.sizes import convolutions, stem_norm


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image, at each position."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class Stem(nn.Module):
    """A stack of convolutions whose output positions are the tokens; every stem but `conv` sees one patch at a time."""

    def __init__(self, name: Name) -> None:
        super().__init__()
        norm = stem_norm(name)
        layers: list[nn.Module] = []
        before = 3
        for kernel, stride, padding, channels in convolutions(name):
            layers.append(nn.Conv2d(before, channels, kernel, stride, padding))
            if norm:
                layers.append(nn.BatchNorm2d(channels) if norm == "bn" else ChannelNorm(channels, eps=1e-6))
            layers.append(nn.GELU())
            before = channels
        # Between convolutions there is always a GELU; after the last one only where the name says so.
        self.proj = nn.Sequential(*layers) if "gelu" in name.stem.split("_") else nn.Sequential(*layers[:-1])
        self.patch = name.patch

    def forward(self, images_BCHW: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The patches' tokens (BND) and their grid."""
        height, width = images_BCHW.shape[-2:]
        if height % self.patch or width % self.patch:
            raise ValueError(f"images of {height} x {width} pixels do not divide into patches of {self.patch}")
        x_BND = self.proj(images_BCHW).flatten(2).transpose(1, 2)
        return x_BND, (height // self.patch, width // self.patch)

    def train(self, mode: bool = True) -> Self:
        """As torch's, but a stem whose weights are frozen stays in evaluation mode.

        Otherwise its batch norms' running statistics, which are weights too, would go on moving. Here and not where it
        is frozen, so that no call of `train` on what contains the stem undoes it.
        """
        return super().train(mode and any(parameter.requires_grad for parameter in self.parameters()))


def synchronise_norms(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with batch norms that share statistics over all GPU workers; on a CPU, the model as it is.

    SyncBatchNorm refuses CPU tensors as soon as a process group exists, even of one worker, so there each worker
    normalises by its own share of the batch.
    """
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if device.type == "cuda" else model
