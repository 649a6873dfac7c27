"""Networks of torchvision, for the same commands as ours; tensors keep torchvision's names, after the prefix `body.`.

AxialResNet-50, which is built like a ResNet of torchvision, is used in the same way, and so is a network of own code.

Functions import torchvision where they use it: it brings torch.compile along, a second of CPU for each process, and
most networks are ours.

Shapes: B images, C colors, H x W pixels, D features, K classes.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from vitray.config import Model
from vitray.config.classification import Part
from vitray.config.model_names import TORCHVISION, axial_resnet
from vitray.models.axial_resnet import AxialResNet
from vitray.models.own_networks import build_own, check_head, checked_output
from vitray.models.products import Products
from vitray.models.sizes import Sizes

NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm, nn.LayerNorm)
# The stages of some families, by the beginning of a parameter's name. ConvNeXt and Swin shrink the image between them.
_STAGES = re.compile(
    r"(?:layer|stage|features\.denseblock|trunk_output\.block)(?P<from_1>[1-4])\.|blocks\.(?P<from_0>[0-3])\."
)
_HALVES = re.compile(r"features\.([1-7])\.")


class OtherNetwork(nn.Module):
    """A classification network of torchvision without auxiliary heads, an AxialResNet or own code, by its settings."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.body = _build(model)
        self._head = _head_of(self.body)
        head: Any = self.body.get_submodule(self._head)
        if model.is_own:
            check_head(model, self._head, head)
        self.width = head.in_features if isinstance(head, nn.Linear) else head.in_channels
        if model.num_classes is None:
            self.body.set_submodule(self._head, nn.Identity())

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits, or pooled features without a head."""
        return self.body(images_BCHW)

    def features_and_logits(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the head, BD, and the logits, BK; a network without a head returns the features twice."""
        if self.model.num_classes is None:
            return (features_BD := self(images_BCHW)), features_BD
        inputs: list[Tensor] = []
        hook = self.body.get_submodule(self._head).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        try:
            logits_BK = self(images_BCHW)
        finally:
            hook.remove()
        (features,) = inputs  # SqueezeNet classifies each position
        return (features.mean(dim=(2, 3)) if features.ndim == 4 else features), logits_BK

    @property
    def head(self) -> nn.Module:
        """The last layer; the identity for a model without classes."""
        return self.body.get_submodule(self._head)

    @property
    def head_name(self) -> str:
        """The beginning of the names of the head's tensors."""
        return f"body.{self._head}."

    def parts(self) -> dict[str, Part]:
        """Return the part of each parameter, by parameter name."""
        return {name: self._part_of(name) for name, _ in self.named_parameters()}

    def _part_of(self, name: str) -> Part:
        if name.startswith(self.head_name):
            return "head"
        if isinstance(self.get_submodule(name.rpartition(".")[0]), NORMS):
            return "norms"
        number = self.stage_number(name.removeprefix("body."))
        return "body" if number is None else _stage(number)

    def stage_number(self, place: str, whole: bool = False) -> int | None:
        """Return the number of the stage in which a tensor or module of the body lies; None outside the stages.

        With `whole`, also None for everything inside a stage's top-level modules.
        """
        if self.model.is_own:
            return None
        is_halved = self.model.name.removeprefix(TORCHVISION).startswith(("convnext", "swin"))
        match = (_HALVES if is_halved else _STAGES).match(place)
        if match is None or (whole and match.end() < len(place)):
            return None
        if is_halved:
            return int(match[1]) // 2 + 1
        return int(match["from_1"] or int(match["from_0"]) + 1)

    @cached_property
    def stages(self) -> dict[str, list[str]]:
        """The modules of each stage in the body, in the order of their use; empty for a network without stages."""
        stages: dict[str, list[str]] = {}
        for name, _ in self.body.named_modules():
            if number := self.stage_number(f"{name}.", whole=True):
                stages.setdefault(_stage(number), []).append(name)
        return stages

    @contextmanager
    def watching_stages(self) -> Iterator[list[Tensor]]:
        """Collect the first stage's input and every stage's output (BCHW) in the forward pass of the `with` block."""
        states: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            states.append(output)

        modules = [self.body.get_submodule(name) for name in (names[-1] for names in self.stages.values())]
        hooks: list[Any] = [module.register_forward_hook(keep) for module in modules]
        if self.stages:
            first = self.body.get_submodule(next(iter(self.stages.values()))[0])
            hooks.append(first.register_forward_pre_hook(lambda _, args: states.append(args[0])))
        try:
            yield states
            if self.model.name.startswith(f"{TORCHVISION}swin"):  # BHWC
                states[:] = [state.movedim(-1, 1) for state in states]
        finally:
            for hook in hooks:
                hook.remove()

    def window_biases(self) -> dict[str, Tensor]:
        """Return what each attention of a Swin or MaxViT adds to its logits, by name.

        The axes are the heads, then row and column of the query, then those of the key.
        """
        from torchvision.models.maxvit import RelativePositionalMultiHeadAttention
        from torchvision.models.swin_transformer import ShiftedWindowAttention

        biases = {}
        for name, module in self.body.named_modules():
            match module:
                case ShiftedWindowAttention():
                    bias_HNN, window = module.get_relative_position_bias()[0], tuple(module.window_size)
                case RelativePositionalMultiHeadAttention():
                    bias_HNN = module.get_relative_positional_bias()[0]
                    window = (math.isqrt(bias_HNN.shape[1]),) * 2
                case _:
                    continue
            biases[name] = bias_HNN.reshape(len(bias_HNN), *window, *window)
        return biases

    def count(self, products: Products) -> None:
        """Count the products for an image, in both passes of a copy on the meta device; own code may need a CPU."""
        from torch.utils.flop_counter import FlopCounterMode

        with torch.device("cpu" if self.model.is_own else "meta"):
            network, images_1CHW = OtherNetwork(self.model).eval(), torch.zeros(1, 3, *self.model.image_shape)
        for copied, parameter in zip(network.parameters(), self.parameters(), strict=True):
            copied.requires_grad_(parameter.requires_grad)
        counter = FlopCounterMode(display=False, custom_mapping={CONVOLUTION_BACKWARD: _convolution_backward})
        with counter:
            logits_1K = checked_output(self.model, network, images_1CHW) if self.model.is_own else network(images_1CHW)
            forward = counter.get_total_flops() // 2
            if logits_1K.requires_grad:
                logits_1K.sum().backward()
        products.forward += forward
        products.backward += counter.get_total_flops() // 2 - forward

    def train(self, mode: bool = True) -> Self:
        """Switch the mode, except that frozen batch norms stay in evaluation mode and keep their statistics."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, NORMS) and not any(each.requires_grad for each in module.parameters()):
                module.eval()
        return self


CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward


def _convolution_backward(grad_shape: Any, _image_shape: Any, weight_shape: Any, *rest: Any, out_shape: Any) -> int:  # noqa: ARG001
    """The operations of a convolution's backward pass: for each gradient as many as forward.

    torch's own formula counts the gradient of a grouped kernel as if it were dense.
    """
    gradients = rest[-1]  # of the input, the weight and the bias
    forward = 2 * grad_shape[0] * math.prod(grad_shape[2:]) * math.prod(weight_shape)
    return forward * (gradients[0] + gradients[1])


def _stage(number: int) -> Part:
    stages: tuple[Part, ...] = ("stage1", "stage2", "stage3", "stage4")
    return stages[number - 1]


def _build(model: Model) -> nn.Module:
    from torchvision.models import get_model

    if axial_resnet(model.name):
        return AxialResNet(model.name, model.image_shape, model.num_classes or 1)
    if model.is_own:
        with torch.device("cpu"):  # where it may load weights
            body = build_own(model.name, model.num_classes or 1)
        return body.to(torch.get_default_device())
    network, settings = model.name.removeprefix(TORCHVISION), constructor_settings(model)
    # A RegNet computes its widths with tensors, which have no values on the meta device.
    with torch.device("cpu") if network.startswith("regnet") else nullcontext():
        body = get_model(network, weights=None, num_classes=model.num_classes or 1, **settings)
    return body.to(torch.get_default_device())


def constructor_settings(model: Model) -> dict[str, Any]:
    """Return what the constructors of some networks need beside the number of classes."""
    network = model.name.removeprefix(TORCHVISION)
    if network in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": True}
    if network.startswith("vit_"):
        return {"image_size": model.image_shape[0]}
    return {"input_size": model.image_shape} if network.startswith("maxvit") else {}


def _head_of(body: nn.Module) -> str:
    """The name of the last layer with weights; torchvision registers layers in the order of their use."""
    names = [name for name, module in body.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return names[-1] if names else ""


def stage_widths(model: Model) -> dict[str, int]:
    """Return the channels of each stage of a network of torchvision; empty for a network without stages."""
    with torch.device("meta"):
        network = OtherNetwork(model).eval()
        if not network.stages:
            return {}
        with torch.no_grad(), network.watching_stages() as states:
            network(torch.empty(1, 3, *model.image_shape))
    return {name: state.shape[1] for name, state in zip(network.stages, states[1:], strict=True)}


def other_sizes(model: Model) -> Sizes:
    """Return the sizes of a network of torchvision: multiply-adds of its products, as torchvision prints them."""
    with torch.device("meta"):
        network = OtherNetwork(model).requires_grad_(False)
    parts: dict[Part, int] = {}
    owners = network.parts()
    for name, parameter in network.named_parameters():
        parts[owners[name]] = parts.get(owners[name], 0) + parameter.numel()
    products = Products()
    network.count(products)
    return Sizes(parts, products.gflops)
