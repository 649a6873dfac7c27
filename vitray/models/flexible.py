"""Other patch sizes at use (FlexiViT): the kernel of a linear stem, resized by the pseudo-inverse.

Shapes: D width, C colours, P x P pixels of a patch.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


@lru_cache(maxsize=64)
def resize_matrix(old: int, new: int) -> Tensor:
    """Return B, new^2 x old^2 in float64: a patch of old pixels a side, resized bilinearly to new, is B times it."""
    basis = torch.eye(old**2, dtype=torch.float64).view(-1, 1, old, old)
    return F.interpolate(basis, size=(new, new), mode="bilinear").flatten(1).T


@lru_cache(maxsize=64)
def kernel_matrix(old: int, new: int) -> Tensor:
    """Return the pseudo-inverse of B^T, new^2 x old^2 in float64: what resizes a kernel as B resizes patches.

    The new kernel w' is the one with the least error of <B x, w'> as <x, w> over patches x of independent pixels. For a
    larger patch the error is 0, because B^T w' = w.
    """
    return torch.linalg.pinv(resize_matrix(old, new).T)


def resize_kernel(weight_DCPP: Tensor, patch: int) -> Tensor:
    """Return a kernel for patches of another size; the kernel itself for its own."""
    old = weight_DCPP.shape[-1]
    if old == patch:
        return weight_DCPP
    matrix = kernel_matrix(old, patch).to(weight_DCPP)
    return (weight_DCPP.flatten(2) @ matrix.T).unflatten(2, (patch, patch))
