"""The task of a run, built from its settings."""

from typing import assert_never

from vitray.config import Run
from vitray.config.classification import Finetune, Supervised
from vitray.config.pretraining import Masked, Tokenizer
from vitray.errors import ConfigError
from vitray.models.tokenizer import VisualTokenizer
from vitray.tasks.distillation import Teacher
from vitray.tasks.masked import MaskedPrediction
from vitray.tasks.supervised import Classification
from vitray.weights.freezing import prepare

Task = Classification | MaskedPrediction | VisualTokenizer


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
        case Tokenizer():
            return VisualTokenizer(run)
        case _:
            assert_never(run.task)
