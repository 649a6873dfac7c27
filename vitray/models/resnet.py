"""The ResNet of a hybrid (BiT): group norms, standardized convolutions, padding as in TensorFlow.

Shapes: B images, C channels, H x W pixels or cells of a feature map, O output and I input channels of a kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config.stems import ROOT, ROOT_STRIDE, resnet_layers, stage_width
from vitray.models.products import Products

GROUPS = 32
# How a kernel is divided by its deviation s, and the epsilon of the group norms.
EPSILONS = {
    "vit": (1e-5, 1e-6),  # s + eps: the code of the ViT paper
    "bit": (1e-10, 1e-5),  # sqrt(s^2 + eps): big_vision
    "timm": (1e-8, 1e-5),  # sqrt(s^2 + eps)
}


def standardize(weight_OIHW: Tensor, kind: str) -> Tensor:
    """Return a kernel whose outputs each have weights of mean 0 and deviation 1, but for the epsilon of a code."""
    eps, _ = EPSILONS[kind]
    variance, mean = torch.var_mean(weight_OIHW, dim=(1, 2, 3), correction=0, keepdim=True)
    scale = 1 / (variance.sqrt() + eps) if kind == "vit" else (variance + eps).rsqrt()
    return (weight_OIHW - mean) * scale


class StandardizedConv(nn.Conv2d):
    """A convolution of standardized weights, padded so that stride 2 halves an even side."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, kind: str) -> None:
        super().__init__(before, after, kernel, stride, bias=False)
        self.kind, missing = kind, kernel - stride
        self.pad = (max(missing, 0) // 2, max(missing, 0) - max(missing, 0) // 2)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        padded = F.pad(input, (*self.pad, *self.pad)) if any(self.pad) else input
        return F.conv2d(padded, standardize(self.weight, self.kind), stride=self.stride)


class Bottleneck(nn.Module):
    """One unit of a stage: three convolutions, added to the input or to its projection."""

    def __init__(self, before: int, after: int, stride: int, kind: str) -> None:
        super().__init__()
        inner, eps = after // 4, EPSILONS[kind][1]
        self.conv1 = StandardizedConv(before, inner, 1, 1, kind)
        self.norm1 = nn.GroupNorm(GROUPS, inner, eps)
        self.conv2 = StandardizedConv(inner, inner, 3, stride, kind)
        self.norm2 = nn.GroupNorm(GROUPS, inner, eps)
        self.conv3 = StandardizedConv(inner, after, 1, 1, kind)
        self.norm3 = nn.GroupNorm(GROUPS, after, eps)
        nn.init.zeros_(self.norm3.weight)  # a new unit is the identity, as in the code of the ViT paper
        self.down = self.down_norm = None
        if stride > 1 or before != after:
            self.down = StandardizedConv(before, after, 1, stride, kind)
            self.down_norm = nn.GroupNorm(GROUPS, after, eps)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        h_BCHW = F.relu(self.norm1(self.conv1(x_BCHW)))
        h_BCHW = F.relu(self.norm2(self.conv2(h_BCHW)))
        h_BCHW = self.norm3(self.conv3(h_BCHW))
        if self.down is not None and self.down_norm is not None:
            x_BCHW = self.down_norm(self.down(x_BCHW))
        return F.relu(h_BCHW + x_BCHW)

    def count(self, products: Products, cells: int) -> int:
        """Count the products for a feature map of so many cells, and return the number after the unit."""
        after = cells // self.conv2.stride[0] ** 2

        def count_convolutions() -> None:
            for conv, norm, size in (
                (self.conv1, self.norm1, cells),
                (self.conv2, self.norm2, after),
                (self.conv3, self.norm3, after),
            ):
                products.layer(conv, size)
                products.train(norm)

        def count_projection() -> None:
            if self.down is not None:
                products.layer(self.down, after)
                products.train(self.down_norm)

        products.branches(count_convolutions, count_projection)
        return after


class ResNet(nn.Module):
    """The root and the stages of a ResNet: images in, a feature map out."""

    def __init__(self, units: tuple[int, ...], patch: int, kind: str) -> None:
        super().__init__()
        self.root = StandardizedConv(3, ROOT, 7, 2, kind)
        self.root_norm = nn.GroupNorm(GROUPS, ROOT, EPSILONS[kind][1])
        self.stages = nn.ModuleList()
        before = ROOT
        for number, depth in enumerate(resnet_layers(units, patch)):
            after = stage_width(number)
            strides = [1 if number == 0 else 2] + [1] * (depth - 1)
            widths = [before] + [after] * (depth - 1)
            pairs = zip(widths, strides, strict=True)
            self.stages.append(nn.Sequential(*(Bottleneck(width, after, stride, kind) for width, stride in pairs)))
            before = after

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return the feature map of the last stage; without stages, that of the root."""
        x_BCHW = F.relu(self.root_norm(self.root(images_BCHW)))
        x_BCHW = F.max_pool2d(F.pad(x_BCHW, (0, 1, 0, 1), value=-torch.inf), 3, 2)
        for stage in self.stages:
            x_BCHW = stage(x_BCHW)
        return x_BCHW

    def describe(self) -> str:
        """Return it as a line of a network's diagram."""
        stages = ", ".join(str(len(list(stage.children()))) for stage in self.stages)
        return f"ResNet of {stages} units" if stages else "root of a ResNet"

    def count(self, products: Products, pixels: int) -> int:
        """Count the products for an image, and return the cells of the feature map."""
        products.layer(self.root, pixels // 4)
        products.train(self.root_norm)
        cells = pixels // ROOT_STRIDE**2
        for unit in self.modules():
            if isinstance(unit, Bottleneck):
                cells = unit.count(products, cells)
        return cells
