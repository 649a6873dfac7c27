"""How the weights descend: parameter groups, optimizers, clipping, the average of the weights."""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* is the arithmetic of torch's own optimizers on many tensors at once; no public module exports it.

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from vitray.config.training import AdamW, Ema, Optim, Sgd
from vitray.config.training import Lamb as LambSettings
from vitray.errors import ConfigError

# ---- parameter groups ------------------------------------------------------------------------------------------------

# Modules whose `weight` is a matrix or a kernel: what decays. Anything else is a norm, a bias, a scale, a token or a
# position; a module of a kind unknown here does not decay.
DECAYING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def parameter_groups(module: nn.Module, optim: Optim) -> list[dict[str, Any]]:
    """Every trainable parameter of a task, once, with those that share `weight_decay` and `lr_scale`.

    Level i of L learns at layer_decay ** (L + 1 - i): 0 for the stem, tokens and positions, 1 for the first block (18x2
    has 18), L + 1 for the last norm, the head, and what the task holds beside its `vit`.
    """
    vit = module.get_submodule("vit")
    levels, top = _levels(vit), len(list(vit.get_submodule("blocks").children())) + 1
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    seen: set[nn.Parameter] = set()
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            lr_scale = optim.layer_decay ** (top - levels.get(parameter, top))
            weight_decay = optim.weight_decay if isinstance(owner, DECAYING) and name == "weight" else 0.0
            groups.setdefault((lr_scale, weight_decay), []).append(parameter)
    return [
        {"params": parameters, "lr_scale": lr_scale, "weight_decay": weight_decay}
        for (lr_scale, weight_decay), parameters in groups.items()
    ]


def _levels(vit: nn.Module) -> dict[nn.Parameter, int]:
    """The level of each parameter that is below the last norm."""
    levels = dict.fromkeys(vit.parameters(recurse=False), 0)
    for part in ("stem", "positions"):
        levels |= dict.fromkeys(vit.get_submodule(part).parameters(), 0)
    for level, block in enumerate(vit.get_submodule("blocks").children(), start=1):
        levels |= dict.fromkeys(block.parameters(), level)
    return levels


# ---- optimizers ------------------------------------------------------------------------------------------------------


def build_optimizer(module: nn.Module, optim: Optim, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of a task's trainable parameters, at the highest learning rate."""
    groups = parameter_groups(module, optim)
    # One kernel a group instead of a dozen. On a CPU core AdamW's step took 14 ms fused, 90 foreach and 56 tensor by
    # tensor, SGD's 12, 35 and 23 (vit_s12x1_16, torch 2.15). Other devices: torch's own choice.
    fused = True if device.type in ("cpu", "cuda") else None
    match optim.rule:
        case AdamW(betas=betas, eps=eps):
            optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=eps, fused=fused)
        case Sgd(momentum=momentum, nesterov=nesterov):
            if nesterov and not momentum:
                raise ConfigError("optim.rule.nesterov: got true, wanted false where optim.rule.momentum is 0")
            # torch's decay is coupled: a part of the gradient, so that it passes through the momentum.
            optimizer = torch.optim.SGD(groups, lr=optim.lr, momentum=momentum, nesterov=nesterov, fused=fused)
        case LambSettings(betas=betas, eps=eps):
            optimizer = Lamb(groups, lr=optim.lr, betas=betas, eps=eps)
        case _:
            assert_never(optim.rule)
    set_learning_rate(optimizer, optim.lr)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each group its share of the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def clip_gradients(parameters: Iterable[nn.Parameter], longest: float | None) -> Tensor:
    """The norm of all gradients together, before they are shortened to `longest`; the host does not wait for it."""
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if longest is not None:
        nn.utils.clip_grads_with_norm_(parameters, longest, norm)
    return norm


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam's direction, scaled in each tensor to a share lr of the length of the weights.

    u = m' / (sqrt(v') + eps) + decay * w, with m' and v' bias-corrected;  w -= lr * |w| / |u| * u. The ratio is 1 where
    either length is 0, and in groups that do not decay. Gradients are clipped before, by `clip_gradients`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move every parameter that has a gradient."""
        assert closure is None, "the loss is computed before the step"
        for group in self.param_groups:
            group["step"] += 1
            moving = {parameter: parameter.grad for parameter in group["params"] if parameter.grad is not None}
            if moving:
                self._move(list(moving), list(moving.values()), group)

    def _move(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        (beta1, beta2), step, weight_decay = group["betas"], group["step"], group["weight_decay"]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {"m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)}
        m, v = ([self.state[parameter][moment] for parameter in parameters] for moment in ("m", "v"))
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, value=1 - beta2)

        updates = torch._foreach_sqrt(v)
        torch._foreach_div_(updates, math.sqrt(1 - beta2**step))
        torch._foreach_add_(updates, group["eps"])
        # The denominator becomes the update in place: on a large model each copy of the weights counts.
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, m)
        torch._foreach_div_(updates, 1 - beta1**step)
        if weight_decay == 0:
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])
            return
        torch._foreach_add_(updates, parameters, alpha=weight_decay)
        weight_N = torch.stack(torch._foreach_norm(parameters))
        update_N = torch.stack(torch._foreach_norm(updates))
        ratio_N = torch.where((weight_N > 0) & (update_N > 0), weight_N / update_N, 1.0)
        torch._foreach_addcmul_(parameters, updates, (-group["lr"] * ratio_N).unbind())


# ---- the average -----------------------------------------------------------------------------------------------------


def average_decay(settings: Ema, step: int) -> float:
    """Share of the old average that a step, counted from 0, keeps."""
    return min(settings.decay, (1 + step) / (10 + step)) if settings.warmup else settings.decay


class Average:
    """The exponential moving average of a module's trainable parameters and of its buffers, in float32.

    A batch norm's running statistics are averaged as the weights are, because they describe what the weights before
    them compute: after a linear layer the average of the means is the mean under the averaged weights, where the latest
    statistics would belong to other weights. Integers, which count, are copied.
    """

    def __init__(self, module: nn.Module, settings: Ema) -> None:
        self.settings = settings
        self._tensors = {name: _as_average(tensor).clone() for name, tensor in _followed(module).items()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Take in the weights that a step, counted from 0, has left."""
        averages: tuple[list[Tensor], list[Tensor]] = [], []
        for name, tensor in _followed(module).items():
            average, latest = self._tensors[name], _as_average(tensor)
            if average.is_floating_point():
                averages[0].append(average)
                averages[1].append(latest)
            else:
                average.copy_(latest)
        torch._foreach_lerp_(*averages, 1 - average_decay(self.settings, step))

    def state(self) -> dict[str, Tensor]:
        """The averages by name: the tensors themselves, which the next update changes."""
        return dict(self._tensors)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""
        for name in sorted(state.keys() ^ self._tensors.keys()):
            raise ValueError(f"the average of {name} is {'not followed here' if name in state else 'missing'}")
        for name, average in self._tensors.items():
            if average.shape != state[name].shape:
                shapes = f"{tuple(state[name].shape)}, wanted {tuple(average.shape)}"
                raise ValueError(f"the average of {name}: got a tensor of shape {shapes}")
            average.copy_(state[name])

    @contextmanager
    def applied_to(self, module: nn.Module) -> Iterator[None]:
        """The module with the averages in place of its own tensors, which come back bit by bit."""
        live = _followed(module)
        own = {name: tensor.detach().clone() for name, tensor in live.items()}
        try:
            _write(self._tensors, live)
            yield
        finally:
            _write(own, live)


def _followed(module: nn.Module) -> dict[str, Tensor]:
    """What training changes: trainable parameters, and the buffers of the state dict."""
    tensors = module.state_dict(keep_vars=True)
    return {
        name: tensor for name, tensor in tensors.items() if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    }


def _as_average(tensor: Tensor) -> Tensor:
    return tensor.detach().float() if tensor.is_floating_point() else tensor.detach()


@torch.no_grad()
def _write(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    # In place, not through `.data`: compiled code, DDP's buckets and fused blocks keep hold of the tensors they know.
    for name, tensor in target.items():
        tensor.copy_(source[name])
