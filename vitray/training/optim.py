"""Parameter groups, optimizers, gradient clipping, and the moving average of the weights."""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* updates many tensors at once, as torch's own optimizers do; no public module exports it.

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from vitray.config.training import AdamW, Ema, LambSettings, Optim, Sgd
from vitray.errors import ConfigError

# ---- parameter groups ------------------------------------------------------------------------------------------------

# Modules whose `weight` decays, a matrix or a kernel. Norms, biases, scales, tokens, positions and unknown modules do
# not decay.
DECAYING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def parameter_groups(module: nn.Module, optim: Optim) -> list[dict[str, Any]]:
    """Return the trainable parameters of a task, grouped by `weight_decay` and `lr_scale`.

    Level i of L learns at layer_decay ** (L + 1 - i). Stem, tokens and positions are level 0, the blocks 1 to L, and
    the last norm, the head and the task's other modules L + 1.
    """
    vit = module.get_submodule("vit")
    levels, top = _levels(vit), len(list(vit.get_submodule("blocks").children())) + 1
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for path, parameter in module.named_parameters():  # a shared parameter once, under its first owner
        if parameter.requires_grad:
            owner, _, name = path.rpartition(".")
            decays = isinstance(module.get_submodule(owner), DECAYING) and name == "weight"
            lr_scale = optim.layer_decay ** (top - levels.get(parameter, top))
            groups.setdefault((lr_scale, optim.weight_decay if decays else 0.0), []).append(parameter)
    return [
        {"params": parameters, "lr_scale": lr_scale, "weight_decay": weight_decay}
        for (lr_scale, weight_decay), parameters in groups.items()
    ]


def _levels(vit: nn.Module) -> dict[nn.Parameter, int]:
    """Return the level of each parameter below the last norm."""
    levels = dict.fromkeys(vit.parameters(recurse=False), 0)
    for part in ("stem", "positions"):
        levels |= dict.fromkeys(vit.get_submodule(part).parameters(), 0)
    for level, block in enumerate(vit.get_submodule("blocks").children(), start=1):
        levels |= dict.fromkeys(block.parameters(), level)
    return levels


# ---- optimizers ------------------------------------------------------------------------------------------------------


def build_optimizer(module: nn.Module, optim: Optim, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer of a task's trainable parameters, at the peak learning rate."""
    groups = parameter_groups(module, optim)
    # One kernel per group. On a CPU core a step of AdamW took 14 ms fused, 90 foreach and 56 tensor by tensor; of SGD
    # 12, 35 and 23 (vit_s12x1_16, torch 2.15). Other devices use torch's default.
    fused = True if device.type in ("cpu", "cuda") else None
    match optim.rule:
        case AdamW(betas=betas, eps=eps):
            optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=eps, fused=fused)
        case Sgd(momentum=momentum, nesterov=nesterov):
            if nesterov and not momentum:
                raise ConfigError("optim.rule.nesterov: got true, wanted false where optim.rule.momentum is 0")
            # torch adds the decay to the gradient, so it passes through the momentum.
            optimizer = torch.optim.SGD(groups, lr=optim.lr, momentum=momentum, nesterov=nesterov, fused=fused)
        case LambSettings(betas=betas, eps=eps):
            optimizer = Lamb(groups, lr=optim.lr, betas=betas, eps=eps)
        case _:
            assert_never(optim.rule)
    set_learning_rate(optimizer, optim.lr)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each group, scaled by its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def clip_gradients(parameters: Iterable[nn.Parameter], longest: float | None) -> Tensor:
    """Clip the gradients to norm `longest` and return their norm before; the host does not wait for the device."""
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if longest is not None:
        nn.utils.clip_grads_with_norm_(parameters, longest, norm)
    return norm


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam's update, scaled per tensor to lr times the norm of the weights.

    u = m' / (sqrt(v') + eps) + decay * w, with m' and v' bias-corrected;  w -= lr * |w| / |u| * u. The ratio is 1 if
    either norm is 0 or the group does not decay. `clip_gradients` clips the gradients before.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters that have a gradient."""
        assert closure is None, "the loss is computed before the step"
        for group in self.param_groups:
            group["step"] += 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(parameters, [parameter.grad for parameter in parameters], group)

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
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
        # The update replaces the denominator in place, to save a copy of the weights.
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


# ---- moving average --------------------------------------------------------------------------------------------------


def average_decay(settings: Ema, step: int) -> float:
    """Return the weight of the old average at a step, counted from 0."""
    return min(settings.decay, (1 + step) / (10 + step)) if settings.warmup else settings.decay


class Average:
    """The exponential moving average of a module's trainable parameters and buffers, in float32.

    A batch norm's running statistics are averaged like the weights, because the latest statistics belong to the latest
    weights. Integer counters are copied.
    """

    def __init__(self, module: nn.Module, settings: Ema) -> None:
        self.settings = settings
        self._tensors = {name: _as_average(tensor).clone() for name, tensor in _tracked(module).items()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Add the weights after a step, counted from 0."""
        averages: tuple[list[Tensor], list[Tensor]] = [], []
        for name, tensor in _tracked(module).items():
            average, latest = self._tensors[name], _as_average(tensor)
            if average.is_floating_point():
                averages[0].append(average)
                averages[1].append(latest)
            else:
                average.copy_(latest)
        torch._foreach_lerp_(*averages, 1 - average_decay(self.settings, step))

    def state(self) -> dict[str, Tensor]:
        """Return the averages by name, without a copy."""
        return dict(self._tensors)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state`."""
        for name in sorted(state.keys() ^ self._tensors.keys()):
            raise ValueError(f"the average of {name} is {'not tracked here' if name in state else 'missing'}")
        for name, average in self._tensors.items():
            if average.shape != state[name].shape:
                shapes = f"{tuple(state[name].shape)}, wanted {tuple(average.shape)}"
                raise ValueError(f"the average of {name}: got a tensor of shape {shapes}")
            average.copy_(state[name])

    @contextmanager
    def applied_to(self, module: nn.Module) -> Iterator[None]:
        """Replace the module's tensors by the averages inside the block, and restore them bit by bit."""
        live = _tracked(module)
        own = {name: tensor.detach().clone() for name, tensor in live.items()}
        try:
            _write(self._tensors, live)
            yield
        finally:
            _write(own, live)


def _tracked(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that training changes: trainable parameters and persistent buffers."""
    tensors = module.state_dict(keep_vars=True)
    return {
        name: tensor for name, tensor in tensors.items() if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    }


def _as_average(tensor: Tensor) -> Tensor:
    return tensor.detach().float() if tensor.is_floating_point() else tensor.detach()


@torch.no_grad()
def _write(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    # In place, because compiled code, DDP's buckets and fused blocks hold references to these tensors.
    for name, tensor in target.items():
        tensor.copy_(source[name])
