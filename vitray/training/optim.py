"""Parameter groups, optimizers, gradient clipping, and the moving average of the weights."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vitray.config.training import AdamW, Ema, Lamb, Muon, Optim, Sgd
from vitray.errors import ConfigError
from vitray.models.other_networks import OtherNetwork

# ---- parameter groups ------------------------------------------------------------------------------------------------

# Modules whose `weight` decays, a matrix or a kernel. So does `in_proj_weight`, the matrix of queries, keys and values
# of nn.MultiheadAttention, in torchvision's ViTs. Norms, biases, scales, tokens, positions and unknown modules do not.
DECAYING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def parameter_groups(module: nn.Module, optim: Optim) -> list[dict[str, Any]]:
    """Return the trainable parameters of a task, grouped by `weight_decay` and `lr_scale`, and for Muon by `parts`.

    `parts` is the number of matrices in a parameter whose momentum is made orthogonal; any other has 0.

    Level i of L learns at layer_decay ** (L + 1 - i). Stem, tokens and positions are level 0, the blocks 1 to L, and
    the last norm, the head and the task's other modules L + 1.
    """
    vit = module.get_submodule("vit")
    levels, top = _levels(vit)
    groups: dict[tuple[float, float, int], list[nn.Parameter]] = {}
    for path, parameter in module.named_parameters():  # a shared parameter once, under its first owner
        if parameter.requires_grad:
            path, _, name = path.rpartition(".")
            owner = module.get_submodule(path)
            is_matrix = isinstance(owner, DECAYING) and name == "weight"
            decays = is_matrix or name == "in_proj_weight"
            lr_scale, parts = optim.layer_decay ** (top - levels.get(parameter, top)), 0
            if isinstance(optim.rule, Muon) and is_matrix and path.startswith("vit.blocks."):
                lr_scale, parts = lr_scale * optim.rule.matrix_lr, 3 if path.endswith(".qkv") else 1
            groups.setdefault((lr_scale, optim.weight_decay if decays else 0.0, parts), []).append(parameter)
    return [
        {"params": parameters, "lr_scale": lr_scale, "weight_decay": weight_decay, "parts": parts}
        for (lr_scale, weight_decay, parts), parameters in groups.items()
    ]


def _levels(vit: nn.Module) -> tuple[dict[nn.Parameter, int], int]:
    """Return the level of each parameter below the last norm, and that of all others."""
    if isinstance(vit, OtherNetwork):  # without layer decay
        return {}, 0
    levels = dict.fromkeys(vit.parameters(recurse=False), 0)
    for part in ("stem", "positions", "level_positions"):
        levels |= dict.fromkeys(vit.get_submodule(part).parameters(), 0)
    for level, block in enumerate(vit.get_submodule("blocks").children(), start=1):
        levels |= dict.fromkeys(block.parameters(), level)
    return levels, len(list(vit.get_submodule("blocks").children())) + 1


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
                raise ConfigError("optim.rule.nesterov: got true, expected false where optim.rule.momentum is 0")
            # torch adds the decay to the gradient, so it passes through the momentum.
            optimizer = torch.optim.SGD(groups, lr=optim.lr, momentum=momentum, nesterov=nesterov, fused=fused)
        case Lamb(betas=betas, eps=eps):
            optimizer = LambOptimizer(groups, lr=optim.lr, betas=betas, eps=eps, foreach=device.type != "cpu")
        case Muon(momentum=momentum, iterations=iterations, betas=betas, eps=eps):
            optimizer = MuonOptimizer(groups, optim.lr, momentum, iterations, betas, eps, fused)
        case _:
            assert_never(optim.rule)
    set_learning_rate(optimizer, optim.lr)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each group, scaled by its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def set_weight_decay(optimizer: torch.optim.Optimizer, weight_decay: float) -> None:
    """Set the weight decay of each group that decays."""
    for group in optimizer.param_groups:
        if group["weight_decay"]:
            group["weight_decay"] = weight_decay


@torch.no_grad()
def match_layout(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's state tensors the memory layout of their parameters; values do not change.

    A checkpoint holds them in row-major order, and fused steps read parameter and state in the order of their memory.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def clip_gradients(parameters: Iterable[nn.Parameter], longest: float | None) -> Tensor:
    """Clip the gradients to norm `longest` and return their norm before; the host does not wait for the device."""
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if longest is not None:
        nn.utils.clip_grads_with_norm_(parameters, longest, norm)
    return norm


class LambOptimizer(torch.optim.Optimizer):
    """LAMB: Adam's update, scaled per tensor to lr times the norm of the weights.

    u = m' / (sqrt(v') + eps) + decay * w, with m' and v' bias-corrected;  w -= lr * |w| / |u| * u. The ratio is 1 if
    either norm is 0 or the group does not decay. `clip_gradients` clips the gradients before.

    With `foreach` all parameters of a group are updated together, by few kernels; torch before 2.15 has no documented
    operations for it. Without, one after the other: on a CPU, the moments of a parameter are then still in the cache
    for the next operation.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        foreach: bool = True,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "step": 0})
        self._foreach: Any = getattr(torch, "foreach", None) if foreach else None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters that have a gradient."""
        assert closure is None, "the loss is computed before the step"
        for group in self.param_groups:
            group["step"] += 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = {"m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)}
            if self._foreach is None:
                for parameter in parameters:
                    self._update(parameter, group)
            elif parameters:
                self._update_together(parameters, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), step, weight_decay = group["betas"], group["step"], group["weight_decay"]
        gradient, m, v = parameter.grad, self.state[parameter]["m"], self.state[parameter]["v"]
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = v.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"]).reciprocal_()
        update.mul_(m).div_(1 - beta1**step)
        if weight_decay == 0:
            parameter.add_(update, alpha=-group["lr"])
            return
        update.add_(parameter, alpha=weight_decay)
        parameter.addcmul_(update, -group["lr"] * _trust_ratio(parameter.norm(), update.norm()))

    def _update_together(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """The same for all parameters of a group, a few kernels for each line."""
        (beta1, beta2), step, weight_decay, foreach = (
            group["betas"],
            group["step"],
            group["weight_decay"],
            self._foreach,
        )
        gradients = [parameter.grad for parameter in parameters]
        m, v = ([self.state[parameter][name] for parameter in parameters] for name in ("m", "v"))
        foreach.lerp_(m, gradients, 1 - beta1)
        foreach.mul_(v, beta2)
        foreach.addcmul_(v, gradients, gradients, value=1 - beta2)
        updates = foreach.sqrt(v)
        foreach.div_(updates, math.sqrt(1 - beta2**step))
        foreach.add_(updates, group["eps"])
        foreach.reciprocal_(updates)
        foreach.mul_(updates, m)
        foreach.div_(updates, 1 - beta1**step)
        if weight_decay:
            foreach.add_(updates, parameters, alpha=weight_decay)
            norms = (torch.stack(foreach.norm(tensors)) for tensors in (parameters, updates))
            foreach.mul_(updates, _trust_ratio(*norms).unbind())
        foreach.add_(parameters, updates, alpha=-group["lr"])


def _trust_ratio(weight_norm: Tensor, update_norm: Tensor) -> Tensor:
    # A tensor, so that the host does not wait for the device.
    return torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)


class MuonOptimizer(torch.optim.Optimizer):
    """Muon for the groups whose `parts` is not 0, AdamW for the others.

    m = momentum * m + g;  w *= 1 - lr * decay;  w -= lr * sqrt(max(1, rows / columns)) * orthogonal(g + momentum * m)
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        iterations: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "iterations": iterations, "betas": betas, "eps": eps}
        super().__init__(groups, {**defaults, "weight_decay": 0.0, "parts": 0, "fused": fused})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters that have a gradient."""
        assert closure is None, "the loss is computed before the step"
        # Matrices of one shape are made orthogonal together, those of all groups.
        momenta: dict[torch.Size, list[tuple[Tensor, Tensor, float]]] = {}
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not group["parts"]:
                self._step_adamw(parameters, group)
                continue
            for parameter in parameters:
                gradient = parameter.grad
                if not self.state[parameter]:
                    self.state[parameter]["m"] = torch.zeros_like(parameter)
                m = self.state[parameter]["m"].mul_(group["momentum"]).add_(gradient)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                ahead = gradient.add(m, alpha=group["momentum"])
                for weight, direction in zip(parameter.chunk(group["parts"]), ahead.chunk(group["parts"]), strict=True):
                    momenta.setdefault(weight.shape, []).append((weight, direction, group["lr"]))
        iterations = self.defaults["iterations"]
        for (rows, columns), matrices in momenta.items():
            weights, directions, rates = zip(*matrices, strict=True)
            updates = orthogonal(torch.stack(directions), iterations).unbind()
            for weight, update, lr in zip(weights, updates, rates, strict=True):
                weight.add_(update, alpha=-lr * math.sqrt(max(1, rows / columns)))

    def _step_adamw(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if not parameters:
            return
        for parameter in parameters:
            if not self.state[parameter]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else None)
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter].update(step=step, **moments)
        m, v, steps = (
            [self.state[parameter][name] for parameter in parameters] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        beta1, beta2 = group["betas"]
        adamw(
            list(parameters),
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            m,
            v,
            [],
            steps,
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


# The quintic of Jordan et al.: steep at 0, so that small singular values grow soon, at the price of 0.7 to 1.2 for 1.
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonal(x_BRC: Tensor, iterations: int) -> Tensor:
    """Return the matrices with the same singular vectors and singular values near 1, by Newton-Schulz iterations.

    In float32 on a CPU, whose bfloat16 products are slow before AVX-512; in bfloat16 on other devices.
    """
    a, b, c = QUINTIC
    dtype, is_tall = x_BRC.dtype, x_BRC.shape[1] > x_BRC.shape[2]
    x = x_BRC if dtype == torch.float64 or x_BRC.device.type == "cpu" else x_BRC.bfloat16()
    x = x.mT if is_tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram_BRR = x @ x.mT
        x = a * x + (b * gram_BRR + c * gram_BRR @ gram_BRR) @ x
    return (x.mT if is_tall else x).to(dtype)


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
        # The live tensors, which training changes in place.
        self._live = _tracked(module)
        self._tensors = {name: _as_average(tensor).clone() for name, tensor in self._live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after a step, counted from 0."""
        averages: tuple[list[Tensor], list[Tensor]] = [], []
        for name, tensor in self._live.items():
            average, latest = self._tensors[name], _as_average(tensor)
            if average.is_floating_point():
                averages[0].append(average)
                averages[1].append(latest)
            else:
                average.copy_(latest)
        get_ema_multi_avg_fn(average_decay(self.settings, step))(*averages, None)

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
                shapes = f"{tuple(state[name].shape)}, expected {tuple(average.shape)}"
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
