"""The task of a run: built from its settings, its activation checkpointing, and what it costs."""

from functools import partial
from typing import Any, NamedTuple, assert_never

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitray.config import Model, Run
from vitray.config.classification import Finetune, Supervised
from vitray.config.pretraining import Masked, Tokenizer
from vitray.config.self_supervised import Lejepa, SelfDistillation
from vitray.config.training import Recompute
from vitray.errors import ConfigError
from vitray.models.blocks import Block
from vitray.models.products import Products
from vitray.models.tokenizer import VisualTokenizer
from vitray.tasks.lejepa import JointPrediction
from vitray.tasks.masked import MaskedPrediction
from vitray.tasks.self_distillation import SelfDistilled
from vitray.tasks.supervised import Classification, Teacher
from vitray.weights.freezing import prepare

Task = Classification | MaskedPrediction | JointPrediction | SelfDistilled | VisualTokenizer


def build_task(run: Run, tokenizer: VisualTokenizer | None = None, teacher: Teacher | None = None) -> Task:
    """Return the task of a run, with new weights and with its frozen parameters frozen.

    Objective beit needs its `tokenizer`, and the training with task.distill its `teacher`, on the device of the task.
    """
    match run.task:
        case Supervised() | Finetune():
            if run.model.num_classes is None:
                raise ConfigError(f"model.num_classes: got null, expected how many classes task {run.task.kind} learns")
            task = Classification(run, teacher)
            if isinstance(run.task, Finetune):
                prepare(task.vit, run.task)
            return task
        case Masked():
            return MaskedPrediction(run, tokenizer)
        case Lejepa():
            return JointPrediction(run)
        case SelfDistillation():
            return SelfDistilled(run)
        case Tokenizer():
            return VisualTokenizer(run)
        case _:
            assert_never(run.task)


# ---- activation checkpointing ----------------------------------------------------------------------------------------

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


# ---- costs -----------------------------------------------------------------------------------------------------------


class TaskCosts(NamedTuple):
    """Parameters of a task, and the work of a training step for one image."""

    params: int
    """Of the network and of what is trained beside it: a decoder, a head of predictions, LoRA."""
    trained_params: int
    step_gflops: float
    """Billions of multiply-adds of the matrix products: forward and backward, with those of a teacher or tokenizer."""


def task_costs(run: Run, tokenizer: VisualTokenizer | None = None, teacher: Teacher | None = None) -> TaskCosts:
    """Return the costs of a run's task: the mean over the patch and image sizes of its steps."""

    def build(model: Model) -> Task:
        with torch.device("meta"):
            return build_task(run.model_copy(update={"model": model}), tokenizer, teacher)

    def step_gflops(task: Task) -> float:
        task.count(products := Products())
        return products.gflops

    task = build(run.model)
    gflops = sum(share * step_gflops(build(model)) for model, share in run.trained_models)
    parameters = [*task.parameters()]
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return TaskCosts(sum(each.numel() for each in parameters), trained, gflops)
