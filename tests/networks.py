"""Networks of the tests of weights, and the difference of two."""

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


@torch.no_grad()
def difference(ours: nn.Module, theirs: nn.Module, height: int, width: int | None = None) -> float:
    """The largest difference of two networks' logits, in double precision."""
    x = torch.randn(2, 3, height, width or height, generator=torch.Generator().manual_seed(1)).double()
    output = theirs.double()(x)
    return (ours.double()(x) - getattr(output, "logits", output)).abs().max().item()
