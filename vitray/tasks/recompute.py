"""Activation checkpointing: blocks that are recomputed in the backward pass. B images, N tokens, D width."""

from functools import partial
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitray.config.training import Recompute
from vitray.models.blocks import Block, Trace


def recompute_activations(task: nn.Module, part: Recompute) -> None:
    """Recompute every block of a task, or its feed-forward half, in the backward pass instead of storing it."""
    for block in task.modules():
        if isinstance(block, Block):
            # On the instance: a wrapper module would rename the parameters.
            match part:
                case "none":
                    pass
                case "feedforward":
                    block.feed = partial(_checkpointed_feed, block)
                case "blocks":
                    block.forward = partial(_checkpointed_forward, block)
                case _:
                    assert_never(part)


def _checkpointed_forward(block: Block, x_BND: Tensor, trace: Trace | None = None, key: str = "block") -> Tensor:
    # A trace stores the attention weights anyway, so recomputation would save no memory.
    if trace is not None or not torch.is_grad_enabled():
        return Block.forward(block, x_BND, trace, key)
    return checkpoint(partial(Block.forward, block), x_BND, use_reentrant=False, preserve_rng_state=True)


def _checkpointed_feed(block: Block, x_BND: Tensor, fused: bool) -> Tensor:
    if not torch.is_grad_enabled():
        return Block.feed(block, x_BND, fused)
    return checkpoint(partial(Block.feed, block), x_BND, fused, use_reentrant=False, preserve_rng_state=True)
