"""What a run's task costs: its parameters, and the matrix products of a training step."""

from typing import NamedTuple

import torch

from vitray.config import Model, Run
from vitray.models.products import Products
from vitray.models.tokenizer import VisualTokenizer
from vitray.tasks.build import Task, build_task
from vitray.tasks.distillation import Teacher


class TaskCosts(NamedTuple):
    """Parameters of a task, and the work of a training step for one image."""

    params: int
    """Of the network and of what is trained beside it: a decoder, a head of predictions, LoRA."""
    trained_params: int
    step_gflops: float
    """Billions of multiply-adds of the matrix products: forward and backward, with those of a teacher or tokenizer."""


def task_costs(run: Run, tokenizer: VisualTokenizer | None = None, teacher: Teacher | None = None) -> TaskCosts:
    """Return the costs of a run's task; with model.patches, the mean over the patch sizes that its steps draw."""

    def build(model: Model) -> Task:
        with torch.device("meta"):
            return build_task(run.model_copy(update={"model": model}), tokenizer, teacher)

    def step_gflops(task: Task) -> float:
        task.count(products := Products())
        return products.gflops

    task = build(run.model)
    drawn = [step_gflops(build(run.model.at_patch(patch))) for patch in run.model.patches] or [step_gflops(task)]
    parameters = [*task.parameters()]
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return TaskCosts(sum(each.numel() for each in parameters), trained, sum(drawn) / len(drawn))
