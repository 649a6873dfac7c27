"""Other patch sizes at use (FlexiViT): the kernel of a linear stem, resized by the pseudo-inverse.

Shapes: D width, C colors, P x P pixels of a patch.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


@lru_cache(maxsize=64)
def resize_matrix(old: int, new: int) -> Tensor:
    """Return the matrix B (new^2 x old^2, float64) that resizes a patch x from side old to new bilinearly: B x."""
    basis = torch.eye(old**2, dtype=torch.float64).view(-1, 1, old, old)
    return F.interpolate(basis, size=(new, new), mode="bilinear").flatten(1).T


@lru_cache(maxsize=64)
def kernel_matrix(old: int, new: int) -> Tensor:
    """Return the pseudo-inverse of B^T (new^2 x old^2, float64), which resizes a kernel to fit patches resized by B.

    The new kernel w' minimizes the mean squared error between <B x, w'> and <x, w> over patches x of independent
    pixels. For a larger patch the error is 0, because B^T w' = w.
    """
    return torch.linalg.pinv(resize_matrix(old, new).T)


@lru_cache(maxsize=64)
def kernel_matrix_on(old: int, new: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the same matrix in the type and on the device of a kernel; training steps reuse it."""
    with torch.inference_mode(False):  # a tensor of inference mode could not be used in a training step
        return kernel_matrix(old, new).to(device, dtype)


def resize_kernel(weight_DCPP: Tensor, patch: int) -> Tensor:
    """Return a kernel for patches of another size; the kernel itself for its own."""
    old = weight_DCPP.shape[-1]
    if old == patch:
        return weight_DCPP
    return apply_matrix(kernel_matrix_on(old, patch, weight_DCPP.dtype, weight_DCPP.device), weight_DCPP, patch)


def apply_matrix(matrix: Tensor, weight_DCPP: Tensor, patch: int) -> Tensor:
    """Return a kernel resized by a matrix of `kernel_matrix_on`."""
    return (weight_DCPP.flatten(2) @ matrix.T).unflatten(2, (patch, patch))
