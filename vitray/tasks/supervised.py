"""What a run learns: a module whose forward is the loss, and which owns exactly the parameters that are trained.

Shapes: B images, C colours, H x W pixels, N tokens, D width, K classes.
"""

from functools import partial
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitray.config import Run
from vitray.config.pretraining import Masked, Tokenizer
from vitray.config.training import Finetune, Recompute
from vitray.config.training import Supervised as FromScratch
from vitray.errors import ConfigError
from vitray.models.blocks import Block, Trace
from vitray.models.tokenizer import VisualTokenizer
from vitray.models.vit import ViT
from vitray.tasks.masked import MaskedPrediction
from vitray.weights.freezing import freeze


class Supervised(nn.Module):
    """Classes, learned from labels, by all of a network or by some of its parts."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        assert isinstance(run.task, FromScratch | Finetune)
        self.settings = run.task
        self.vit = ViT(run.model)

    def forward(self, images_BCHW: Tensor, targets_BK: Tensor) -> Tensor:
        """The mean loss over the batch."""
        logits_BK = self.vit(images_BCHW)
        match self.settings.loss:
            case "softmax":
                return soft_cross_entropy(logits_BK, targets_BK, self.settings.smoothing)
            case "bce":
                return binary_cross_entropy(logits_BK, targets_BK, self.settings.smoothing)
            case _:
                assert_never(self.settings.loss)


Task = Supervised | MaskedPrediction | VisualTokenizer


def build_task(run: Run, tokenizer: VisualTokenizer | None = None) -> Task:
    """The task that a run describes, with new weights, and with those frozen that are not to be trained.

    `tokenizer` is the one that objective beit names, on the device where the task will be.
    """
    match run.task:
        case FromScratch():
            return _supervised(run)
        case Finetune():
            task = _supervised(run)
            freeze(task.vit, run.task)
            return task
        case Masked():
            return MaskedPrediction(run, tokenizer)
        case Tokenizer():
            return VisualTokenizer(run)
        case _:
            assert_never(run.task)


def _supervised(run: Run) -> Supervised:
    if run.model.num_classes is None:
        raise ConfigError(f"model.num_classes: got null, wanted how many classes task {run.task.kind} learns")
    return Supervised(run)


# ---- losses ----------------------------------------------------------------------------------------------------------


def soft_cross_entropy(logits_BK: Tensor, targets_BK: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy with a distribution as target, in float32: the mean over the batch."""
    return F.cross_entropy(logits_BK.float(), targets_BK.float(), label_smoothing=smoothing)


def binary_cross_entropy(logits_BK: Tensor, targets_BK: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy of each class by itself, in float32: the mean over the batch and the classes.

    A class is present wherever a mixed target has a share of it. Smoothing comes after that question: DeiT's code asks
    it of smoothed targets, in which every class has a share (`--bce-loss --smoothing 0.1`).
    """
    present_BK = (targets_BK > 0).float()
    smoothed_BK = (1 - smoothing) * present_BK + smoothing / present_BK.shape[1]
    return F.binary_cross_entropy_with_logits(logits_BK.float(), smoothed_BK)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


def recompute_activations(task: nn.Module, what: Recompute) -> None:
    """Let every block of a task, or its feed-forward half, keep its input alone and run again in the backward pass."""
    for block in task.modules():
        if isinstance(block, Block):
            # On the instance: a wrapper module would rename the parameters.
            match what:
                case "none":
                    pass
                case "feedforward":
                    block.feed = partial(_feed_again, block)
                case "blocks":
                    block.forward = partial(_run_again, block)
                case _:
                    assert_never(what)


def _run_again(block: Block, x_BND: Tensor, trace: Trace | None = None, key: str = "block") -> Tensor:
    # A trace keeps what the block computes anyway.
    if trace is not None or not torch.is_grad_enabled():
        return Block.forward(block, x_BND, trace, key)
    return checkpoint(partial(Block.forward, block), x_BND, use_reentrant=False, preserve_rng_state=True)


def _feed_again(block: Block, x_BND: Tensor, fused: bool) -> Tensor:
    if not torch.is_grad_enabled():
        return Block.feed(block, x_BND, fused)
    return checkpoint(partial(Block.feed, block), x_BND, fused, use_reentrant=False, preserve_rng_state=True)
