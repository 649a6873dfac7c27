"""Activation checkpointing: blocks that are recomputed in the backward pass."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitray.config.training import Recompute
from vitray.models.blocks import Block

METHODS: dict[Recompute, str | None] = {"none": None, "feedforward": "feed", "blocks": "forward"}


def recompute_activations(task: nn.Module, part: Recompute) -> None:
    """Recompute every block of a task, or its feed-forward half, in the backward pass instead of storing it."""
    if method := METHODS[part]:
        for block in task.modules():
            if isinstance(block, Block):
                # On the instance: a wrapper module would rename the parameters.
                setattr(block, method, partial(_checkpointed, block, method))


def _checkpointed(block: Block, method: str, *inputs: Any) -> Tensor:
    compute = partial(getattr(Block, method), block)
    # A trace stores the attention weights anyway, so recomputation would save no memory.
    if not torch.is_grad_enabled() or any(isinstance(value, dict) for value in inputs):
        return compute(*inputs)
    return checkpoint(compute, *inputs, use_reentrant=False)
