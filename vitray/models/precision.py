"""Parts of a network or of a loss that compute in float32 under autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 where it has it."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which products have the precision of their factors."""
    if device.type == "meta":  # has no autocast
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
