"""The precision of a run, and the parts of a network or of a loss that compute in float32 under autocast."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn


def at_least_float32(values: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 where it has it."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@cache  # asked at each step
def precision_on(device: torch.device, wanted: Literal["auto", "fp32", "bf16"]) -> Literal["fp32", "bf16"]:
    """Return the precision of compute.precision on a device."""
    if wanted != "auto":
        return wanted
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "fp32"


class _Tf32:
    """The threads that compute in TF32 now, and the setting of the process before the first of them."""

    def __init__(self) -> None:
        self.lock, self.threads, self.before = threading.Lock(), 0, "highest"

    def enter(self) -> None:
        with self.lock:
            if not self.threads:
                self.before = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("high")
            self.threads += 1

    def leave(self) -> None:
        with self.lock:
            self.threads -= 1
            if not self.threads:
                torch.set_float32_matmul_precision(self.before)


_tf32 = _Tf32()


@contextmanager
def tf32_products(device: torch.device, allowed: bool) -> Iterator[None]:
    """Let a GPU round the factors of fp32 products to TF32 for a block; the process keeps its own setting after it."""
    if not allowed or device.type != "cuda":
        yield
        return
    _tf32.enter()
    try:
        yield
    finally:
        _tf32.leave()


def is_autocast(device: torch.device) -> bool:
    """Return whether products compute in bf16 on a device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def round_products(network: nn.Module) -> None:
    """Keep the weights of a network's linear layers in bf16, to which autocast would round them in every pass.

    The outputs under autocast stay the same bits. Levels that may fuse their branches keep fp32: a norm is folded into
    their weights before these are rounded, once.
    """
    for part in network.children():
        if getattr(part, "branches", 1) > 1:
            continue
        if type(part) is nn.Linear:  # none with LoRA, which is merged in fp32
            for parameter in part.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        round_products(part)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which products have the precision of their factors."""
    if device.type == "meta":  # has no autocast
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
