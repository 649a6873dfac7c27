"""Drop path (stochastic depth): a branch is left out for some samples of a batch, and computed for the others alone.

Shapes: B samples of a micro-batch, P branches, K samples that a branch keeps.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Draw = Literal["sample", "share"]


class Kept(NamedTuple):
    """The samples that a branch computes, and the factors of its outputs, whose expectation over draws is 1."""

    rows: Tensor | None = None
    """Of K samples; None: all."""
    factors: Tensor | None = None
    """Of the K outputs; None: `factor` for all."""
    factor: float = 1.0

    def of(self, x_BND: Tensor) -> Tensor:
        """Return the samples of the input that the branch computes."""
        return x_BND if self.rows is None else x_BND.index_select(0, self.rows)

    def add(self, x_BND: Tensor, h_KND: Tensor) -> Tensor:
        """Return the sum of an input and the branch's outputs."""
        if self.factors is not None:
            h_KND = h_KND * self.factors[:, None, None]
        if self.rows is None:
            return (x_BND + h_KND).to(x_BND.dtype)  # LayerScale is float32
        return x_BND.index_add(0, self.rows, h_KND.to(x_BND.dtype), alpha=self.factor)


ALL = Kept()
# A GPU computes all samples below this rate: to pick some and to add them costs memory traffic, as much as a tenth of
# a network's products at 224 px (counted, not measured on a GPU; LOG 2026-11-28).
LEAST_ON_GPU = 0.2


def draw_kept(x_BND: Tensor, branches: int, rate: float, draw: Draw, computes_all: bool = False) -> list[Kept]:
    """Return the samples of an input that each branch keeps; with `computes_all`, others have the factor 0.

    A branch always computes a sample, if only with the factor 0: its parameters need a gradient on every worker.
    """
    # Compiled code would be compiled anew for each number of kept samples.
    costs_more = torch.compiler.is_compiling() or (x_BND.device.type == "cuda" and rate < LEAST_ON_GPU)
    if computes_all or (draw == "sample" and costs_more):
        return [Kept(None, factors_B) for factors_B in draw_factors(x_BND, branches, rate, draw).unbind(1)]
    if draw == "share":
        rows_KP, factors_PK = _shares(x_BND, branches, rate)
        return [Kept(*each) for each in zip(rows_KP.unbind(1), factors_PK, strict=True)]
    # Drawn on the host, which then knows how many are kept, and does not wait for the device.
    chance_BP = torch.full((x_BND.shape[0], branches), 1 - rate, device="cpu")
    kept = []
    for is_kept_B in torch.bernoulli(chance_BP).unbind(1):
        rows_K, factor = is_kept_B.nonzero()[:, 0], 1 / (1 - rate)
        if not len(rows_K):
            rows_K, factor = torch.zeros(1, dtype=torch.long, device="cpu"), 0.0
        kept.append(Kept(rows_K.to(x_BND.device, non_blocking=True), factor=factor))
    return kept


def draw_factors(x_BND: Tensor, branches: int, rate: float, draw: Draw) -> Tensor:
    """Return the factor of each sample and branch, BP: 0 where the branch is left out."""
    if draw == "share":
        rows_KP, factors_PK = _shares(x_BND, branches, rate)
        return x_BND.new_zeros(x_BND.shape[0], branches).scatter(0, rows_KP, factors_PK.T)
    chance_BP = torch.full((x_BND.shape[0], branches), 1 - rate, device=x_BND.device)
    return torch.bernoulli(chance_BP).to(x_BND.dtype) / (1 - rate)


def _shares(x_BND: Tensor, branches: int, rate: float) -> tuple[Tensor, Tensor]:
    """Return a fixed number of random samples for each branch, KP, and their factors, PK.

    The kept share of a batch is seldom a whole number: it is rounded up, and the last sample has the factor 0 so often
    that each one is kept with the right probability. All shapes are known before the draws.
    """
    share = x_BND.shape[0] * (1 - rate)
    count = math.ceil(share - 1e-9)
    rows_KP = torch.rand(x_BND.shape[0], branches, device=x_BND.device).argsort(0)[:count]
    is_last_kept_P1 = torch.bernoulli(torch.full((branches, 1), min(1.0, share - count + 1), device=x_BND.device))
    factors_PK = torch.cat([torch.ones(branches, count - 1, device=x_BND.device), is_last_kept_P1], dim=1)
    return rows_KP, factors_PK.to(x_BND.dtype) / (1 - rate)
