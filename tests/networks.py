"""Networks of the tests of weights."""

import torch
from torch import nn


def scrambled(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with random parameters and buffers, so that another function has other outputs."""
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator) * 0.2
            tensor.copy_(noise.abs() + 0.5 if key.endswith("running_var") else noise)
    return module.eval()
