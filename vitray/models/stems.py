"""Stems, from pixels to tokens: Table 7 of "Three things", and other patch sizes of a linear one (FlexiViT).

Shapes: B images, C colors or channels of a cell, H x W pixels, N patches (row by row), P x P pixels of a patch, D
width; of the local stem, h x w patches, s x s cells of a patch, n = s * s.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitray.config.model_names import Name
from vitray.config.stems import CELL, LOCAL_DEPTH, LOCAL_HEADS, RESNETS, feature_map
from vitray.models.blocks import Block
from vitray.models.branches import BlockSpec
from vitray.models.precision import at_least_float32
from vitray.models.products import Products
from vitray.models.resnet import ResNet


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class Stem(nn.Module):
    """Layers whose output positions are the tokens; only `conv`, `pooled` and ResNets mix neighboring patches."""

    def __init__(
        self, name: Name, resnet_eps: str = "vit", norm_eps: float | None = None, momentum: float = 0.1
    ) -> None:
        super().__init__()
        has_own_layers = name.traits.cost is not None
        layers = LAYERS[name.stem](name, resnet_eps) if has_own_layers else _convolutional(name, norm_eps, momentum)
        self.proj = nn.Sequential(*layers)
        self.patch = self.own_patch = name.patch
        """The patch size; `use_patch` sets another one where the stem is linear."""
        self._matrix: Tensor | None = None

    def forward(self, images_BCHW: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return the tokens (BND) and their grid."""
        height, width = images_BCHW.shape[-2:]
        if height % self.patch or width % self.patch:
            raise ValueError(f"images of {height} x {width} pixels do not divide into patches of {self.patch}")
        if self._matrix is None:
            x_BDHW = self.proj(images_BCHW)
        else:
            first: Any = self.proj[0]
            # `to` changes nothing unless the network was moved after `use_patch`.
            kernel = apply_matrix(self._matrix.to(first.weight), first.weight, self.patch)
            x_BDHW = self.proj[1:](F.conv2d(images_BCHW, kernel, first.bias, self.patch))
        x_BND = x_BDHW.flatten(2).transpose(1, 2)
        return x_BND, (height // self.patch, width // self.patch)

    def count(self, products: Products, pixels: int) -> None:
        """Count the products for an image."""
        _count_layers(self.proj, products, pixels)

    def use_patch(self, patch: int) -> None:
        """Set the patch size: a linear stem resizes its kernel in each forward pass.

        The matrix that resizes it is computed here, because a compiled forward pass would compute it in every step.
        """
        first: Any = self.proj[0]
        self.patch, self._matrix = patch, None
        if patch != self.own_patch:
            self._matrix = kernel_matrix(self.own_patch, patch, first.weight.dtype, first.weight.device)

    def train(self, mode: bool = True) -> Self:
        """Switch the mode, except that a frozen stem stays in evaluation mode.

        Training mode would update the running statistics of its batch norms. The rule is here because `train` on a
        parent module would undo it anywhere else.
        """
        return super().train(mode and any(parameter.requires_grad for parameter in self.parameters()))


def _convolutional(name: Name, norm_eps: float | None, momentum: float) -> list[nn.Module]:
    traits, layers, before = name.traits, list[nn.Module](), 3
    for kernel, stride, padding, channels, pool in name.convolutions:
        layers.append(nn.Conv2d(before, channels, kernel, stride, padding))
        match traits.norm:
            case "bn":
                layers.append(nn.BatchNorm2d(channels, norm_eps or 1e-5, momentum))
            case "ln":
                layers.append(ChannelNorm(channels, eps=norm_eps or 1e-6))
        if pool > 1:
            layers.append(nn.MaxPool2d(pool))
        layers.append(nn.GELU())
        before = channels
    return layers if traits.ends_in_gelu else layers[:-1]


def _hybrid(name: Name, resnet_eps: str) -> list[nn.Module]:
    units = RESNETS[name.stem].units
    assert units is not None
    channels, cell = feature_map(units, name.patch)
    cells = name.patch // cell
    return [ResNet(units, name.patch, resnet_eps), nn.Conv2d(channels, name.size, cells, cells)]


class LocalTransformer(nn.Module):
    """Attention among the cells of a patch, merged as in the hMLP stem and added to a linear projection of the patch.

    The inner transformer of TNT, before the first block only. Of its design "Three things" prints the cost alone: 19.12
    GFLOPs for ViT-B (Table 7). Width, depth and merging are chosen here to meet it.
    """

    rows_are_patches = True
    """Its layers see a row for each patch, not for each image."""

    def __init__(self, name: Name) -> None:
        super().__init__()
        cells, *merges = name.convolutions
        self.cells_per_side = name.patch // CELL
        self.linear = nn.Conv2d(3, name.size, name.patch, name.patch)
        self.cells = nn.Conv2d(3, cells.channels, cells.kernel, cells.stride)
        self.positions = nn.Parameter(torch.empty(self.cells_per_side**2, cells.channels))
        nn.init.trunc_normal_(self.positions, std=0.02)
        spec = BlockSpec(cells.channels, LOCAL_HEADS)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(LOCAL_DEPTH))
        self.norm = nn.LayerNorm(cells.channels, eps=1e-6)
        layers: list[nn.Module] = []
        for merge in merges:
            layers += [nn.Conv2d(cells.channels, merge.channels, merge.kernel, merge.stride), nn.GELU()]
        self.merge = nn.Sequential(*layers[:-1])

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return the tokens as an image, BDhw."""
        side = self.cells_per_side
        patches_BDhw = self.linear(images_BCHW)
        cells_BChsws = self.cells(images_BCHW).unflatten(3, (-1, side)).unflatten(2, (-1, side))
        # Each patch is a sequence of its own.
        x_BnC = cells_BChsws.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(0, 2) + self.positions
        for block in self.blocks:
            x_BnC = block(x_BnC)
        merged_BD11 = self.merge(self.norm(x_BnC).mT.unflatten(2, (side, side)))
        grid = patches_BDhw.shape[-2:]
        return patches_BDhw + merged_BD11.flatten(1).unflatten(0, (-1, grid.numel())).mT.unflatten(2, grid)

    def describe(self) -> str:
        """Return it as a line of a network's diagram."""
        return f"linear + {len(self.blocks)} levels on {len(self.positions)} cells of {self.norm.weight.numel()}"

    def count(self, products: Products, pixels: int) -> int:
        """Count the products for an image, and return the number of its patches."""
        cells = pixels // CELL**2
        patches = cells // self.cells_per_side**2

        def count_cells() -> None:
            products.layer(self.cells, cells)
            products.train(self.positions)
            for block in self.blocks:
                block.count(products, cells, cells // patches)  # pyright: ignore[reportCallIssue]
            products.train(self.norm)
            _count_layers(self.merge, products, cells)

        products.branches(partial(products.layer, self.linear, patches), count_cells)
        return patches


def _count_layers(layers: Iterable[nn.Module], products: Products, positions: int) -> int:
    """Count layers over the pixels or cells of an image, one after another, and return the positions after them."""
    for layer in layers:
        match layer:
            case nn.Conv2d():
                positions //= layer.stride[0] * layer.stride[1]
                products.layer(layer, positions)
            case nn.MaxPool2d(kernel_size=int(side)):
                positions //= side**2
            case nn.BatchNorm2d() | nn.LayerNorm() | nn.GELU():
                products.train(layer)
            case _:
                positions = layer.count(products, positions)  # pyright: ignore[reportCallIssue]
    return positions


# Layers of stems whose row in `vitray/config/stems.py` states a cost; they take the name and model.resnet_eps. Those
# that are no layer of torch have a method `describe`, for the diagram of a network.
LAYERS: dict[str, Callable[[Name, str], list[nn.Module]]] = {
    "local": lambda name, _: [LocalTransformer(name)],
    **dict.fromkeys(RESNETS, _hybrid),
}


# ---- other patch sizes -----------------------------------------------------------------------------------------------


def use_patch(network: nn.Module, patch: int | None) -> None:
    """Set the patch size of the stems of a network; None restores their own."""
    for stem in network.modules():
        if isinstance(stem, Stem):
            stem.use_patch(patch or stem.own_patch)


def resize_matrix(old: int, new: int) -> Tensor:
    """Return the matrix B (new^2 x old^2, float64) that resizes a patch x from side old to new bilinearly: B x."""
    basis = torch.eye(old**2, dtype=torch.float64).view(-1, 1, old, old)
    return F.interpolate(basis, size=(new, new), mode="bilinear").flatten(1).T


@lru_cache(maxsize=64)  # training steps reuse it
def kernel_matrix(old: int, new: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the pseudo-inverse of B^T (new^2 x old^2), which resizes a kernel to fit patches resized by B.

    The new kernel w' minimizes the mean squared error between <B x, w'> and <x, w> over patches x of independent
    pixels. For a larger patch the error is 0, because B^T w' = w.
    """
    with torch.inference_mode(False):  # a tensor of inference mode could not be used in a training step
        return torch.linalg.pinv(resize_matrix(old, new).T).to(device, dtype)


def resize_kernel(weight_DCPP: Tensor, patch: int) -> Tensor:
    """Return a kernel for patches of another size; the kernel itself for its own."""
    old = weight_DCPP.shape[-1]
    if old == patch:
        return weight_DCPP
    return apply_matrix(kernel_matrix(old, patch, weight_DCPP.dtype, weight_DCPP.device), weight_DCPP, patch)


def apply_matrix(matrix: Tensor, weight_DCPP: Tensor, patch: int) -> Tensor:
    """Return a kernel resized by a matrix of `kernel_matrix`."""
    return (weight_DCPP.flatten(2) @ matrix.T).unflatten(2, (patch, patch))


# ---- batch norms over the images of all workers ----------------------------------------------------------------------


class SumOverWorkers(torch.autograd.Function):
    """The sum of a tensor over all workers, whose gradient is the sum of the workers' gradients.

    torch's own function with a gradient is deprecated, and the function that it names instead is private.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # noqa: ARG004 (torch's own signature)
        dist.all_reduce(total := values.clone())
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:  # noqa: ARG004
        dist.all_reduce(total := grad_outputs[0].clone())
        return total


def sum_over_workers(values: Tensor) -> Tensor:
    """Return the sum of a tensor over all workers, with a gradient."""
    return SumOverWorkers.apply(values) if dist.is_initialized() else values  # pyright: ignore[reportReturnType]


class GlooBatchNorm(nn.BatchNorm2d):
    """Batch norm over the images of all CPU workers, at least in float32; torch's SyncBatchNorm rejects CPU tensors."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        if not self.training:
            return super().forward(input)
        over, x_BCHW = (0, 2, 3), at_least_float32(input)
        count = x_BCHW.new_tensor([x_BCHW.numel() / self.num_features])
        sums: Tensor = SumOverWorkers.apply(torch.cat([x_BCHW.sum(over), count]))  # pyright: ignore[reportAssignmentType]
        total, mean = sums[-1], sums[:-1] / sums[-1]
        centered = x_BCHW - mean[:, None, None]
        variance: Tensor = SumOverWorkers.apply(centered.square().sum(over)) / total  # pyright: ignore[reportOptionalOperand]
        self._track(mean, variance * total / (total - 1))
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centered * scale[:, None, None] + self.bias[:, None, None]).to(input.dtype)

    @torch.no_grad()  # otherwise the statistics would keep the graph of every step
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        momentum: Any = self.momentum
        for running, latest in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(latest, momentum)
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1


def synchronize_norms(model: nn.Module, device: torch.device) -> None:
    """Replace the batch norms by ones over the images of all workers, with the same parameters and statistics."""
    if device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if type(norm) is nn.BatchNorm2d:
                new = GlooBatchNorm(norm.num_features, norm.eps, norm.momentum)
                for tensor in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
                    setattr(new, tensor, getattr(norm, tensor))
                setattr(parent, name, new.train(norm.training))
