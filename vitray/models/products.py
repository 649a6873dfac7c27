"""The matrix products of an image's training step, counted along the forward pass of a network.

Each module with products has a method `count` beside its `forward`. It names them in the order of the forward pass,
because a product's backward pass depends on what is trained before it. A test compares every task with torch's
FlopCounterMode.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Products:
    """The multiply-adds of one image: of its forward pass, and of a backward pass that leaves frozen weights out.

    Attention's backward pass counts its four products. A fused kernel computes a fifth, the logits once more, which
    MFU leaves out as it leaves out every recomputation. Products of weights alone, once a pass and not once an image,
    are left out too.
    """

    def __init__(self) -> None:
        self.forward = self.backward = 0.0
        self.share = 1.0
        """Of the images, for which what follows is computed."""
        self.has_gradient = False
        """Whether the backward pass reaches this point: something before it is trained."""

    @property
    def gflops(self) -> float:
        """Billions of multiply-adds of both passes."""
        return (self.forward + self.backward) / 1e9

    def weight(self, weight: Tensor, positions: float) -> None:
        """Count a product of a weight with the activations at some positions."""
        work = positions * weight.numel() * self.share
        self.forward += work
        self.backward += work * (weight.requires_grad + self.has_gradient)
        self.train(weight)

    def layer(self, layer: nn.Module, positions: float) -> None:
        """Count a linear layer or a convolution with some output positions."""
        self.weight(layer.get_parameter("weight"), positions)
        self.train(layer)

    def pair(self, work: int) -> None:
        """Count multiply-adds of two activations, each of which has a gradient if this point has one."""
        self.forward += work * self.share
        self.backward += 2 * work * self.share * self.has_gradient

    def train(self, *parts: nn.Module | Tensor | None) -> None:
        """Note the parameters of parts without products."""
        for part in parts:
            tensors = part.parameters() if isinstance(part, nn.Module) else [part]
            self.has_gradient |= any(tensor is not None and tensor.requires_grad for tensor in tensors)

    def branches(self, *branches: Callable[[], Any]) -> None:
        """Count branches that read the same input and whose outputs are added, to the input or to each other."""
        before = after = self.has_gradient
        for branch in branches:
            self.has_gradient = before
            branch()
            after |= self.has_gradient
        self.has_gradient = after

    def repeat(self, times: int, count: "Callable[[Products], None]") -> None:
        """Count what is computed several times for each image, as for its views."""
        products = Products()
        products.share, products.has_gradient = self.share, self.has_gradient
        count(products)
        self.forward += times * products.forward
        self.backward += times * products.backward
        self.has_gradient = products.has_gradient

    def frozen(self, count: "Callable[[Products], None]") -> None:
        """Count the forward pass of a network beside the task, which computes targets without gradients."""
        products = Products()
        count(products)
        self.forward += products.forward
