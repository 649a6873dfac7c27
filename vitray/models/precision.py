"""The precision of a run, and the parts of a network or of a loss that compute in float32 under autocast."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Literal

import torch
from torch import Tensor


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


def is_autocast(device: torch.device) -> bool:
    """Return whether products compute in bf16 on a device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which products have the precision of their factors."""
    if device.type == "meta":  # has no autocast
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
