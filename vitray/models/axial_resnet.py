"""AxialResNet-50 (Wang et al., 2020; ViT paper, D.6): a ResNet-50 with axial attention in place of 3 x 3 convolutions.

Attention runs along the columns of a feature map, then along its rows. It is position-sensitive: queries, keys and
values each have a learned vector for every offset within a line, which the heads share.

Shapes: B images, C channels, H x W cells, X lines of L cells, G heads, d channels of a head's values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config.model_names import AXIAL_RESNETS
from vitray.models.branches import Axis, join_lines, split_lines
from vitray.models.positions import Grid, VisiblePatches, num_offsets, offset_index

HEADS, LAYERS, ROOT, EXPANSION = 8, (3, 4, 6, 3), 64, 2


class PositionalAttention(nn.Module):
    """Attention along one axis of a feature map. Batch norms follow the products, the three logits and the two sums."""

    def __init__(self, channels: int, axis: Axis, length: int) -> None:
        super().__init__()
        self.axis: Axis = axis
        d = channels // HEADS
        self.sizes = [d // 2, d // 2, d]
        """Channels of a head's queries, keys and values."""
        self.qkv = nn.Conv2d(channels, 2 * channels, 1, bias=False)
        nn.init.normal_(self.qkv.weight, std=channels**-0.5)
        self.qkv_norm = nn.BatchNorm2d(2 * channels)
        self.logit_norm = nn.BatchNorm2d(3 * HEADS)
        self.out_norm = nn.BatchNorm2d(2 * channels)
        self.relative = nn.Parameter(nn.init.normal_(torch.empty(num_offsets(length), 2 * d), std=d**-0.5))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the map, as large as the input."""
        height, width = grid = (x_BCHW.shape[2], x_BCHW.shape[3])
        heads_BGCN = self.qkv_norm(self.qkv(x_BCHW)).flatten(2).unflatten(1, (HEADS, -1))
        q_XGLc, k_XGLc, v_XGLd = split_lines(heads_BGCN.mT, self.axis, grid).split(self.sizes, dim=-1)
        index_LL = offset_index(VisiblePatches((1, width if self.axis == "rows" else height)), x_BCHW.device)[0, 0]
        q_LLc, k_LLc, v_LLd = self.relative[index_LL].split(self.sizes, dim=-1)
        logits = [
            q_XGLc @ k_XGLc.mT,
            torch.einsum("xgic,ijc->xgij", q_XGLc, q_LLc),
            torch.einsum("xgjc,ijc->xgij", k_XGLc, k_LLc),
        ]
        logits_X3GLL = self.logit_norm(torch.cat(logits, dim=1)).unflatten(1, (3, HEADS))
        weights_XGLL = logits_X3GLL.sum(1).softmax(dim=-1)
        sums = weights_XGLL @ v_XGLd, torch.einsum("xgij,ijd->xgid", weights_XGLL, v_LLd)
        both_BCHW = self.out_norm(torch.cat([_as_map(each, self.axis, grid) for each in sums], dim=1))
        return both_BCHW.unflatten(1, (2, -1)).sum(1)


def _as_map(h_XGLd: Tensor, axis: Axis, grid: Grid) -> Tensor:
    return join_lines(h_XGLd, axis, grid).mT.flatten(1, 2).unflatten(2, grid)


def _conv(before: int, after: int, kernel: int = 1, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class AxialBottleneck(nn.Module):
    """One unit of a stage: to fewer channels, attention along columns and rows, and back. Stride 2 averages cells."""

    def __init__(self, before: int, inner: int, stride: int, grid: Grid) -> None:
        super().__init__()
        after = EXPANSION * inner
        self.conv1 = _conv(before, inner)
        self.bn1 = nn.BatchNorm2d(inner)
        self.columns = PositionalAttention(inner, "columns", grid[0])
        self.rows = PositionalAttention(inner, "rows", grid[1])
        self.pool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.conv2 = _conv(inner, after)
        self.bn2 = nn.BatchNorm2d(after)
        nn.init.zeros_(self.bn2.weight)  # a new unit is the identity
        self.downsample = nn.Sequential()
        if stride > 1 or before != after:
            self.downsample = nn.Sequential(_conv(before, after, 1, stride), nn.BatchNorm2d(after))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        h_BCHW = F.relu(self.bn1(self.conv1(x_BCHW)))
        h_BCHW = F.relu(self.pool(self.rows(self.columns(h_BCHW))))
        return F.relu(self.bn2(self.conv2(h_BCHW)) + self.downsample(x_BCHW))


class AxialResNet(nn.Module):
    """AxialResNet-50 of a size, for images of one shape, whose sides are multiples of 32."""

    def __init__(self, name: str, image_shape: Grid, num_classes: int) -> None:
        super().__init__()
        share = AXIAL_RESNETS[name]
        before, inner = int(ROOT * share), int(2 * ROOT * share)
        self.conv1 = _conv(3, before, 7, 2)
        self.bn1 = nn.BatchNorm2d(before)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages, grid = [], (image_shape[0] // 4, image_shape[1] // 4)
        for number, depth in enumerate(LAYERS):
            stride = 1 if number == 0 else 2
            units = [AxialBottleneck(before, inner, stride, grid)]
            before, grid = EXPANSION * inner, (grid[0] // stride, grid[1] // stride)
            units += [AxialBottleneck(before, inner, 1, grid) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*units))
            inner *= 2
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(before, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return the logits, BK."""
        x_BCHW = self.maxpool(F.relu(self.bn1(self.conv1(images_BCHW))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x_BCHW = stage(x_BCHW)
        return self.fc(x_BCHW.mean(dim=(2, 3)))
