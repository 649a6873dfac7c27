"""Settings of distillation: answers of a teacher, or of another submodel, that are learned beside the labels."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vitray.config.sections import Positive, Section, Text


class Distillation(Section):
    """Distillation from a teacher. The distillation token's head learns the teacher's outputs; without that token, the
    only head does."""

    teacher: Text
    """The teacher: a model folder (a path, s3://, runs:/, models:/name@alias) or a weights file of another library."""
    target: Literal["hard", "soft"] = "hard"
    """hard: the cross-entropy with the teacher's most probable class; soft: temperature^2 times the Kullback-Leibler
    divergence from the teacher's probabilities, averaged over images. DeiT's code also divides it by the number of
    classes."""
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the teacher's term in the loss; the labels' term has 1 - weight."""
    temperature: Positive = 1.0
    """Divides the logits of both networks before the softmax. Only for target soft; the DeiT paper: 3, with weight
    0.1."""

    @model_validator(mode="after")
    def _temperature_acts(self) -> Self:
        if self.target == "hard" and self.temperature != 1:
            raise ValueError(f"temperature: got {self.temperature:g} with target hard, expected 1, or target soft")
        return self


Distill = Annotated[Distillation | None, Field(description="Distillation from a teacher (DeiT); null: none.")]


class Cosub(Section):
    """Co-training of two submodels, each a draw of drop path. An image passes through both, and each learns the
    labels and the other's answers."""

    weight: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Weight of the other submodel's term in the loss; the labels' term has 1 - weight. Its targets are the other's
    detached probabilities: a softmax with task.loss softmax, a sigmoid for each class with bce."""


CoTraining = Annotated[
    Cosub | None, Field(description="Co-training of two submodels (cosub); needs model.drop_path; null: none.")
]
